"""PEFT adapters that were trained on a sparsified base: saved with a record of that, and loaded onto such a base.

An adapter's own files name its base, but not that ReLU replaced its activation: peft alone would load it onto the SiLU
model, without an error and with wrong outputs.
"""

import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file

from hf_twell.blocks.architectures import loading_class
from hf_twell.blocks.modeling import sparse_ffns
from hf_twell.convert.entry import FORMAT_VERSION, record_density, without_activity
from hf_twell.convert.sparsify import TAG, sparsify
from hf_twell.files.configs import check_folder, check_hub, one_line_errors
from hf_twell.files.folders import whole_folder
from hf_twell.files.weights import check_complete, check_finite, hub_options, tensor_shapes
from hf_twell.models.cards import adapter_card
from hf_twell.models.loading import load_causal_lm

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# peft names keys that it does not know in a warning, so this one tells those who load without this package.
RECORD = "base_sparsified_by_hf_twell"
# What loads the base, by the `task_type` that peft writes.
LOADERS = {
    "CAUSAL_LM": AutoModelForCausalLM,
    "SEQ_CLS": AutoModelForSequenceClassification,
    "TOKEN_CLS": AutoModelForTokenClassification,
    "QUESTION_ANS": AutoModelForQuestionAnswering,
    "FEATURE_EXTRACTION": AutoModel,
}


def save_adapter(
    model: nn.Module, path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None, *, overwrite: bool = False
) -> None:
    """`model.save_pretrained` of a PEFT model, with the record that its base is sparsified, into a whole folder.

    The checkpoints of a trainer with `SparsityCallback` bear it too. What `save_pretrained` saves by itself bears a
    weaker one: the tag `hf_twell` in its README.md.

    Args:
        model: what `peft.get_peft_model` returns for a sparsified model.
        path: the folder to write.
        tokenizer: is saved along, if given.
        overwrite: replace an existing folder of a model or adapter.

    Raises:
        ValueError: no PEFT model, a base that is not sparsified, or a folder that may not be written.
    """
    if not hasattr(model, "peft_config"):
        raise ValueError(f"{type(model).__name__} has no adapters; save a whole model with its save_pretrained")
    if not sparse_ffns(model):
        raise ValueError("the adapter's base is not sparsified; save it with peft's own save_pretrained")
    with whole_folder(path, overwrite=overwrite) as folder:
        model.save_pretrained(folder)
        record_base(model, folder)
        base = next(iter(model.peft_config.values())).base_model_name_or_path
        (folder / "README.md").write_text(adapter_card(base, loader=loader_of_base(model)), encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def record_base(model: nn.Module, folder: Path) -> None:
    """Write into all of a model's adapters that are saved in `folder` that their base is sparsified.

    The record (`base_sparsified_by_hf_twell` in adapter_config.json) holds the base's `twell` entry, but not the
    density and the unions, which are those of base and adapter together.
    """
    if not hasattr(model, "peft_config"):
        return
    entry = without_activity(model.config.twell)
    for part in ("", *model.peft_config):  # peft gives named adapters folders of their own
        path = folder / part / ADAPTER_CONFIG
        if path.is_file():
            config = json.loads(path.read_text())
            path.write_text(json.dumps({**config, RECORD: entry}, indent=2, sort_keys=True))


def load_adapter(
    path: str | Path,
    base: nn.Module | str | Path | None = None,
    *,
    backend: str = "auto",
    trainable: bool = False,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    **hub: Any,
) -> "PeftModel":
    """Load an adapter onto its base, which is sparsified first.

    Args:
        path: folder or Hub name of the adapter.
        base: the base, if not the one that the adapter names; a model in hand is converted in place.
        backend: of the sparse kernels.
        trainable: whether the adapter goes on training.
        dtype, device: how to load the base.
        hub: `revision`, `token` and the like, of the adapter.

    Returns:
        The PEFT model, in evaluation mode unless it is trainable.

    Raises:
        ValueError: no adapter, one that does not say that its base is sparsified, pickled, missing, mis-shaped or
            non-finite adapter weights, a base that cannot be converted, or one of another task that is not in hand. A
            base in hand has not changed then, but where tensors are missing or mis-shaped, or peft refuses the config:
            that shows only once peft has put its modules into the base. Load such a base anew.
        OSError: no folder of that path, or the base that it names is not to be had.
    """
    from peft import PeftModel, get_peft_model_state_dict

    config = read_adapter_config(path, **hub)
    entry = sparse_base(path, config, **hub)
    if entry is None:
        raise ValueError(
            f"{path} does not say that its base is sparsified; if it was trained on a dense base, load it with peft, "
            "else sparsify the base yourself and give it to peft.PeftModel.from_pretrained"
        )
    weights = _file(path, ADAPTER_WEIGHTS, hub)
    if weights is None:
        raise ValueError(f"{path} holds no {ADAPTER_WEIGHTS} (pickled weights are refused); save the adapter again")
    saved = tensor_shapes([weights])
    base = config.get("base_model_name_or_path") if base is None else base
    if not isinstance(base, nn.Module | str | Path):
        raise ValueError(f"{path} does not name its base; give it: load_adapter(path, base)")
    if not isinstance(base, nn.Module):
        loader = loader_of_saved_base(config)
        if loader is not AutoModelForCausalLM:
            raise ValueError(
                f"{path} is an adapter of another task, and only causal language models are loaded here; load the base "
                f"by {loader.__name__}, and give it: load_adapter(path, base)"
            )
        base = _load_base(path, base, dtype, device)
    _check_places(path, base, saved)
    with safe_open(weights, "pt") as file:
        check_finite(path, ((name, file.get_tensor(name)) for name in saved))
    sparsify(base, backend=backend, layers=entry.get("layers"))
    with warnings.catch_warnings(), one_line_errors(f"{path} does not fit its base"):
        warnings.filterwarnings("ignore", message=rf"Unexpected keyword arguments \['{RECORD}'\]")
        warnings.filterwarnings("ignore", message="Found missing adapter keys")  # refused below
        model = PeftModel.from_pretrained(base, str(path), is_trainable=trainable, **hub_options(hub))
    record_density(model.config, sparse_ffns(model), None)  # that of the base is not that of both
    loaded = get_peft_model_state_dict(model, save_embedding_layers=False)
    strange = saved.keys() - get_peft_model_state_dict(model, save_embedding_layers=True).keys()
    if strange:
        raise _no_place(path, base, min(strange))
    check_complete(path, loaded.keys() - saved.keys())
    check_finite(path, loaded.items())
    return model.train(trainable)


def _check_places(path, base: nn.Module, names: Iterable[str]) -> None:
    """Refuse tensors for parts that the base does not have, as those of an adapter of another class are.

    What peft makes of the parts that are there, it says only once it has changed them.
    """
    prefix = "base_model.model."
    parts = {name: name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
    strange = [name for name, part in parts.items() if not hasattr(base, part)]
    if strange:
        raise _no_place(path, base, min(strange))


def _no_place(path, base: nn.Module, name: str) -> ValueError:
    return ValueError(
        f"{path} holds {name}, for which {type(base).__name__} has no place; load the class that it was trained on, "
        "and give that: load_adapter(path, base)"
    )


def load_with_adapter(
    path: str | Path, *, dtype: torch.dtype | str | None = None, device: torch.device | str = "cpu"
) -> nn.Module:
    """The model of a folder or Hub name; of an adapter's folder, the base that it names with the adapter on it. Errors
    are those of `load_causal_lm` and `load_adapter`."""
    if Path(path, "config.json").is_file() or not Path(path, ADAPTER_CONFIG).is_file():
        return load_causal_lm(path, dtype=dtype, device=device)
    model = load_adapter(path, dtype=dtype, device=device)
    model.name_or_path = str(path)  # in results; the base's stays in the config
    return model


def sparse_base(path: str | Path, config: dict, **hub: Any) -> dict | None:
    """The `twell` entry of the base that an adapter was trained on, or None if nothing says that it was sparsified."""
    entry = config.get(RECORD)
    if entry is not None:
        if not isinstance(entry, dict) or not isinstance(entry.get("layers"), list | None):
            raise ValueError(f"{path}: {RECORD} is {entry!r}; this package writes {{'version': 1, 'layers': ...}}")
        if entry.get("version", 1) != FORMAT_VERSION:
            raise ValueError(
                f"{path}: {RECORD} has version {entry['version']!r}, this package knows {FORMAT_VERSION}; upgrade it"
            )
        return entry
    card = _file(path, "README.md", hub)
    with one_line_errors(f"{path}: its README.md cannot be read"):
        tags = ModelCard.load(card, ignore_metadata_errors=True).data.get("tags") if card else None
    return {"layers": None} if isinstance(tags, list) and TAG in tags else None


def _load_base(path, base: str | Path, dtype, device) -> nn.Module:
    try:
        return load_causal_lm(base, dtype=dtype, device=device)
    except OSError as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        base = " ".join(str(base).split())
        raise OSError(f"{path} names the base {base} ({reason}); give it: load_adapter(path, base)") from error


def loader_of_base(model: nn.Module) -> type:
    """What loads the base of a PEFT model, or of a Transformers model that took the adapter itself."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return loading_class({"architectures": [type(base).__name__.removeprefix("FSDP")]})


def loader_of_saved_base(config: dict) -> type:
    """What loads the base of an adapter with this adapter_config.json, which names a class where no task was given."""
    named = config.get("auto_mapping")
    name = named.get("base_model_class") if isinstance(named, dict) else ""
    return LOADERS.get(str(config.get("task_type"))) or loading_class({"architectures": [str(name)]})


def read_adapter_config(path: str | Path, **hub: Any) -> dict:
    """The content of an adapter's adapter_config.json; an OSError without a folder of that path, a ValueError where
    there is none, or it holds no mapping of finite numbers and texts."""
    check_folder(path, "an adapter")
    check_hub(path, **hub)
    found = _file(path, ADAPTER_CONFIG, hub)
    if found is None and not Path(path).is_dir():
        raise ValueError(f"there is no folder {path} here, and as a name on the Hub it gives no {ADAPTER_CONFIG}")
    if found is None:
        named = ", ".join(sorted(file.parent.name for file in Path(path).glob(f"*/{ADAPTER_CONFIG}")))
        others = f", but adapters in subfolders; give the path of one of them: {named}" if named else ""
        raise ValueError(f"{path} is no adapter: it holds no {ADAPTER_CONFIG}{others}")
    try:
        config = json.loads(found.read_text(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{found} is no JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{found} holds no mapping")
    return config


def _no_constant(name: str):
    raise ValueError(f"it holds {name}")


def _file(path, name: str, hub: dict) -> Path | None:
    found = cached_file(str(path), name, **hub_options(hub), _raise_exceptions_for_missing_entries=False)
    return Path(found) if found else None
