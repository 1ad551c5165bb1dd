"""To the Hub: weights and config in stock form with our model card, from a folder or a model."""

import json
import logging
import tempfile
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_twell.blocks.modeling import sparse_ffns
from hf_twell.files.checkpoints import STATE_NAME
from hf_twell.files.configs import one_line_errors, read_config
from hf_twell.files.folders import CHAT_TEMPLATES, MEASURED_NAME, has_chat_template, save_model, training_record
from hf_twell.models.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    loader_of_saved_base,
    read_adapter_config,
    save_adapter,
    sparse_base,
)
from hf_twell.models.card_scores import Scores
from hf_twell.models.cards import adapter_card, costly, is_repo, mean_density, measured_sparsity, model_card, untrained
from hf_twell.models.loading import check_checkpoint

logger = logging.getLogger(__name__)

# A model folder of Trainer's also holds its state, and pickles; a Hub model needs none of it.
LEFT_OUT = ("*.bin", "*.pt", "*.pth", "*.pkl", STATE_NAME, MEASURED_NAME, "trainer_state.json", "README.md", ".*", "_*")


def push_to_hub(
    model: PreTrainedModel,
    repo_id: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    base_model: str | None = None,
    sparsity: Mapping | None = None,
    scores: Scores = None,
    parent_scores: Scores = None,
    max_shard_size: int | str | None = None,
    **options: Any,
) -> dict:
    """Publish a sparsified model, or the active adapter of a PEFT model on a sparsified base, with our model card.

    A sparsified model's own `model.push_to_hub(repo_id, ...)` is this, until `unpatch`; it takes all arguments of
    Transformers' method.

    Args:
        model: a sparsified Transformers model, or a PEFT model around one.
        repo_id: "user/name"; created if it does not exist.
        tokenizer: is published along, if given.
        base_model: Hub name of the dense model it was made from; by default where the model was loaded from.
        sparsity: what `measure_sparsity` returned, for the card.
        scores: what `evaluate` returned, for the card; a list of what several calls returned.
        parent_scores: likewise, of the dense parent, to stand beside them.
        max_shard_size: of the weight files, as `save_pretrained` has it.
        options: `card`, `tags`, `token`, `private`, `revision`, `commit_message`, ..., as `push_folder` has them.

    Returns, Raises: as `push_folder`; ValueError where the model has no sparse blocks, or several active adapters.
    """
    if not isinstance(model, nn.Module) or not sparse_ffns(model):
        raise ValueError(
            f"{type(model).__name__} has no sparse blocks; call hf_twell.sparsify(model), or push it as it is"
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "model")
        if hasattr(model, "peft_config"):  # an adapter's own config names its base
            active = _active_adapter(model)
            save_adapter(model, folder)
            folder = folder / active if (folder / active).is_dir() else folder  # peft's place for all but "default"
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        else:
            sizes: dict[str, Any] = {"max_shard_size": max_shard_size} if max_shard_size else {}
            save_model(model, folder, tokenizer, **sizes)
            base_model = base_model or model.config._name_or_path
        options |= {"base_model": base_model, "sparsity": sparsity, "scores": scores, "parent_scores": parent_scores}
        return push_folder(folder, repo_id, **options)


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    base_model: str | None = None,
    sparsity: Mapping | None = None,
    scores: Scores = None,
    parent_scores: Scores = None,
    card: str | Path | None = None,
    tags: Iterable[str] | None = None,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    create_pr: bool = False,
) -> dict:
    """Publish the folder of a sparse model or adapter in one commit; the folder itself is only read.

    Args:
        folder: what `save_pretrained`, `save_adapter` or the commands wrote.
        base_model, sparsity, scores, parent_scores: see `push_to_hub`; an adapter's published config names `base_model`
            as its base.
        card: a README.md to publish in place of ours.
        tags: further tags for the card.
        token: by default $HF_TOKEN or what `hf auth login` stored; it is put into no message.
        private: make a new repository private.
        revision: branch to commit to.
        commit_message, commit_description: by default "Upload sparse model" and nothing.
        create_pr: open a pull request with the commit.

    Returns:
        {"repo_id", "url", "commit", "files"}; `url` is the pull request's where one was opened.

    Raises:
        ValueError: as `folder_card`.
        OSError: the Hub refused or the upload broke off; says how to go on.
    """
    folder = Path(folder)
    text = folder_card(
        folder, repo_id, base_model=base_model, sparsity=sparsity, scores=scores, parent_scores=parent_scores
    )
    if card is not None:
        text = Path(card).read_text(encoding="utf-8")
    if tags:
        tagged = ModelCard(text)
        tagged.data.tags = list(dict.fromkeys([*(tagged.data.tags or []), *tags]))
        text = str(tagged)
    paths = sorted(
        path for path in folder.iterdir() if path.is_file() and not any(fnmatch(path.name, p) for p in LEFT_OUT)
    )
    paths += sorted(folder.glob(f"{CHAT_TEMPLATES}/*.jinja"))
    contents: dict[str, str | bytes] = {path.relative_to(folder).as_posix(): str(path) for path in paths}
    if ADAPTER_CONFIG in contents:  # its own base may be a folder of this machine
        config = read_adapter_config(folder)
        config["base_model_name_or_path"] = _adapter_base(folder, config, base_model)
        contents[ADAPTER_CONFIG] = json.dumps(config, indent=2, sort_keys=True).encode()
    operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
    operations.append(CommitOperationAdd("README.md", text.encode()))
    api = HfApi(token=token, library_name="hf_twell")
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.create_commit(
            repo_id,
            operations,
            commit_message=commit_message or "Upload sparse model",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )
    except Exception as error:
        raise OSError(_broken_off(error, repo_id, token)) from None  # its traceback may hold the token
    files = [operation.path_in_repo for operation in operations]
    url = commit.pr_url or f"{api.endpoint}/{repo_id}"
    return {"repo_id": repo_id, "url": url, "commit": commit.oid, "files": files}


def folder_card(
    folder: str | Path,
    repo_id: str,
    *,
    base_model: str | None = None,
    sparsity: Mapping | None = None,
    scores: Scores = None,
    parent_scores: Scores = None,
) -> str:
    """The card of a folder's sparse model or adapter, which is checked first; a warning tells of a bare swap to ReLU. A
    ValueError of no such model, no name of a repository, an adapter whose base is not on the Hub, damaged weights, or
    figures of another model or that are none."""
    validate_repo_id(repo_id)
    if "/" not in repo_id:  # the Hub would put the user before it, and the card name a repository that there is not
        raise ValueError(f"{repo_id} names no user or organization; write USER/{repo_id}")
    folder = Path(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        config = read_adapter_config(folder)
        if sparse_base(folder, config) is None:
            raise ValueError(f"{folder} does not say that its base is sparsified; write it with hf_twell.save_adapter")
        if not (folder / ADAPTER_WEIGHTS).is_file():
            raise ValueError(f"{folder} holds no {ADAPTER_WEIGHTS}; save the adapter again")
        if sparsity or scores or parent_scores:
            raise ValueError("the card of an adapter holds no figures; merge it into a model to publish these")
        return adapter_card(_adapter_base(folder, config, base_model), repo_id, loader=loader_of_saved_base(config))
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no model folder: it has no config.json")
    config = read_config(folder)
    if config.get("twell") is None:
        raise ValueError(f"{folder} is no sparse model (its config has no twell entry); convert it: hf-twell sparsify")
    check_checkpoint(folder)
    if (activation := (sparsity or {}).get("activation", "relu")) != "relu":
        raise ValueError(f"the figures of sparsity are of a model with {activation}: run hf-twell inspect on {folder}")
    record = training_record(folder)
    with one_line_errors(f"the figures that are given, or recorded in {folder}, make no card"):
        density = mean_density(sparsity or measured_sparsity(record["measured"]), config)
        if recorded := untrained(record["method"], density):
            logger.warning("%s: %s Fine-tune it before others use it: hf-twell train", folder, recorded)
        elif cost := costly(record["measured"], config, scores, parent_scores):
            logger.warning("%s: %s The card says so", folder, cost)
        return model_card(
            repo_id,
            config,
            base_model=base_model,
            sparsity=sparsity,
            scores=scores,
            parent_scores=parent_scores,
            chat=has_chat_template(folder),
            **record,
        )


def _active_adapter(model: nn.Module) -> str:
    active = model.active_adapters
    active = active() if callable(active) else active  # of a Transformers model that took the adapter itself
    if len(active) != 1:
        raise ValueError(
            f"the adapters {', '.join(active)} are active together, and a repository holds one; choose it with "
            "model.set_adapter(name), or combine them with model.add_weighted_adapter(...)"
        )
    return active[0]


def _adapter_base(folder: Path, config: Mapping, base_model: str | None) -> str:
    base = base_model or config.get("base_model_name_or_path")
    if not is_repo(base):
        raise ValueError(
            f"{folder}: its base {base!r} is no name on the Hub, or a folder here is called so, and nobody else could "
            "load the adapter; name the dense base that others load: --base-model USER/NAME (base_model=)"
        )
    return str(base)


def _broken_off(error: Exception, repo_id: str, token: str | bool | None) -> str:
    # Of the Hub's many lines the first says it.
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    for secret in {token, get_token()} - {None, "", True, False}:
        reason = reason.replace(secret, "***")
    status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None
    if status in (401, 403):
        return f"{repo_id}: the Hub refused ({reason}); run `hf auth login` or set HF_TOKEN to a token that may write"
    return (
        f"{repo_id}: the upload broke off ({reason}); nothing was published and nothing changed here: do the same "
        "again, files that arrived are not sent twice"
    )
