"""Feed-forward blocks in int8 and fp8 for the operator's tests: of `make_case`, whose masks no rounding changes."""

import torch

from hf_twell.dispatch.limits import limit
from hf_twell.ops import reference
from tests.ffn_cases import FEW_PAIRS, make_case, relative_rms

WEIGHTS = ("w_up", "w_down", "w_gate")
KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def quantize(weight, kind="int8"):
    """8-bit values and float32 scales (N, 1), symmetric and by rows, as torchao's weight-only configs make them."""
    largest = weight.float().abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).eps)
    if kind == "fp8":
        scale = largest / 448
        return (weight.float() / scale).clamp(-448, 448).to(KINDS[kind]), scale
    scale = largest / 127.5
    return (weight.float() / scale).round().clamp(-128, 127).to(KINDS[kind]), scale


def quantized_case(tokens, hidden, intermediate, density, dtype, *, kind="int8", by_column=False, **options):
    """`make_case` with 8-bit weights and their scales, `w_down` by columns if asked."""
    case = quantized(make_case(tokens, hidden, intermediate, density, dtype, **options), kind)
    if by_column:
        case["w_down"] = case["w_down"].t().contiguous().t()
    return case


def quantized(case, kind="int8"):
    """The same block with 8-bit weights and their scales."""
    case = dict(case)
    for name in WEIGHTS:
        if case[name] is not None:
            case[name], case[f"s_{name[2:]}"] = quantize(case[name], kind)
    return case


def dense_in(case, dtype):
    """The same block of plain weights in `dtype`, for an arithmetic of another precision."""
    plain = {name: None if t is None else t.to(dtype) for name, t in case.items() if name[:2] != "s_"}
    for name in WEIGHTS:
        if case[name] is not None:
            plain[name] = reference.dequantized(case[name], case[f"s_{name[2:]}"], dtype)
    return plain


def wide_x(case, quantize_x):
    """x in fp64, or what its quantized rows stand for."""
    x = case["x"]
    if quantize_x and x.numel() > limit("kDecodeMaxTokens") * x.shape[-1]:
        return reference.dequantized_rows(*reference.quantized_rows(x), torch.float64)
    return x.double()


def truth_of(case, quantize_x=False):
    """fp64 arithmetic on the dequantized weights."""
    return reference.ffn(**dense_in(case, torch.float64) | {"x": wide_x(case, quantize_x)})


def eager_by_rows(x, w_up, w_down, w_gate=None, *, b_up=None, b_down=None, b_gate=None, s_up, s_down, s_gate=None):
    """The block of a quantized x by PyTorch's product of e4m3, whose sums have the tensor cores' precision on a GPU.

    h and down are as in eager PyTorch with dequantized weights. D is a multiple of 16.
    """
    values, scales = reference.quantized_rows(x.reshape(-1, x.shape[-1]))
    one = torch.ones((), device=x.device)

    def product(w, scale, bias):
        padded = torch.zeros(-(-len(w) // 16) * 16, w.shape[1], dtype=torch.int8, device=x.device)  # as it wants F
        padded[: len(w)] = w.view(torch.int8)
        padded = padded.view(w.dtype).t()
        sums = torch._scaled_mm(values, padded, one, one, out_dtype=torch.float32, use_fast_accum=True)
        y = sums[:, : len(w)] * scale.flatten() * scales
        return (y if bias is None else y + bias.float()).to(x.dtype)

    up = product(w_up, s_up, b_up)
    h = torch.relu(up) if w_gate is None else torch.relu(product(w_gate, s_gate, b_gate)) * up
    return reference.linear(h, w_down, s_down, b_down).view(x.shape)


def assert_as_good_as_eager(function, case, quantize_x=False, other_eager=None):
    """At most twice the error of eager PyTorch in x's dtype, against fp64 arithmetic on the dequantized weights.

    Args:
        quantize_x: the block of a quantized x, which `function` computes.
        other_eager: another function of PyTorch's in x's dtype for it; twice its error is allowed, too.
    """
    dtype = case["x"].dtype
    truth, ours = truth_of(case, quantize_x), function(**case)
    assert (ours.shape, ours.dtype) == (truth.shape, dtype)
    if not truth.any():
        assert not ours.any(), "y must be exactly zero"
        return
    eager = relative_rms(reference.ffn(**case, quantize_x=quantize_x), truth)
    if other_eager is not None:
        eager = max(eager, relative_rms(other_eager(**case), truth))
    bound = max(2 * eager, 2**-21)
    if case["b_down"] is None:
        x = wide_x(case, quantize_x)
        up = reference.linear(x, case["w_up"], case["s_up"], _wide(case["b_up"]))
        gate = up
        if case["w_gate"] is not None:
            gate = reference.linear(x, case["w_gate"], case["s_gate"], _wide(case["b_gate"]))
        if (gate > 0).any(0).sum() < 64:
            # Beside h and y, the rows of down are rounded where a path dequantizes them first: 3 roundings for 2.
            bound = max(bound, 1.5 * FEW_PAIRS[dtype])
    error = relative_rms(ours, truth)
    assert error <= bound, f"error {error:.2e}, at most {bound:.2e} is allowed"


def _wide(tensor):
    return None if tensor is None else tensor.double()
