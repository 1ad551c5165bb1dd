"""A checkpoint's configs, read as what a stranger wrote: plain data, and errors of one line."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import repo_folder_name
from transformers import GenerationConfig, PreTrainedConfig

from hf_twell.files.packages import how_to_install
from hf_twell.files.weights import DTYPES

MOST_LABELS = 1_000_000  # a config names each; ours have no use for them
HUB_SECONDS = 10  # to wait for the Hub's first answer


def check_folder(path: str | Path, what: str) -> None:
    """Refuse, by an OSError, what can only be the path of a folder, and is none; the Hub would only speak of its rules
    for names."""
    if _looks_local(str(path)) and not Path(path).is_dir():
        raise OSError(f"no folder at {path}; give {what}'s folder, or its name on the Hub")


def check_hub(
    path: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    **hub: Any,
) -> None:
    """Ask the Hub once for what is no folder: Transformers asks six times, half a minute, where it cannot be reached.
    An OSError without an answer; what the Hub itself answers, and names in its cache, are left to Transformers."""
    if Path(path).is_dir() or local_files_only or constants.HF_HUB_OFFLINE:
        return
    try:
        cached = repo_folder_name(repo_id=str(path), repo_type="model")
        if not Path(cache_dir or constants.HF_HUB_CACHE, cached).is_dir():
            url = hf_hub_url(str(path), "config.json", revision=revision)
            get_hf_file_metadata(url, token=token, timeout=HUB_SECONDS)
    except (HfHubHTTPError, ValueError):
        return
    except Exception as error:  # which kind depends on the HTTP client that the Hub's library has
        raise OSError(
            f"there is no folder {path} here, and the Hub ({constants.ENDPOINT}), on which a model might be called so, "
            f"cannot be reached: {one_line(error)}"
        ) from error


def read_config(path: str | Path, **hub: Any) -> dict:
    """The content of a model folder's or Hub name's config.json.

    Raises:
        OSError: there is none, or no JSON.
        ValueError: it holds no mapping, a dtype that no model computes in, attention code to be fetched, more labels
            than fit into memory, or a name for the file of weights.
    """
    check_folder(path, "a model")
    check_hub(path, **hub)
    try:
        raw, _ = PreTrainedConfig.get_config_dict(path, **hub)
        kind = raw.get("model_type")
    except (AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: its config.json holds no mapping; fetch it again") from error
    except OSError as error:
        if "/" in str(path) or Path(path).is_dir():
            raise
        # A few models on the Hub have such a name; most often, a folder's is mistyped.
        raise OSError(f"there is no folder {path} here, and as a name on the Hub: {error}") from error
    if not isinstance(kind, str | None):
        raise ValueError(f"{path}: config.json has model_type={kind!r}; it must be a name, such as 'llama'")
    dtype = raw.get("dtype", raw.get("torch_dtype"))
    known = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype or torch.float32
    if not isinstance(known, torch.dtype) or known not in DTYPES:
        raise ValueError(f"{path}: config.json has dtype={dtype!r}; it must be float32, bfloat16 or float16")
    names = raw.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"{path}: config.json has architectures={names!r}; it must be a list of names")
    labels = raw.get("num_labels")
    if labels is not None and (not isinstance(labels, int) or labels > MOST_LABELS):
        raise ValueError(f"{path}: config.json has num_labels={labels!r}; a language model needs none, remove it")
    for key in ("attn_implementation", "_attn_implementation"):
        if "/" in str(raw.get(key)):  # the name of a Hub repository, whose code Transformers would run
            raise ValueError(
                f"{path}: config.json asks for attention code from {raw[key]!r}; remove that entry, and give "
                "attn_implementation yourself if you trust it"
            )
    if raw.get("transformers_weights") is not None:  # another file than those that are checked, pickled too
        raise ValueError(
            f"{path}: config.json has transformers_weights={raw['transformers_weights']!r}; remove that entry, and "
            "name the file model.safetensors"
        )
    return raw


@contextmanager
def saying_quantized(path: str | Path, config: dict) -> Iterator[None]:
    """Where a checkpoint with this config.json does not load, and is quantized, that is the reason to tell: by a
    ValueError in place of what other checks say of such weights, or an ImportError where torchao is missing, which
    reads what `hf-twell quantize` writes."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method == "torchao" and importlib.util.find_spec("torchao") is None:
        install = how_to_install("torchao")
        raise ImportError(f"{path} holds weights that torchao reads, which is missing: {install}")
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        if quantization is None:
            raise
        raise ValueError(
            f"{path} holds weights that are quantized ({method}), and these are not converted; give the model that "
            f"they were made from, and quantize the result. As they are they do not load here either: {one_line(error)}"
        ) from error


def check_generation_config(path: str | Path, **hub: Any) -> None:
    """Read generation_config.json as Transformers will, which passes over one that is absent or no JSON; a ValueError
    where what it holds makes no generation config."""
    with one_line_errors(f"{path}: its generation_config.json cannot be used"), suppress(OSError):
        GenerationConfig.from_pretrained(path, **hub)


@contextmanager
def one_line_errors(claim: str) -> Iterator[None]:
    """A ValueError of one line, `claim` and the reason, for whatever other libraries raise on files that a stranger
    wrote."""
    try:
        yield
    except (ValueError, OSError, ImportError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ValueError(f"{claim} ({type(error).__name__}: {one_line(error)})") from error


def _looks_local(path: str) -> bool:
    """Whether a name is a path rather than one on the Hub, which takes half a minute to say that it has none."""
    parent, slash, _ = path.rpartition("/")
    if path.startswith((".", "/", "~")) or path.endswith("/") or "\\" in path or "/" in parent:
        return True
    return bool(slash and Path(parent).is_dir())


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
