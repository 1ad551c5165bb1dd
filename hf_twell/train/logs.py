"""The rows that `SparsityCallback` adds to a trainer's logs, and what it says of its controller."""

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_twell.blocks.modeling import SparseBlock
from hf_twell.models.cards import LOST
from hf_twell.train.controller import DensityController
from hf_twell.train.learning_rates import Proposal, rate_warning

logger = logging.getLogger(__name__)

JUDGED_FROM = 0.25  # of a run: before, the swap to ReLU and the way to the target show, which training mends
MANY_DEAD = 0.2  # share of neurons; our study's conversions had at most 0.04
DEAD_TOKENS = 16_384  # of fewer, neurons that are rarely needed may all lack
TOKENS_TIMES_TARGET = 200_000  # 20 million tokens to 1 %, 2 million to 10 %; judgement, the study took 26 million
PRETRAINED = 0.75  # times an untrained model's loss, the logarithm of its vocabulary: pretrained ones are below
UNION_OVER_DENSITY = 4  # of 64 tokens, in conversions whose neighbours were pressed to share neurons

LAYER_PREFIX = "twell/layer_"
AT_BOUND = {
    "upper": "upper bound, with more active neurons than the path to the target has; give more steps, a "
    "longer warmup_steps, a higher learning rate or l1_bounds with a higher second number",
    "lower": "lower bound, with fewer active neurons than the path to the target has; give a lower "
    "{target}, layer_shares='free' or l1_bounds with a lower first number",
}


def rows_of_report(report: dict, ffns: list[SparseBlock], *, layer_weights: bool, layers: bool) -> dict[str, float]:
    """`L1Penalty.report()` as log rows, of each layer too with `layers`, with weights of its own where `layer_weights`
    says so; and the way that blocks on a GPU take where they have a choice."""
    keys = ["l0", "density", *(key for key in report if key.startswith("union_")), "l1", "dead"]
    rows = {f"twell/{key}": report[key] for key in [*keys, "l1_weight"]}
    on_kernels = [ffn.twell_state.on_kernels for ffn in ffns]
    if any(way is not None for way in on_kernels):
        rows["twell/layers_on_kernels"] = float(sum(map(bool, on_kernels)))
    if not layers:
        return rows
    keys += ["l1_weight"] if layer_weights else []
    for ffn, layer, way in zip(ffns, report["layers"], on_kernels, strict=True):
        row = {key: layer[key] for key in keys} | ({} if way is None else {"on_kernels": float(way)})
        rows |= {layer_prefix(ffn) + key: value for key, value in row.items()}
    return rows


def layer_prefix(ffn: SparseBlock) -> str:
    """How the names of one block's rows begin."""
    part = "" if ffn.twell.part is None else f"_{ffn.twell.part}"
    return f"{LAYER_PREFIX}{ffn.twell.layer:02d}{part}/"


def hide_layers(callbacks: list[TrainerCallback]) -> None:
    """Keep the layers' rows off the console, where they would bury the loss."""
    for callback in callbacks:
        if isinstance(callback, ProgressCallback | PrinterCallback) and "on_log" not in vars(callback):
            callback.on_log = functools.partial(_log_without_layers, callback.on_log)


def show_layers(callbacks: list[TrainerCallback]) -> None:
    """Undo `hide_layers`."""
    for callback in callbacks:
        if getattr(vars(callback).get("on_log"), "func", None) is _log_without_layers:
            del callback.on_log


def _log_without_layers(
    on_log: Callable,
    args: TrainingArguments,
    state: TrainerState,
    control: TrainerControl,
    logs: dict | None = None,
    **kwargs: Any,
) -> None:
    logs = {key: value for key, value in (logs or {}).items() if not key.startswith(LAYER_PREFIX)}
    on_log(args, state, control, logs=logs, **kwargs)


def warn_of_bounds(
    controller: DensityController, told: set, ffns: list[SparseBlock], step: int, *, target: str | None
) -> None:
    """Log which layers' coefficients have come to a bound, each once; `told` remembers them, and `target` names the
    argument that gave the target."""
    held, weights = controller.held(), controller.weights().tolist()
    for side, layers in held.items():
        new = [layer for layer in layers if (side, layer) not in told]
        told.update((side, layer) for layer in new)
        if new:
            names = ", ".join(f"{ffns[layer].twell.name} ({weights[layer]:.3g})" for layer in new)
            if controller.layer_shares == "free":
                names = f"all layers ({weights[0]:.3g})"
            how = AT_BOUND[side].format(target=target)
            logger.warning("step %d: the penalty's weight of %s is at its %s", step, names, how)


def warn_of_miss(controller: DensityController, ffns: list[SparseBlock], *, target: str | None) -> None:
    """Log which layers ended more than a tenth off the target; `target` as in `warn_of_bounds`."""
    missed = controller.missed()
    if not missed:
        return
    names = [f"{ffns[layer].twell.name} {density:.2%}" for layer, density in missed.items()]
    mean = sum(missed.values()) / len(missed)
    if controller.layer_shares == "free":
        names = [f"the layers' mean is {mean:.2%}"]
    longer = "more steps, a higher learning rate or another warmup_steps"
    logger.warning(
        "%s=%g was missed by more than a tenth: %s; give %s",
        target,
        controller.target_density,
        ", ".join(names),
        longer if mean > controller.target_density else "a lower learning rate or more steps",
    )


def warn_of_few_tokens(tokens: float, target: str, value: float) -> None:
    """Log that a run is too short for its target, an argument of this name; `tokens` are those of all its steps."""
    density = value if target == "target_density" else value / UNION_OVER_DENSITY
    if tokens * density < TOKENS_TIMES_TARGET:
        logger.warning(
            "this run reads %s tokens, few for %s=%g (in our study a density of 0.01 took 26 million); give "
            "more steps or a higher %s",
            f"{tokens:,.0f}", target, value, target,
        )  # fmt: skip


def warn_of_rate(trainer: Trainer, proposal: Proposal, parent_loss: float | None) -> None:
    """Log that a pretrained model's conversion has a learning rate far from the proposed one.

    By its loss the dense parent was pretrained; where that is not known, the model may be untrained or sparse long ago.
    """
    if trainer.state.global_step or not trainer.is_world_process_zero() or parent_loss is None:
        return
    untrained = math.log(trainer.model.config.get_text_config().vocab_size)
    warning = rate_warning(trainer.args.learning_rate, proposal, "learning_rate")
    if warning is not None and parent_loss < PRETRAINED * untrained:
        logger.warning("%s", warning)


def warn_of_loss(
    trainer: Trainer, logs: dict, report: dict, *, parent_loss: float | None, target: str | None, layer_shares: str
) -> bool:
    """Log, from a quarter of the run on, that a pretrained model is being lost, and what to change; returns whether
    there was something to warn of. `report` is what `L1Penalty.report` returned with the `logs` of this step;
    `parent_loss` is None where the dense parent's is not known, and `target` in a run with an `l1_weight`."""
    if trainer.state.global_step < JUDGED_FROM * trainer.state.max_steps:
        return False
    signs = []
    if parent_loss is not None and logs["loss"] > LOST * parent_loss:
        signs.append(f"a training loss of {logs['loss']:.2f}, where the dense parent has {parent_loss:.2f}")
    if report["tokens"] >= DEAD_TOKENS and report["dead"] > MANY_DEAD:
        signs.append(f"{report['dead']:.0%} of neurons not active for any of {report['tokens']:,.0f} tokens")
    if signs:
        changes = ["more steps", f"another learning rate than {trainer.args.learning_rate:g}"]
        changes += ["layer_shares='free'"] if target is not None and layer_shares == "equal" else []
        changes += ["a lower l1_weight" if target is None else f"a higher {target}"]
        logger.warning(
            "step %d: the pretrained model is being lost: %s; give %s or %s",
            trainer.state.global_step, " and ".join(signs), ", ".join(changes[:-1]), changes[-1],
        )  # fmt: skip
    return bool(signs)
