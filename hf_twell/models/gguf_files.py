"""Models in GGUF files, as llama.cpp's converter writes them: checked, dequantized by Transformers, in stock form.

What Transformers would drop in silence is refused, or read here (see `_restore`).
"""

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_twell.files.configs import one_line, one_line_errors
from hf_twell.files.packages import how_to_install
from hf_twell.files.weights import Shape, check_complete, check_finite

logger = logging.getLogger(__name__)

# `general.architecture` of the families that are rebuilt exactly; "llama" stands for Mistral too, "phi3" for Phi-4.
ARCHITECTURES = (
    "gemma2", "gemma3", "llama", "phi3", "qwen2", "qwen2moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe",
)  # fmt: skip
# What Transformers passes over of families that this package converts and whose files Transformers reads.
ROTATED = "the share of each head that is rotated"
MISREAD = {
    "gemma4": "each layer's scale, and which layers slide or share keys and values",
    "nemotron": f"{ROTATED}, and the epsilon of the norms",
    "stablelm": ROTATED,
    "starcoder2": "the base of the rotary embedding",
}
MODEL_TYPES = {"qwen35": "qwen3_5_text"}  # where Transformers has another name
# Of these alone llama.cpp, too, divides the attention's logits by the root of D / heads, and not of the heads' size.
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ROPE_FACTORS = "rope_freqs.weight"


class GgufFile(NamedTuple):
    """What a GGUF file says about itself."""

    path: Path
    architecture: str
    settings: dict  # the metadata under the architecture's name
    types: dict[str, str]  # of each tensor
    shapes: dict[str, Shape]
    rope_factors: torch.Tensor | None
    tokenizer: dict | None  # special tokens, as a tokenizer's attributes

    @property
    def quantized(self) -> list[str]:
        return sorted(set(self.types.values()) - set(FLOATS))

    @property
    def dtype(self) -> torch.dtype:
        """In which the weights are as stored: small tensors are in F32 beside those in F16 or BF16."""
        halves = set(self.types.values()) - {"F32"}
        return FLOATS[halves.pop()] if len(halves) == 1 and halves <= set(FLOATS) else torch.float32

    @property
    def saved_dtype(self) -> torch.dtype:
        """In which a model made from it is saved: quantized weights in bfloat16, as float32 would give nothing back."""
        return torch.bfloat16 if self.quantized else self.dtype


def is_gguf(path: str | Path) -> bool:
    return str(path).endswith(".gguf") and not Path(path).is_dir()


def read_gguf(path: str | Path) -> GgufFile:
    """Read all but the weights.

    Raises:
        OSError: no such file.
        ValueError: no GGUF file, one that is not whole, a part of several, or another architecture.
        ImportError: the package `gguf` is not installed.
    """
    path = Path(path).absolute()
    if not path.is_file():
        raise OSError(f"no file at {path}; a GGUF file on the Hub must be fetched first (hf download REPO FILE)")
    with path.open("rb") as file:
        head = file.read(256)
    if head[:4] != b"GGUF":
        raise ValueError(f"{path} is no GGUF file (it does not begin with GGUF); fetch it again")
    _check_architecture(path, _first_architecture(head))  # to read all of a large vocabulary takes 20 s
    try:
        from gguf import GGUFReader
    except ImportError as error:
        install = how_to_install("gguf")
        raise ImportError(f"{path}: GGUF files need the package gguf: {install}") from error
    try:
        reader = GGUFReader(path)
    except Exception as error:  # whatever the ends of cut files make of it
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(f"{path} is no whole GGUF file ({reason}); fetch it again") from error

    def value(key: str):
        return reader.fields[key].contents() if key in reader.fields else None

    architecture = value("general.architecture")
    _check_architecture(path, architecture)
    if (value("split.count") or 1) > 1:
        raise ValueError(f"{path} is one of {value('split.count')} parts; join them with llama-gguf-split --merge")
    prefix = f"{architecture}."
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = tensors.get(ROPE_FACTORS)
    return GgufFile(
        path,
        architecture,
        {key.removeprefix(prefix): value(key) for key in reader.fields if key.startswith(prefix)},
        {name: tensor.tensor_type.name for name, tensor in tensors.items()},
        {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in tensors.items()},
        None if factors is None else torch.tensor(factors.data),
        _special_tokens(reader) if "tokenizer.ggml.tokens" in reader.fields else None,
    )


def load_gguf(load: Callable, file: GgufFile, *, dtype: torch.dtype | str | None = None, **options: Any) -> tuple:
    """What `load`, a `from_pretrained`, makes of a GGUF file: (model, loading info).

    Args:
        dtype: None or "auto" is as stored, and float32 where weights are quantized.

    Raises:
        ValueError: metadata that make no model, tensors that a stock model has no place for, lacks, or has in other
            shapes, weights that are not finite, types that cannot be dequantized.
    """
    path = file.path
    with one_line_errors(f"{path}: its metadata makes no model"):
        config = _config(file)
        _check_tensors(file, config)
    dtype = file.dtype if dtype in (None, "auto") else dtype
    if file.quantized:
        logger.warning(
            "%s: its weights are quantized (%s); they are dequantized, and what quantization lost stays lost",
            path,
            ", ".join(file.quantized),
        )
    if hasattr(transformers, "GgufConfig"):  # else Transformers always dequantizes
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    options |= {"config": config, "dtype": dtype, "output_loading_info": True}
    with one_line_errors(f"{path} does not load"), _alone(path) as where:
        model, info = load(**where, **options)
    check_complete(path, info["missing_keys"])
    check_finite(path, model.named_parameters())
    model.name_or_path = model.config._name_or_path = str(path)
    return model, info


def load_gguf_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer that a GGUF file describes. Errors as of `read_gguf`, or a ValueError where it describes none that
    Transformers can build."""
    file = read_gguf(path)
    if file.tokenizer is None:
        raise ValueError("the file holds none; give another tokenizer")
    with _alone(file.path) as where:
        tokenizer = AutoTokenizer.from_pretrained(**where, trust_remote_code=False)
    for name, value in file.tokenizer.items():  # some versions of Transformers pass over these
        setattr(tokenizer, name, value)
    tokenizer.name_or_path = str(file.path)
    return tokenizer


def _first_architecture(head: bytes) -> str:
    """The architecture by a file's first bytes, where llama.cpp's converter puts it; else one that is read."""
    key = b"general.architecture"
    start = 24 + 8 + len(key) + 4 + 8  # after the file's own numbers: the key, its type, and the value's length
    if head[32 : 32 + len(key)] != key:
        return ARCHITECTURES[0]
    length = int.from_bytes(head[start - 8 : start], "little")
    return head[start : start + length].decode(errors="replace")


def _check_architecture(path: Path, architecture: str | None) -> None:
    if architecture in MISREAD:
        raise ValueError(
            f"{path} has the architecture {architecture!r}, of whose files Transformers passes over "
            f"{MISREAD[architecture]}, so it would be another model. Give the model's folder, or its name on the Hub"
        )
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{path} has the architecture {architecture!r}; {', '.join(ARCHITECTURES)} (Mistral too) are read from "
            "GGUF files. Give the model's folder, or its name on the Hub"
        )


def _special_tokens(reader) -> dict:
    fields, tokens = reader.fields, reader.fields["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    found = {f"{name}_token": tokens.contents(field.contents()) for name, field in ids.items() if field is not None}
    for name in ("add_bos_token", "add_eos_token"):
        if f"tokenizer.ggml.{name}" in fields:
            found[name] = fields[f"tokenizer.ggml.{name}"].contents()
    return found


@contextmanager
def _alone(path: Path) -> Iterator[dict]:
    """`from_pretrained`'s arguments for a GGUF file in a folder of its own: what lies beside it would be read too, and
    a file of its name in the working directory in its place."""
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder, "model.gguf")
        link.symlink_to(path)
        yield {"pretrained_model_name_or_path": folder, "gguf_file": str(link)}


def _config(file: GgufFile) -> PreTrainedConfig:
    with _alone(file.path) as where:
        config = AutoConfig.from_pretrained(**where, trust_remote_code=False)
    if "attention.key_length" in file.settings:
        config.head_dim = file.settings["attention.key_length"]
    _restore(file, config)
    kind = file.settings.get("rope.scaling.type", "none")
    if kind != "none" and (file.architecture, kind) != ("gemma3", "linear"):
        raise ValueError(
            f"{file.path} scales its rotary embedding (rope.scaling.type={kind!r}), which Transformers does not read "
            "from GGUF files; give the model's folder, or its name on the Hub"
        )
    if file.rope_factors is not None:
        _restore_llama3_rope(file, file.rope_factors, config)
    return config


def _restore(file: GgufFile, config: PreTrainedConfig) -> None:
    """Put into a config what Transformers does not read of a family's metadata, or takes from one model of it."""
    settings, by_heads = file.settings, config.hidden_size // config.num_attention_heads
    if file.architecture in GEMMA_27B_LAYERS:
        large = config.num_hidden_layers == GEMMA_27B_LAYERS[file.architecture]
        config.query_pre_attn_scalar = by_heads if large else config.head_dim
    if file.architecture == "gemma2":
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            setattr(config, key, settings.get(key, getattr(config, key)))
    if file.architecture == "gemma3" and settings.get("rope.scaling.type") == "linear":
        scaled = {"rope_type": "linear", "factor": settings["rope.scaling.factor"]}
        config.rope_parameters["full_attention"] = {**config.rope_parameters["full_attention"], **scaled}
    if file.architecture == "phi3":
        config.sliding_window = settings.get("attention.sliding_window") or None
        config.rope_parameters["partial_rotary_factor"] = settings["rope.dimension_count"] / by_heads
    if file.architecture in ("qwen2moe", "qwen3moe"):
        config.moe_intermediate_size = settings["expert_feed_forward_length"]
    if file.architecture == "qwen2moe":
        config.shared_expert_intermediate_size = settings["expert_shared_feed_forward_length"]


def _restore_llama3_rope(file: GgufFile, rope_factors: torch.Tensor, config: PreTrainedConfig) -> None:
    """Llama 3.1 and later: the file holds what each frequency is divided by, the config how that is computed. A
    ValueError of factors that are not those of Llama 3's models."""
    factors, theta = rope_factors.float(), config.rope_parameters["rope_theta"]
    config.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": round(factors.max().item(), 4),  # 8 or 32; the file may hold a quotient
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    if factors.shape != plain.shape or not torch.allclose(plain / scaled, factors, rtol=1e-4):
        raise ValueError(
            f"{file.path} scales its rotary embedding by {ROPE_FACTORS}, otherwise than Llama 3 does; give the model's "
            "folder, or its name on the Hub"
        )


def _check_tensors(file: GgufFile, config: PreTrainedConfig) -> None:
    """Compare names and shapes with a model without weights, before any is dequantized."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    path = file.path
    blocks = {int(name.split(".")[1]) for name in file.shapes if name.startswith("blk.")}
    # Qwen3.5's files may have blocks behind the layers, which predict further tokens. Transformers leaves these out.
    layers = len(blocks) - file.settings.get("nextn_predict_layers", 0)
    if layers != config.num_hidden_layers:  # before a model of so many layers is built
        raise ValueError(f"{path}: its metadata has {config.num_hidden_layers} layers, but its weights have {layers}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    architecture = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    names = get_tensor_name_map(architecture, layers)
    expected = {}
    for name, weight in model.state_dict().items():
        if ".conv1d." in name or name.endswith("shared_expert_gate.weight"):  # the converter drops sizes of 1
            weight = weight.squeeze()
        if name.endswith(".experts.gate_up_proj"):
            weight, stored = weight.chunk(2, dim=1)[0], [name.replace("gate_up", part) for part in ("gate", "up")]
        else:
            stored = [name.replace(".dt_bias", ".dt_proj.bias")]
        for each in stored:
            each += ".weight" if ".experts." in name else ""
            expected[names.get_name(each, (".weight", ".bias"))] = weight.shape
    further = tuple(f"blk.{block}." for block in blocks if block >= layers)
    for name, shape in file.shapes.items():
        if name not in expected and name != ROPE_FACTORS and not name.startswith(further):
            raise ValueError(f"{path}: {name} has no place in a stock {type(model).__name__}, so it cannot be exact")
        if shape != expected.get(name, shape):
            raise ValueError(f"{path}: {name} has shape {shape}, but its metadata makes it {tuple(expected[name])}")
