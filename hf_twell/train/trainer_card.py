"""The model card of `trainer.push_to_hub()`: ours, with what the trainer knows, in place of Trainer's."""

import functools
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, Trainer

from hf_twell.blocks.architectures import find_ffns
from hf_twell.blocks.modeling import sparse_ffns
from hf_twell.models.adapters import loader_of_base, record_base
from hf_twell.models.card_scores import Scores
from hf_twell.models.cards import adapter_card, model_card
from hf_twell.train.logs import layer_prefix
from hf_twell.train.resuming import method_of, steps_of


def use_model_card(
    trainer: Trainer,
    *,
    base_model: str | None = None,
    sparsity: dict | None = None,
    scores: Scores = None,
    parent_scores: Scores = None,
) -> None:
    """Let `trainer.push_to_hub()` publish our model card in place of Trainer's; its figures as in `push_to_hub`.

    Without `sparsity`, L0 and, with `share`, the union of each layer are those that `SparsityCallback` stored in the
    model's config when training ended, else what it logged last.
    """
    figures = {"base_model": base_model, "sparsity": sparsity, "scores": scores, "parent_scores": parent_scores}
    trainer.create_model_card = functools.partial(_write_card, trainer, figures)


def _write_card(trainer: Trainer, figures: dict, model_name: str | None = None, **_: Any) -> None:
    if not trainer.is_world_process_zero():
        return
    folder, model = Path(trainer.args.output_dir), trainer.accelerator.unwrap_model(trainer.model)
    repo_id = trainer.hub_model_id or model_name or folder.name
    base_model = figures["base_model"] or model.config._name_or_path
    folder.mkdir(parents=True, exist_ok=True)  # trl's trainers write a card before their first checkpoint
    if hasattr(model, "peft_config"):
        record_base(model, folder)
        card = adapter_card(base_model, repo_id, loader=loader_of_base(model))
    else:
        sparsity = figures["sparsity"] or _logged_sparsity(trainer, model)
        config = model.config.to_dict() | {"architectures": [type(model).__name__.removeprefix("FSDP")]}
        given = {**figures, "base_model": base_model, "sparsity": sparsity}
        chat = bool(getattr(trainer.processing_class, "chat_template", None))
        card = model_card(repo_id, config, method=method_of(trainer), chat=chat, **given)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _logged_sparsity(trainer: Trainer, model: PreTrainedModel) -> dict | None:
    """The figures of the last log before the weights were as they are, if they are there for every layer.

    A log's are means over all steps since the one before, while the density falls: the config's replace them.
    """
    logs = [row for row in trainer.state.log_history if "twell/l0" in row and row["step"] <= steps_of(trainer)]
    row = logs[-1] if logs else None
    ffns = sparse_ffns(model)
    if row is None or len(ffns) != len(find_ffns(model)):
        return None
    entry = getattr(model.config, "twell", None) or {}
    stored = entry.get("density") or []
    stored = stored if len(stored) == len(ffns) else [None] * len(ffns)
    layers = []
    for index, (ffn, density) in enumerate(zip(ffns, stored, strict=True)):
        prefix = layer_prefix(ffn)
        if f"{prefix}l0" not in row:
            return None
        figures = {key: row[prefix + key] for key in ("l0", "density", "dead")}
        of_runs = f"{prefix}union_"
        unions = {key.removeprefix(of_runs): share for key, share in row.items() if key.startswith(of_runs)}
        experts, width = ffn.sizes()
        if experts is not None:  # as measured: the neurons of a token's own
            width = round(figures["l0"] / figures["density"]) if figures["density"] else 0
        if density is not None:
            figures |= {"l0": density * width, "density": density}
            unions = {run: shares[index] for run, shares in (entry.get("unions") or {}).items()}
        layers.append({**figures, "unions": unions, "name": ffn.twell.name, "intermediate_size": width})
    over = f"the tokens of the last log (step {row['step']})"
    where = "Measured in training, over"
    if None not in stored:
        known = "L0 and unions by what" if entry.get("unions") else "L0 by the density that"
        where = f"{known} `config.json` stores; dead neurons measured in training, over"
    mean = {key: sum(layer[key] for layer in layers) / len(layers) for key in ("l0", "density", "dead")}
    unions = {run: sum(layer["unions"][run] for layer in layers) / len(layers) for run in layers[0]["unions"]}
    return {**mean, "unions": unions, "layers": layers, "where": f"{where} {over}."}
