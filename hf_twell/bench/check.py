"""What a result must keep to before it is timed: at most twice the error of same-dtype eager PyTorch."""

import torch

FEW_PAIRS = 64  # below so many active pairs a tensor's error is a few elements' luck
FEW_PAIRS_LIMIT = {torch.bfloat16: 2**-7, torch.float16: 2**-10}


def wider_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the truth is computed in for results in `dtype`."""
    return torch.float64 if dtype == torch.float32 else torch.float32


@torch.no_grad()
def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """||value - truth|| / ||truth||; infinite where the truth is all zero and the value is not."""
    size = truth.double().norm().item()
    difference = (value.double() - truth.double()).norm().item()
    if size:
        return difference / size
    return difference if difference == 0 else float("inf")


def check_block(
    outputs: dict[str, dict], truth: dict, dtype: torch.dtype, tokens: int, pairs: float
) -> dict[str, dict]:
    """Relative RMS errors of one block's result and gradients, {tensor: {variant: error}}, of `outputs` {variant:
    {tensor: value}} against `truth` in higher precision. `tokens` and `pairs` (active neurons, over all tokens) are of
    one input. A ValueError where the sparse result, or one of its gradients, is off by more than allowed."""
    errors = {}
    for name, wanted in truth.items():
        error = errors[name] = {variant: relative_error(tensors[name], wanted) for variant, tensors in outputs.items()}
        allowed = 2 * error["eager"]
        if pairs < FEW_PAIRS:
            allowed = max(allowed, FEW_PAIRS_LIMIT.get(dtype, 0.0))
        if not error["sparse"] <= allowed:
            raise ValueError(
                f"{name} of the sparse block is off by {error['sparse']:.3g} (relative RMS) at {tokens} tokens, "
                f"{pairs / tokens:.4g} active neurons a token; allowed is {allowed:.3g}, eager's own error being "
                f"{error['eager']:.3g}. A wrong result has no speed; please report it."
            )
    return errors


def check_logits(outputs: dict[str, torch.Tensor], truth: torch.Tensor) -> dict:
    """Errors against higher precision of the first sequences, and differences from eager PyTorch of all of them. A
    ValueError where a sparse variant's error is over twice the eager one's, or its difference from it over three
    times."""
    errors = {name: relative_error(value[: len(truth)], truth) for name, value in outputs.items()}
    far = {name: relative_error(outputs[name], outputs["eager"]) for name in outputs if name.startswith("sparse")}
    allowed = errors["eager"]
    for name, difference in far.items():
        if not (errors[name] <= 2 * allowed and difference <= 3 * allowed):
            raise ValueError(
                f"logits of {name} are off by {errors[name]:.3g} (relative RMS), and differ from eager's by "
                f"{difference:.3g}; allowed are {2 * allowed:.3g} and {3 * allowed:.3g}, eager's own error being "
                f"{allowed:.3g}. A wrong result has no speed; please report it."
            )
    return {**{f"error_{name}": value for name, value in errors.items()}, "logits_difference": max(far.values())}


def check_training(losses: dict[str, float], errors: dict[str, dict], loss: float, dtype: torch.dtype) -> None:
    """Compare a training step's loss and gradients in each variant, `errors` {variant: {kind of parameter: relative
    error}}, with those in higher precision. A ValueError where a loss is off by more than the dtype's resolution, or a
    sparse variant's gradients by more than twice eager's error."""
    allowed_loss = max(torch.finfo(dtype).eps, 1e-5)
    for name, value in losses.items():
        if not abs(value - loss) <= allowed_loss * abs(loss):
            raise ValueError(
                f"the loss of {name} is {value:.6g} where {loss:.6g} is right; allowed is a difference of "
                f"{allowed_loss:.2g} of it. A wrong step has no speed; please report it."
            )
        for kind, error in errors[name].items():
            allowed = 2 * errors["eager"][kind]
            if name.startswith("sparse") and not error <= allowed:
                raise ValueError(
                    f"gradients of {kind} in {name} are off by {error:.3g} (relative RMS over all layers); allowed is "
                    f"{allowed:.3g}, twice eager's own error. A wrong step has no speed; please report it."
                )


def kernel_calls(result: torch.Tensor) -> int:
    """How many of the operations that made a differentiable result, outside compiled graphs, are our operator."""
    seen, waiting = set(), [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return sum("hf_twell_ffn" in node.name() for node in seen)
