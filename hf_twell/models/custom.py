"""Stock model classes that are sparse from the start, and that read the checkpoints of the paper's authors too.

Each is its stock class with sparse blocks, and bears its name: what it saves, prints and is looked up by (Trainer's
label smoothing, FSDP's and PEFT's records) is the stock architecture. Where that cannot say ReLU of the blocks alone
(Qwen3.5), the class of our own `model_type` takes its place.
"""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.utils.hub import cached_file

from hf_twell.blocks import modeling_twell
from hf_twell.blocks.architectures import find_ffns, layers_of
from hf_twell.blocks.modeling_twell import TwellBlocks
from hf_twell.convert.entry import check_entry
from hf_twell.convert.own_type import give_own_type, say_relu
from hf_twell.convert.sparsify import chosen_layers, patch
from hf_twell.files.configs import check_generation_config, one_line_errors, read_config, saying_quantized
from hf_twell.files.weights import (
    check_complete,
    check_finite,
    check_shapes,
    check_sizes,
    hub_options,
    tensor_shapes,
    weight_files,
)
from hf_twell.models.gguf_files import MODEL_TYPES, is_gguf, load_gguf, read_gguf
from hf_twell.ops import api

if TYPE_CHECKING:  # what the mixin is put before
    from transformers import PreTrainedModel as Stock
else:
    Stock = object

# The paper's authors' `model_type`, and the stock architecture that computes the same with ReLU.
PUBLISHED_TYPES = {"llama_sparse_relu": "llama", "qwen2_sparse_relu": "qwen2"}


class TwellModel(Stock):
    """Mixin put before a stock causal language model; see `TwellLlamaForCausalLM`."""

    def __init__(self, config: PreTrainedConfig, *, backend: str = "auto", layers: Iterable[int] | None = None) -> None:
        api.resolve(backend, "cpu" if backend == "auto" else backend)
        config = copy.deepcopy(config)
        if check_entry(config) is None:
            make_relu = give_own_type if isinstance(self, TwellBlocks) else say_relu
            make_relu(config)
        super().__init__(config)
        # The weights may not be there yet: from_pretrained builds on the meta device. Its blocks are known ones.
        sites = find_ffns(self)
        patch(self, sites, chosen_layers(self.config, layers, layers_of(sites)), backend)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *model_args: Any,
        config: PreTrainedConfig | None = None,
        **options: Any,
    ) -> Any:
        path = pretrained_model_name_or_path
        if path is None:  # a state dict in hand
            return super().from_pretrained(path, *model_args, config=config, **options)
        hub = hub_options(options)
        wants_info = options.pop("output_loading_info", False)
        gguf_file = options.pop("gguf_file", None)
        if gguf_file is not None or is_gguf(path):
            file = path if gguf_file is None else _gguf_of(path, str(gguf_file), hub)
            model, info = cls._from_gguf(file, config, options)
            return (model, info) if wants_info else model
        raw = read_config(path, **hub)
        files = weight_files(path, options.get("variant"), **hub)
        shapes = tensor_shapes(files)
        check_generation_config(path, **hub)
        part = raw.get(cls.config_class.base_config_key, raw)  # the text model's of one that sees, too
        given_type, types = part.get("model_type"), cls._types()
        if given_type in PUBLISHED_TYPES and given_type in types:
            model, info = cls._from_published(path, raw, files, shapes, config, options)
        elif given_type in types:
            if not isinstance(config, PreTrainedConfig) and not options.get("ignore_mismatched_sizes"):
                with saying_quantized(path, raw), one_line_errors(f"{path}: its config.json makes no model"):
                    cls._check_config(path, cls.config_class.from_dict(copy.deepcopy(part)), shapes)
            options |= {"use_safetensors": True, "output_loading_info": True}
            with saying_quantized(path, raw):
                model, info = super().from_pretrained(path, *model_args, config=config, **options)
        else:
            raise ValueError(f"{path} is a {given_type!r} model; {cls.__qualname__} takes {', '.join(types)}")
        check_finite(path, model.named_parameters())
        if not wants_info:
            check_complete(path, info["missing_keys"])
        return (model, info) if wants_info else model

    @classmethod
    def _from_published(cls, path, raw, files, shapes, config, options):
        """Load what the paper's authors' classes saved; see `published_config` and `published_weights`."""
        with one_line_errors(f"{path}: its config.json makes no model"):
            if config is None:
                config = _with_options(published_config(path, raw, shapes), options)
            cls._check_config(path, config, _upright_shapes(shapes, config))
        weights = published_weights(raw, files, shapes, config)
        for name in (*hub_options(options), "use_safetensors", "variant"):
            options.pop(name, None)
        options.setdefault("dtype", config.dtype or torch.float32)
        options |= {"state_dict": weights, "output_loading_info": True}
        model, info = super().from_pretrained(None, config=config, **options)
        strangers = sorted(name for name in info["unexpected_keys"] if ".mlp." in name)
        if strangers:
            raise ValueError(f"{path}: {strangers[0]} has no place in a stock {cls.__name__}, so it cannot be exact")
        model.name_or_path = model.config._name_or_path = str(path)
        if Path(path, "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(path)
        return model, info

    @classmethod
    def _from_gguf(cls, path, config, options):
        file = read_gguf(path)
        if MODEL_TYPES.get(file.architecture, file.architecture) != cls._types()[0]:
            raise ValueError(f"{path} is a {file.architecture!r} model; {cls.__qualname__} takes {cls._types()[0]}")
        if config is not None:
            raise ValueError(f"{path}: a GGUF file is its own config; leave config out")
        for name in (*hub_options(options), "use_safetensors", "variant"):
            options.pop(name, None)
        return load_gguf(super().from_pretrained, file, **options)

    @classmethod
    def _check_config(cls, path, config, shapes):
        check_sizes(path, config, shapes)
        stock: Any = next(base for base in cls.__mro__ if not issubclass(base, TwellModel))  # or our own type's
        with torch.device("meta"):
            check_shapes(path, stock(config), shapes)

    @classmethod
    def _types(cls):
        own_type = cls.config_class.model_type
        stock_type = own_type.removeprefix(modeling_twell.PREFIX)
        published = [name for name, stock in PUBLISHED_TYPES.items() if stock == stock_type]
        return list(dict.fromkeys([stock_type, own_type, *published]))


class TwellLlamaForCausalLM(TwellModel, LlamaForCausalLM):
    """`LlamaForCausalLM` whose feed-forward blocks are sparse.

        model = TwellLlamaForCausalLM.from_pretrained(path)

    Formula: y = (relu(x Wg^T) * (x Wu^T)) Wd^T in every block. `from_pretrained` takes dense checkpoints (their
    activation becomes ReLU, as `hf_twell.sparsify` does it), GGUF files (`gguf_file=`) too, those this package saved,
    and those of the paper's authors (`model_type` `llama_sparse_relu`; `down_proj` in either orientation). It has all
    arguments of the stock class, device maps with offloading included, and `backend` and `layers` of
    `hf_twell.sparsify`. `save_pretrained` writes the stock form: plain Transformers loads it, without this package. No
    code from the checkpoint is ever run.

    Raises:
        ValueError: another model type, pickled, missing, mis-shaped or non-finite weights, or a `twell` entry in the
            config that cannot be true.
    """


class TwellQwen2ForCausalLM(TwellModel, Qwen2ForCausalLM):
    """`Qwen2ForCausalLM` whose feed-forward blocks are sparse; takes `qwen2_sparse_relu` too. See Llama's."""


class TwellQwen3ForCausalLM(TwellModel, Qwen3ForCausalLM):
    """`Qwen3ForCausalLM` whose feed-forward blocks are sparse. See `TwellLlamaForCausalLM`."""


class TwellQwen3_5ForCausalLM(TwellModel, modeling_twell.TwellQwen3_5ForCausalLM):
    """`Qwen3_5ForCausalLM` whose feed-forward blocks are sparse; of a model that sees, it takes the text model.

    It saves as a `model_type` of our own, as its linear attention keeps SiLU: see `hf_twell.blocks.modeling_twell`, a
    copy of which is saved along. See `TwellLlamaForCausalLM`.
    """


class TwellQwen3_5ForConditionalGeneration(TwellModel, modeling_twell.TwellQwen3_5ForConditionalGeneration):
    """`Qwen3_5ForConditionalGeneration` whose text model's blocks are sparse. See `TwellQwen3_5ForCausalLM`."""


CLASSES = (
    TwellLlamaForCausalLM,
    TwellQwen2ForCausalLM,
    TwellQwen3ForCausalLM,
    TwellQwen3_5ForCausalLM,
    TwellQwen3_5ForConditionalGeneration,
)
for _class in CLASSES:
    # save_pretrained and others write type(model).__name__ down. Pickle goes by __qualname__, which stays.
    _class.__name__ = _class.__mro__[2].__name__


def published_class(model_type: str | None) -> type[PreTrainedModel] | None:
    """The class that reads the paper's authors' checkpoints of this `model_type`, if it is one of theirs."""
    stock = PUBLISHED_TYPES.get(model_type or "")
    return next((cls for cls in CLASSES if cls.config_class.model_type == stock), None)


def published_config(path: str | Path, raw: dict, shapes: dict) -> PreTrainedConfig:
    """The stock config of a checkpoint of the paper's authors: ReLU whatever `hidden_act` says (their class ignores
    it), and the F of the weights (`sparsity_new_intermediate_size` overrules their `intermediate_size`).

    Raises:
        ValueError: blocks without a gate, which no stock Llama or Qwen2 has.
    """
    ups = [shape for name, shape in shapes.items() if name.endswith(".mlp.up_proj.weight")]
    gates = [shape for name, shape in shapes.items() if name.endswith(".mlp.gate_proj.weight")]
    if not ups or not gates:
        raise ValueError(f"{path} has {len(ups)} blocks and {len(gates)} gates; only gated models have a stock form")
    cls = published_class(raw["model_type"])
    assert cls is not None
    dropped = ("model_type", "architectures", "auto_map", "is_llama_config", "twell")
    kept = {key: value for key, value in raw.items() if not key.startswith("sparsity_") and key not in dropped}
    return cls.config_class.from_dict({**kept, "hidden_act": "relu", "intermediate_size": ups[0][0]})


def published_weights(raw: dict, files: list[Path], shapes: dict, config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Their tensors under the same names, `down_proj` turned to (D, F) where their hybrid training stored (F, D).

    With D = F the shape says nothing and their `sparsity_use_hybrid_kernel` decides.
    """
    hidden, intermediate = config.hidden_size, config.intermediate_size
    weights = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                tensor = tensors.get_tensor(name)
                if name.endswith(".mlp.down_proj.weight"):
                    square = hidden == intermediate and raw.get("sparsity_use_hybrid_kernel")
                    turned = shapes[name] == (intermediate, hidden) and hidden != intermediate
                    if square or turned:
                        tensor = tensor.t().contiguous()
                weights[name] = tensor
    return weights


def _with_options(config: PreTrainedConfig, options: dict) -> PreTrainedConfig:
    """Take out of `from_pretrained`'s arguments what a config holds, as that of a stock class does."""
    kept = ("dtype", "torch_dtype", "attn_implementation")
    for name in [name for name in options if hasattr(config, name) and name not in kept]:
        setattr(config, name, options.pop(name))
    return config


def _gguf_of(path, name: str, hub: dict) -> str:
    """The path of a GGUF file in a folder, or from the Hub; an OSError where there is none of that name."""
    if Path(path).is_dir() and not Path(path, name).is_file():
        found = ", ".join(sorted(file.name for file in Path(path).glob("*.gguf"))) or "none"
        raise OSError(f"no file at {Path(path, name)}; GGUF files there: {found}")
    return cached_file(str(path), name, **hub)


def _upright_shapes(shapes, config):
    turned = (config.intermediate_size, config.hidden_size)
    return {
        name: turned[::-1] if name.endswith(".mlp.down_proj.weight") and shape == turned else shape
        for name, shape in shapes.items()
    }
