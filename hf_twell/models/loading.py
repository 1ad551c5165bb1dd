"""A causal language model from a folder, a GGUF file or the Hub: checked first, and never by its own code."""

import copy
import json
import logging
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import is_deepspeed_zero3_enabled

from hf_twell.blocks.architectures import loading_class, text_class
from hf_twell.convert.entry import check_entry
from hf_twell.convert.sparsify import chosen_layers
from hf_twell.files.configs import (
    check_folder,
    check_generation_config,
    check_hub,
    one_line,
    one_line_errors,
    read_config,
    saying_quantized,
)
from hf_twell.files.folders import TOKENIZER_FILES
from hf_twell.files.weights import (
    DTYPES,
    check_complete,
    check_finite,
    check_shapes,
    check_sizes,
    tensor_shapes,
    weight_files,
)
from hf_twell.models.custom import published_class
from hf_twell.models.gguf_files import is_gguf, load_gguf, load_gguf_tokenizer, read_gguf

logger = logging.getLogger(__name__)


def load_model(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase | str | Path | bool | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    load: Callable | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load (model, tokenizer): by default in the checkpoint's dtype, on CUDA where there is one.

    `tokenizer` may be the path of another one, or False for none; `load` takes the place of `load_causal_lm`.

    Raises:
        ValueError, OSError: in one line, what was given and why it does not load.
    """
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"device {device!r}: give cpu, cuda or cuda:N") from error
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"device {place}: give cpu, cuda or cuda:N")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {place}: this machine has {torch.cuda.device_count()} CUDA devices; try cpu")
    model = _named("model", path, load or load_causal_lm, dtype=dtype, device=place)
    if tokenizer is None or isinstance(tokenizer, str | Path):
        # An adapter may be saved without one, and has its base's then.
        tokenizer = load_tokenizer(tokenizer or (path if has_tokenizer(path) else model.config._name_or_path))
    return model, None if tokenizer is False else tokenizer


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, which needs no model's config, of a GGUF file, or of a Hub name. A ValueError or
    OSError says in one line what was given and why it does not load."""
    load, options = AutoTokenizer.from_pretrained, {"trust_remote_code": False}
    if is_gguf(path):
        load, options = load_gguf_tokenizer, {}
    else:
        check_folder(path, "a tokenizer")
        check_hub(path)
        if not has_tokenizer(path):
            raise ValueError(f"cannot load a tokenizer from {str(path)!r}: the folder holds none (tokenizer.json, say)")
    with one_line_errors(f"{path}: its files make no tokenizer"):
        return _named("tokenizer", path, load, **options)


def load_causal_lm(
    path: str | Path, *, dtype: torch.dtype | str | None = None, device: torch.device | str = "cpu", **hub: Any
) -> PreTrainedModel:
    """Load in the checkpoint's dtype, or in `dtype`; checkpoints of the paper's authors come as stock sparse models.

    A GGUF file's weights are dequantized, to float32 by default.

    Args:
        hub: `revision`, `token`, `cache_dir` and the like, for a Hub name.

    Raises:
        ValueError, OSError: no such dtype, no model, pickled, missing, mis-shaped or non-finite weights, a config that
            makes no model, a `twell` entry that cannot be true, another task, or code of its own needed.
    """
    if isinstance(dtype, str) and dtype != "auto" and getattr(torch, dtype, None) not in DTYPES:
        raise ValueError(f"dtype={dtype!r}; choose one of 'auto', 'bfloat16', 'float16', 'float32', or a torch.dtype")
    path = str(path)
    if is_deepspeed_zero3_enabled():
        raise ValueError(
            "DeepSpeed's ZeRO-3 would split the weights while they are loaded, and they could not be checked or "
            "converted; load before TrainingArguments turn it on, or use ZeRO-2 or FSDP2 (recipes/accelerate)"
        )
    if is_gguf(path):
        return load_gguf(AutoModelForCausalLM.from_pretrained, read_gguf(path), dtype=dtype)[0].to(device)
    if Path(path).is_dir() and not Path(path, "config.json").is_file():
        raise ValueError(f"the folder has no config.json{_folder_hint(path)}")
    raw = read_config(path, **hub)
    cls = published_class(raw.get("model_type"))
    if cls is not None:
        return cls.from_pretrained(path, dtype=dtype or "auto", **hub).to(device)
    loader, options = (
        loading_class(raw),
        {"dtype": dtype or "auto", "use_safetensors": True, "trust_remote_code": False},
    )
    load, text = AutoModelForCausalLM.from_pretrained, None if loader is AutoModelForCausalLM else text_class(raw)
    if text is not None:
        load, options["config"] = text.from_pretrained, _text_config(path, raw, text)
    elif loader is not AutoModelForCausalLM:  # which would drop a head, or knows no such models
        raise ValueError(
            f"{path} is a {raw['architectures'][0]}, and only causal language models are taken here; load it from "
            f"Python by {loader.__name__}, and give the model to hf_twell.sparsify, or to hf_twell.load_adapter as its "
            "base"
        )
    with saying_quantized(path, raw):
        check_checkpoint(path, **hub)
    with saying_quantized(path, raw), one_line_errors(f"{path} does not load"):
        model, info = load(path, output_loading_info=True, **options, **hub)
    check_complete(path, info["missing_keys"])
    check_finite(path, model.named_parameters())
    return model.to(device)


def check_checkpoint(path: str | Path, **hub: Any) -> None:
    """Compare configs and the weight files' headers with each other and with a model without weights. Errors as of
    `load_causal_lm`, but for values of weights and missing tensors."""
    loader = loading_class(read_config(path, **hub))
    with one_line_errors(f"{path}: its config.json makes no model"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, **hub)
        entry = check_entry(config)
        shapes = tensor_shapes(weight_files(path, **hub))
        check_sizes(path, config, shapes)
        check_shapes(path, without_weights(config, loader), shapes)
        if entry is not None:
            chosen_layers(config, None, config.get_text_config().num_hidden_layers)
    check_generation_config(path, **hub)


def without_weights(config: PreTrainedConfig, loader: Any) -> PreTrainedModel:
    """The model of this config, on the meta device, of the class that `loader`, as of `loading_class`, makes."""
    with torch.device("meta"):
        if hasattr(loader, "from_config"):  # an Auto class
            return loader.from_config(config, trust_remote_code=False)
        return loader._from_config(config)


def stored_dtype(path: str | Path) -> torch.dtype | None:
    """In which a checkpoint's weights are stored, as its config says; of a GGUF file its `saved_dtype`."""
    if is_gguf(path):
        return read_gguf(path).saved_dtype
    config = read_config(path)
    parts = (config, config.get("text_config") or {})
    name = next((part[key] for part in parts for key in ("dtype", "torch_dtype") if part.get(key)), None)
    return None if name is None else getattr(torch, name.removeprefix("torch."))


def _text_config(path: str, raw: dict, cls: type[PreTrainedModel]) -> PreTrainedConfig:
    """The config of the text model in one that sees, with what is known of its blocks; a line says what is taken."""
    logger.warning(
        "%s sees, too; its text model alone is taken, as a %s. For the whole of it give a model that "
        "AutoModelForImageTextToText loads to hf_twell.sparsify, from Python",
        *(path, cls.__name__),
    )
    with one_line_errors(f"{path}: its config.json makes no model"):
        config = cls.config_class.from_dict(copy.deepcopy(raw["text_config"]), name_or_path=path)
    if raw.get("twell") is not None:
        config.twell = raw["twell"]
    return config


def _folder_hint(path: str) -> str:
    """What a folder without a config holds instead."""
    files = sorted(Path(path).glob("*.gguf"))
    if files:
        return f"; name the GGUF file itself, {files[0]}"
    if not Path(path, "adapter_config.json").is_file():
        return ""
    return (
        ": it is an adapter's; merge it into its base first: hf_twell.load_adapter(path).merge_and_unload(), and its "
        "save_pretrained"
    )


def has_tokenizer(path: str | Path) -> bool:
    """False for a folder without any file of a tokenizer; files of a GGUF name are not looked into."""
    names = [file.name for file in Path(path).iterdir()] if Path(path).is_dir() else ["tokenizer.json"]
    return any(fnmatch(name, pattern) for name in names for pattern in TOKENIZER_FILES)


def _named(what: str, path, load: Callable, **options):
    try:
        return load(str(path), **options)
    except (OSError, ValueError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError  # some of their own kinds take other arguments
        reason = f"its files make no {what}: {error}" if isinstance(error, json.JSONDecodeError) else one_line(error)
        raise kind(f"cannot load a {what} from {str(path)!r}: {reason}") from error
