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


def strided(case):
    """The same case: x of many dimensions in another order, weights and scales that are parts of larger tensors."""
    x, bits = case["x"].unflatten(0, (3, 4, -1)), {name: case[name].view(torch.int8) for name in WEIGHTS}
    parts = {"w_up": torch.stack([bits["w_up"]] * 2, 1)[:, 0]}
    for name in ("w_gate", "w_down"):
        parts[name] = torch.cat([bits[name]] * 2, 1)[:, : bits[name].shape[1]]
    return case | {
        "x": x.transpose(0, 2).contiguous().transpose(0, 2),
        **{name: values.view(case[name].dtype) for name, values in parts.items()},
        "s_down": torch.stack([case["s_down"].flatten()] * 2, 1)[:, 0],
        "s_up": case["s_up"].flatten(),
    }


def assert_scales_reach_their_own_sums(function, case, assert_right):
    """Those of zero; and of NaN and infinity, of which a column of y follows its row of down_proj, and no other."""
    for name in ("up", "gate"):
        case[f"s_{name}"][::3] = 0
        case[f"w_{name}"].view(torch.int8)[::3] = 0
    case["s_down"][::5] = 0
    assert_right(case)
    plain, kept = function(**case), torch.arange(len(case["s_down"])) != 7
    for value in (float("nan"), float("inf")):
        broken = case | {"s_down": case["s_down"].clone()}
        broken["s_down"][7] = value
        y = function(**broken)
        assert not y[:, 7].isfinite().any()
        assert torch.equal(y[:, kept], plain[:, kept])
    broken = case | {"s_gate": case["s_gate"].clone()}
    broken["s_gate"][5] = float("nan")
    assert function(**broken).isnan().any(1).all(), "a NaN gate counts as active, as relu keeps it"


def assert_nan_weights_reach_their_own_sums(function, case):
    """Of a case in fp8, whose masks no rounding changes."""
    plain, hidden = function(**case), case["x"].shape[1]
    active_TF = reference.linear(case["x"].float(), case["w_gate"], case["s_gate"]) > 0
    neuron = active_TF[0].nonzero()[0].item()
    active = active_TF[:, neuron]

    def broken(name, row, column, value):
        values = case[name].clone()
        values.view(torch.int8)[row, column] = value
        return function(**case | {name: values})

    assert broken("w_gate", 5, 3, 0x7F).isnan().all(), "a NaN gate counts as active, for every token"
    y = broken("w_up", neuron, hidden - 1, -1)  # 0xff
    assert y[active].isnan().all()
    kept = ~y.isnan().all(1)  # of others h is 0, times NaN or left out
    assert torch.equal(y[kept], plain[kept])
    y = broken("w_down", 7, neuron, 0x7F)
    assert y[active, 7].isnan().all()
    kept = ~y[:, 7].isnan()
    assert torch.equal(y[kept, 7], plain[kept, 7])
    others = torch.arange(hidden) != 7
    assert torch.equal(y[:, others], plain[:, others])


def assert_compiles_and_replays(function, case):
    expected = function(**case)
    assert torch.equal(torch.compile(lambda **inputs: function(**inputs), fullgraph=True)(**case), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = function(**case)
    for factor in (1.0, -1.0, 3.0):
        case["x"] *= factor
        graph.replay()
        assert torch.equal(y, function(**case))


def _wide(tensor):
    return None if tensor is None else tensor.double()
