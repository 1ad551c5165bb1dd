"""A checkpoint's config.json, read as what a stranger wrote: plain data, and errors of one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedConfig


def read_config(path: str | Path, **hub) -> dict:
    """The content of a model folder's or Hub name's config.json.

    Raises:
        OSError: there is none, or no JSON.
        ValueError: it holds no mapping, a dtype that no model computes in, or attention code to be fetched.
    """
    if str(path).startswith((".", "/", "~")) and not Path(path).is_dir():
        raise OSError(f"no folder at {path}; give a model's folder, or its name on the Hub")
    try:
        raw, _ = PreTrainedConfig.get_config_dict(path, **hub)
        kind = raw.get("model_type")
    except (AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: its config.json holds no mapping; fetch it again") from error
    if not isinstance(kind, str | None):
        raise ValueError(f"{path}: config.json has model_type={kind!r}; it must be a name, such as 'llama'")
    dtype = raw.get("dtype", raw.get("torch_dtype"))
    known = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else torch.float32
    if not isinstance(known, torch.dtype) or not known.is_floating_point:
        raise ValueError(f"{path}: config.json has dtype={dtype!r}; it must be float32, bfloat16 or float16")
    for key in ("attn_implementation", "_attn_implementation"):
        if "/" in str(raw.get(key)):  # the name of a Hub repository, whose code Transformers would run
            raise ValueError(
                f"{path}: config.json asks for attention code from {raw[key]!r}; remove that entry, and give "
                "attn_implementation yourself if you trust it"
            )
    return raw


@contextmanager
def one_line_errors(claim: str) -> Iterator[None]:
    """One line for whatever other libraries raise on files that a stranger wrote.

    Raises:
        ValueError: saying `claim` and the reason, in place of errors of kinds that no caller would expect.
    """
    try:
        yield
    except (ValueError, OSError, ImportError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ValueError(f"{claim} ({type(error).__name__}: {' '.join(str(error).split())})") from error
