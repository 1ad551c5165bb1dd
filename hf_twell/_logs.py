"""The rows that `SparsityCallback` adds to a trainer's logs, and what it says of its controller."""

import logging

logger = logging.getLogger(__name__)

LAYER_PREFIX = "twell/layer_"
AT_BOUND = {
    "upper": "upper bound, with more active neurons than the path to the target has; give more steps, a "
    "longer warmup_steps, a higher learning rate or l1_bounds with a higher second number",
    "lower": "lower bound, with fewer active neurons than the path to the target has; give a lower "
    "target_density, layer_shares='free' or l1_bounds with a lower first number",
}


def rows_of_report(report: dict, ffns: list, *, layer_weights: bool, layers: bool) -> dict[str, float]:
    """`L1Penalty.report()` as log rows, and the way that blocks on a GPU take where they have a choice.

    Args:
        layer_weights: whether layers have weights of their own.
        layers: whether to give each layer's figures too.
    """
    keys = ("l0", "density", "l1", "dead")
    rows = {f"twell/{key}": report[key] for key in (*keys, "l1_weight")}
    on_kernels = [ffn.twell.on_kernels for ffn in ffns]
    if any(way is not None for way in on_kernels):
        rows["twell/layers_on_kernels"] = float(sum(map(bool, on_kernels)))
    if not layers:
        return rows
    keys = (*keys, "l1_weight") if layer_weights else keys
    for ffn, layer, way in zip(ffns, report["layers"], on_kernels, strict=True):
        row = {key: layer[key] for key in keys} | ({} if way is None else {"on_kernels": float(way)})
        rows |= {layer_prefix(ffn) + key: value for key, value in row.items()}
    return rows


def layer_prefix(ffn) -> str:
    """How the names of one block's rows begin."""
    return f"{LAYER_PREFIX}{ffn.twell.layer:02d}/"


def log_without_layers(on_log, args, state, control, logs=None, **kwargs):
    """`on_log` of a callback for the console, where every layer's figures would bury the loss."""
    logs = {key: value for key, value in (logs or {}).items() if not key.startswith(LAYER_PREFIX)}
    return on_log(args, state, control, logs=logs, **kwargs)


def warn_of_bounds(controller, told: set, ffns: list, step: int) -> None:
    """Log which layers' coefficients have come to a bound, each once; `told` remembers them."""
    held, weights = controller.held(), controller.weights().tolist()
    for side, layers in held.items():
        new = [layer for layer in layers if (side, layer) not in told]
        told.update((side, layer) for layer in new)
        if new:
            names = ", ".join(f"{ffns[layer].twell.name} ({weights[layer]:.3g})" for layer in new)
            if controller.layer_shares == "free":
                names = f"all layers ({weights[0]:.3g})"
            logger.warning("step %d: the L1 weight of %s is at its %s", step, names, AT_BOUND[side])


def warn_of_miss(controller, ffns: list) -> None:
    """Log which layers ended more than a tenth off the target."""
    missed = controller.missed()
    if not missed:
        return
    names = [f"{ffns[layer].twell.name} {density:.2%}" for layer, density in missed.items()]
    if controller.layer_shares == "free":
        names = [f"the layers' mean is {sum(missed.values()) / len(missed):.2%}"]
    logger.warning(
        "target_density=%g was missed by more than a tenth: %s; give more steps, a higher learning rate or "
        "another warmup_steps (0.1 of many steps, 0.4 of about a hundred)",
        controller.target_density,
        ", ".join(names),
    )
