"""What a checkpoint's safetensors files say about themselves, read before anything is built or trusted."""

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PARTS_OF_RANKS = "shard-*-model-*-of-*.safetensors"  # of save_pretrained(distributed_checkpoint=True)
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# What weights are in, in a checkpoint and in the blocks that are converted.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")

# Parts of a model that sees or hears, which have sizes of their own.
OTHER_SENSES = re.compile("vision|visual|image|audio")

Shape = tuple[int, ...]


def hub_options(options: dict) -> dict:
    """Those of `from_pretrained`'s arguments that say where on the Hub, or in its cache, files are."""
    return {key: options[key] for key in HUB_OPTIONS if key in options}


def is_plain(weight: torch.Tensor) -> bool:
    """Whether it holds its values themselves: torchao's quantized tensors say that they are float32."""
    return type(weight.data) in (torch.Tensor, nn.Parameter, DTensor)


def weight_files(path: str | Path, variant: str | None = None, **hub: Any) -> list[Path]:
    """The safetensors files that `from_pretrained` reads of a model folder or Hub name, fetched if need be.

    Raises:
        ValueError: there are none (pickled weights run code when loaded, so they are refused), the index is wrong, or
            there are parts of a distributed checkpoint, which Transformers reads in place of all others.
    """
    parts = sorted(Path(path, hub.get("subfolder") or "").glob(PARTS_OF_RANKS))
    if parts:
        raise ValueError(
            f"{path} holds parts of a distributed checkpoint ({parts[0].name}); make a whole model of them in another "
            "folder (transformers.distributed.checkpoint.consolidate_distributed_checkpoint), or remove them"
        )
    weights, index_name = _variant_of(WEIGHTS, variant), _variant_of(INDEX, variant)
    found = _file(path, weights, hub)
    if found:
        return [found]
    index = _file(path, index_name, hub)
    if index:
        files = [_shard(path, name, hub) for name in _shard_names(index)]
        if not isinstance(json.loads(index.read_text()).get("metadata"), dict):  # Transformers needs one
            raise ValueError(f"{index} is no index of weights (its metadata is no mapping); fetch it again")
        return files
    if any(_file(path, name, hub) for name in PICKLED):
        raise ValueError(
            f"{path} holds pickled weights alone, which could run any code; convert them to safetensors "
            "(load them where you trust them, then save_pretrained)"
        )
    raise ValueError(f"{path} holds no {weights} and no {index_name}; give a whole model")


def tensor_shapes(files: list[Path]) -> dict[str, Shape]:
    """Name and shape of every tensor, from the files' headers alone; a ValueError of a file that is not whole."""
    shapes: dict[str, Shape] = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is no whole safetensors file ({error}); fetch it again") from error
    return shapes


def check_sizes(path: str | Path, config: PreTrainedConfig, shapes: dict[str, Shape]) -> None:
    """Refuse, by a ValueError and before a model of the config's size is built, weights of another number of layers, or
    embeddings of other sizes."""
    config = config.get_text_config()
    shapes = {name: shape for name, shape in shapes.items() if not OTHER_SENSES.search(name)}
    blocks = [re.search(r"(?:^|\.)layers\.(\d+)\.", name) for name in shapes]
    layers = {int(match[1]) for match in blocks if match}
    claimed = getattr(config, "num_hidden_layers", None)
    # DeepSeek and GLM keep layers for further tokens behind the model's own, which Transformers leaves out.
    if claimed is not None and getattr(config, "num_nextn_predict_layers", None):
        layers = {layer for layer in layers if not claimed <= layer < claimed + config.num_nextn_predict_layers}
    if layers and claimed is not None and claimed != len(layers):
        raise ValueError(f"{path}: config.json has num_hidden_layers={claimed}, but the weights have {len(layers)}")
    wanted = (getattr(config, "vocab_size", None), getattr(config, "hidden_size", None))
    for name, shape in shapes.items():
        if name.endswith("embed_tokens.weight") and None not in wanted and shape != wanted:
            raise ValueError(
                f"{path}: {name} has shape {shape}, but config.json makes it {wanted}; one of them is wrong"
            )


def check_shapes(path: str | Path, model: nn.Module, shapes: dict[str, Shape]) -> None:
    """Refuse, by a ValueError that names the first, tensors of other shapes than a model's, which may be on the meta
    device."""
    for name, tensor in model.state_dict().items():
        if name in shapes and shapes[name] != tuple(tensor.shape):
            raise ValueError(f"{path}: {name} has shape {shapes[name]}, but config.json makes it {tuple(tensor.shape)}")


def check_complete(path: str | Path, missing: Collection[str]) -> None:
    """Refuse, by a ValueError, a model some of whose tensors were in no file, the `missing_keys` that `from_pretrained`
    reported: Transformers leaves them at random."""
    if missing:
        raise ValueError(f"{path} lacks {min(missing)} ({len(missing)} tensors are missing); fetch the whole of it")


@torch.no_grad()
def check_finite(path: str | Path, named_weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse, by a ValueError that names the first, weights that are NaN or infinite: every output would be NaN, and
    every measured density a lie."""
    for name, weight in named_weights:
        if weight.is_meta or not weight.is_floating_point() or not is_plain(weight):
            continue
        # A sum is one pass without a copy; it is finite only if every value is, except where finite ones overflow.
        if not weight.sum(dtype=torch.float32).isfinite() and not weight.isfinite().all():
            count = int((~weight.isfinite()).sum())
            raise ValueError(f"{path}: {name} holds {count} values that are NaN or infinite; the checkpoint is damaged")


def _variant_of(name: str, variant: str | None) -> str:
    """Transformers' name of a variant's file: model.fp16.safetensors, say."""
    stem, _, kind = name.rpartition(".")
    return f"{stem}.{variant}.{kind}" if variant else name


def _file(path: str | Path, name: str, hub: dict) -> Path | None:
    found = cached_file(
        str(path),
        name,
        **hub,
        _raise_exceptions_for_gated_repo=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(found) if found else None


def _shard(path: str | Path, name: str, hub: dict) -> Path:
    found = _file(path, name, hub)
    if not found:
        raise ValueError(f"{path} lacks {name}, which its {INDEX} names; fetch the whole model")
    return found


def _shard_names(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is no index of weights ({error!r}); fetch it again") from error
    if not names:
        raise ValueError(f"{index} names no files; fetch it again")
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{index} names {name!r}; only .safetensors files beside it are read")
    return names
