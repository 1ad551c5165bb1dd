"""A causal language model from a folder or the Hub, whoever wrote it: checked first, and never by its own code."""

import json
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import is_deepspeed_zero3_enabled

from hf_twell.architectures import DTYPES, loading_class
from hf_twell.config_files import check_generation_config, one_line, one_line_errors, read_config
from hf_twell.convert import check_entry, chosen_layers
from hf_twell.custom_models import reference_class
from hf_twell.weight_files import (
    check_complete,
    check_finite,
    check_shapes,
    check_sizes,
    tensor_shapes,
    weight_files,
)
from hf_twell.whole_folders import TOKENIZER_FILES


def load_model(path: str | Path, tokenizer=None, *, dtype=None, device: str | None = None):
    """Load (model, tokenizer): by default in the checkpoint's dtype, on CUDA where there is one.

    `tokenizer` may be the path of another one, or False for none.

    Raises:
        ValueError, OSError: in one line, what was given and why it does not load.
    """
    try:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"device {device!r}: give cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device}: give cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {device}: this machine has {torch.cuda.device_count()} CUDA devices; try cpu")
    model = _named("model", path, load_causal_lm, dtype=dtype, device=device)
    if tokenizer is None or isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer or path)
    return model, None if tokenizer is False else tokenizer


def load_tokenizer(path: str | Path):
    """The tokenizer of a folder, which needs no model's config, or of a Hub name.

    Raises:
        ValueError, OSError: in one line, what was given and why it does not load.
    """
    if not has_tokenizer(path):
        raise ValueError(f"cannot load a tokenizer from {str(path)!r}: the folder holds none (tokenizer.json, say)")
    with one_line_errors(f"{path}: its files make no tokenizer"):
        return _named("tokenizer", path, AutoTokenizer.from_pretrained, trust_remote_code=False)


def load_causal_lm(path: str | Path, *, dtype=None, device: str | torch.device = "cpu", **hub):
    """Load in the checkpoint's dtype, or in `dtype`; checkpoints of the paper's authors come as stock sparse models.

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
    if Path(path).is_dir() and not Path(path, "config.json").is_file():
        raise ValueError("the folder has no config.json")
    raw = read_config(path, **hub)
    cls = reference_class(raw.get("model_type"))
    if cls is not None:
        return cls.from_pretrained(path, dtype=dtype or "auto", **hub).to(device)
    loader = loading_class(raw)
    if loader is not AutoModelForCausalLM:  # which would drop a head, or knows no such models
        raise ValueError(
            f"{path} is a {loader.__name__}, and only causal language models are taken here; load it from Python by "
            "that class, and give the model to hf_twell.sparsify, or to hf_twell.load_adapter as its base"
        )
    check_checkpoint(path, **hub)
    options = {"dtype": dtype or "auto", "use_safetensors": True, "trust_remote_code": False}
    with one_line_errors(f"{path} does not load"):
        model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options, **hub)
    check_complete(path, info["missing_keys"])
    check_finite(path, model.named_parameters())
    return model.to(device)


def check_checkpoint(path: str | Path, **hub) -> None:
    """Compare configs and the weight files' headers with each other and with a model without weights.

    Raises:
        ValueError, OSError: as `load_causal_lm`, but for values of weights and missing tensors.
    """
    loader = loading_class(read_config(path, **hub))
    with one_line_errors(f"{path}: its config.json makes no model"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, **hub)
        entry = check_entry(config)
        shapes = tensor_shapes(weight_files(path, **hub))
        check_sizes(path, config, shapes)
        with torch.device("meta"):
            if loader is AutoModelForCausalLM:
                model = loader.from_config(config, trust_remote_code=False)
            else:
                model = loader._from_config(config)
        check_shapes(path, model, shapes)
        if entry is not None:
            chosen_layers(model, None, config.get_text_config().num_hidden_layers)
    check_generation_config(path, **hub)


def has_tokenizer(path: str | Path) -> bool:
    """False for a folder without any file of a tokenizer."""
    names = [file.name for file in Path(path).iterdir()] if Path(path).is_dir() else ["tokenizer.json"]
    return any(fnmatch(name, pattern) for name in names for pattern in TOKENIZER_FILES)


def _named(what: str, path, load: Callable, **options):
    try:
        return load(str(path), **options)
    except (OSError, ValueError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError  # some of their own kinds take other arguments
        reason = f"its files make no {what}: {error}" if isinstance(error, json.JSONDecodeError) else one_line(error)
        raise kind(f"cannot load a {what} from {str(path)!r}: {reason}") from error
