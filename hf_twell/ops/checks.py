"""What `hf_twell.ops.ffn` refuses before any backend is asked."""

import torch

from hf_twell.dispatch.key import EIGHT_BIT
from hf_twell.ops.runs import Runs


def check_tensors(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    w_gate: torch.Tensor | None,
    b_up: torch.Tensor | None,
    b_down: torch.Tensor | None,
    b_gate: torch.Tensor | None,
    s_up: torch.Tensor | None,
    s_down: torch.Tensor | None,
    s_gate: torch.Tensor | None,
    token_weight: torch.Tensor | None,
    tally: torch.Tensor | None,
) -> None:
    """Refuse, by a ValueError that says what would fit, shapes, devices and dtypes that do not belong together."""
    if w_up.ndim != 2:
        raise ValueError(f"w_up has shape {tuple(w_up.shape)}; expected (F, D), as nn.Linear stores it")
    intermediate, hidden = w_up.shape
    if x.ndim == 0 or x.shape[-1] != hidden:
        raise ValueError(f"x has shape {tuple(x.shape)}; its last size must be {hidden}, the columns of w_up")
    device = x.device
    quantized = check_scales(w_up, w_down, w_gate, s_up, s_down, s_gate)
    for name, tensor, shape in (
        ("w_up", w_up, (intermediate, hidden)),
        ("w_down", w_down, (hidden, intermediate)),
        ("w_gate", w_gate, (intermediate, hidden)),
        ("b_up", b_up, (intermediate,)),
        ("b_gate", b_gate, (intermediate,)),
        ("b_down", b_down, (hidden,)),
        ("s_up", s_up, None),
        ("s_down", s_down, None),
        ("s_gate", s_gate, None),
        ("tally", tally, (1 + intermediate,)),
        ("token_weight", token_weight, x.shape[:-1]),
    ):
        if tensor is None:
            continue
        if shape is not None and tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(shape)}")
        if tensor.device != device:
            raise ValueError(f"x is on {device} and {name} on {tensor.device}; move them to one device")
        # Autocast casts all of them; the report, the tokens' weights and scales are float32 beside any dtype.
        own = name in ("tally", "token_weight") or name.startswith("s_") or (quantized and name.startswith("w_"))
        mixed = tensor.dtype != x.dtype and not own
        if mixed and not torch.is_autocast_enabled(device.type):
            raise ValueError(f"x is {x.dtype} and {name} is {tensor.dtype}; give both one dtype, or use autocast")


def check_scales_of_terms(
    l1_scale: torch.Tensor | None, count_scale: torch.Tensor | None, tally: torch.Tensor | None
) -> None:
    """Refuse, by a ValueError, factors of L1 and of the count that are no tensors of one element, and a tally without
    one of them."""
    for name, scale in (("l1_scale", l1_scale), ("count_scale", count_scale)):
        if scale is not None and (not isinstance(scale, torch.Tensor) or scale.numel() != 1):
            raise ValueError(f"{name} is {scale!r}; give a tensor of one element")
    if tally is not None and l1_scale is None and count_scale is None:
        raise ValueError(
            "tally was given without l1_scale or count_scale; to count alone, give l1_scale=torch.zeros(())"
        )


def check_runs(
    x: torch.Tensor, count_scale: torch.Tensor | None, runs: Runs | None, unions: torch.Tensor | None
) -> None:
    """Refuse, by a ValueError, runs that are not those of x's tokens, or are given without the count term."""
    if runs is None:
        if unions is not None:
            raise ValueError("unions was given without runs, of which it counts the neurons; give both, or neither")
        return
    if count_scale is None:
        raise ValueError("runs was given without count_scale; runs of tokens add to the count term alone")
    if not isinstance(runs, Runs):
        raise ValueError(
            f"runs is a {type(runs).__name__}; give what hf_twell.blocks.batches.runs_of makes, or "
            "hf_twell.ops.runs.Runs(tokens, run)"
        )
    for name, tensor, size in (("runs", runs.run, x.shape[:-1].numel()), ("unions", unions, 1)):
        if tensor is None:
            continue
        if tensor.shape != (size,):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected ({size},)")
        if tensor.device != x.device:
            raise ValueError(f"x is on {x.device} and {name} on {tensor.device}; move them to one device")
    if unions is not None and unions.dtype != torch.float32:
        raise ValueError(f"unions is {unions.dtype}; give torch.float32")


def check_quantize_x(w_up: torch.Tensor, needs_grad: bool) -> None:
    """Refuse, by a ValueError, to quantize x for other than e4m3 weights, or where gradients are wanted: torchao's has
    none either."""
    if w_up.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"quantize_x=True, and w_up is {w_up.dtype}; x is quantized beside float8_e4m3fn weights alone: give "
            "those, with scales, or leave quantize_x out"
        )
    if needs_grad:
        raise ValueError(
            "quantize_x=True, and gradients are wanted; rounding x has none: use torch.no_grad(), or leave it out"
        )


def check_scales(
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    w_gate: torch.Tensor | None,
    s_up: torch.Tensor | None,
    s_down: torch.Tensor | None,
    s_gate: torch.Tensor | None,
) -> bool:
    """Whether the weights are int8 or float8_e4m3fn: then all of them are, with one float32 scale for each row. A
    ValueError names a weight that has no such scales, or scales that belong to no such weight."""
    given = {"up": (w_up, s_up), "down": (w_down, s_down), "gate": (w_gate, s_gate)}
    quantized = w_up.dtype in EIGHT_BIT
    for name, (weight, scale) in given.items():
        if weight is None and scale is None:
            continue
        if scale is None:
            if quantized or weight.dtype in EIGHT_BIT:
                kind = name_of(w_up.dtype if quantized else weight.dtype)
                raise ValueError(
                    f"w_{name} is {weight.dtype} and s_{name} is None; give {kind} for all weights, with scales"
                )
        elif weight is None or not quantized or weight.dtype != w_up.dtype:
            kinds = " or ".join(map(name_of, (w_up.dtype,) if quantized else EIGHT_BIT))
            raise ValueError(
                f"s_{name} was given, and w_{name} is {None if weight is None else weight.dtype}; scales go with "
                f"{kinds}, for all weights or for none"
            )
        elif scale.dtype != torch.float32 or tuple(scale.shape) not in ((len(weight),), (len(weight), 1)):
            raise ValueError(
                f"s_{name} is {scale.dtype} of shape {tuple(scale.shape)}; give float32, one for each of w_{name}'s "
                f"{len(weight)} rows"
            )
    return quantized


def name_of(dtype: torch.dtype) -> str:
    """Without "torch."."""
    return str(dtype).removeprefix("torch.")
