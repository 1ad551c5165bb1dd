"""The sparse feed-forward block in plain PyTorch: the truth that every kernel is compared with.

Shapes: x (..., D); w_up, w_gate (F, D); w_down (D, F); biases (F,), (D,), (F,). T is the product of x's leading sizes.
int8 and float8_e4m3fn weights have scales, one for each row: (F,), (D,), (F,), or the same with a last size of 1.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from hf_twell.dispatch.limits import limit
from hf_twell.ops.runs import Runs

E4M3_MAX = 448.0


def ffn(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    w_gate: torch.Tensor | None = None,
    *,
    b_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    b_gate: torch.Tensor | None = None,
    s_up: torch.Tensor | None = None,
    s_down: torch.Tensor | None = None,
    s_gate: torch.Tensor | None = None,
    l1_scale: torch.Tensor | None = None,
    count_scale: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    tally: torch.Tensor | None = None,
    runs: Runs | None = None,
    unions: torch.Tensor | None = None,
    quantize_x: bool = False,
) -> torch.Tensor:
    """ReLU feed-forward block, dense arithmetic; see `hf_twell.ops.ffn` for formula and arguments."""
    if quantize_x and x.numel() > limit("kDecodeMaxTokens") * x.shape[-1]:
        x = dequantized_rows(*quantized_rows(x), x.dtype)
    up = linear(x, w_up, s_up, b_up)
    active = torch.relu(up if w_gate is None else linear(x, w_gate, s_gate, b_gate))
    if count_scale is not None:
        active = inject_count(active, count_scale, token_weight, runs, unions)
    h = active if w_gate is None else active * up
    if l1_scale is not None or tally is not None:
        h = inject_l1(h, l1_scale, token_weight, tally)
    return linear(h, w_down, s_down, b_down)


def linear(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x w^T + bias; a w with a scale for each row is dequantized in x's dtype: x (scale_n w_nk)^T + bias."""
    return F.linear(x, w if scale is None else dequantized(w, scale, x.dtype), bias)


def dequantized(w: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """scale_n w_nk in `dtype`, (N, K); scale (N,) or (N, 1)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (w.to(wide) * scale.reshape(-1, 1).to(wide)).to(dtype)


def quantized_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn values (..., D) and float32 scales (..., 1) of x, a scale a row.

    Formula: scale_t = max_k |x_tk| / 448, rounded to x's dtype, but not to 0; value_tk = x_tk / scale_t in float32,
    clamped to +-448 and rounded to the nearest e4m3, even ones where two are as near.
    A row of zeros has scale 0 and values 0 (torchao's are 0 / 0: NaN). One that holds NaN is NaN throughout; one that
    holds infinity has an infinite scale, NaN in its place and 0 elsewhere, so that all it stands for is NaN.

    Source: torchao 0.18, `Float8Tensor.from_hp` with PerRow in eager mode without MSLK; bit by bit but for rows of
    zeros, and for those of float16 below 448 * 2^-25, whose scale torchao rounds to 0.
    """
    largest = x.abs().amax(-1, keepdim=True)
    scale = (largest / E4M3_MAX).float()
    scale = torch.where(scale == 0, largest.float() / E4M3_MAX, scale)
    values = x.float() / torch.where(scale == 0, 1.0, scale)
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def dequantized_rows(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `quantized_rows` stand for, scale_t value_tk, in `dtype`: (..., D)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # A rounded scale may take a row's largest past float16's own, but what is finite stays so.
    return (values.to(wide) * scales.to(wide)).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


COUNT_WIDTH = 0.1  # of a gate: within a few such of zero, the count term pushes a neuron off; far above, it lets it be


def inject_count(
    active: torch.Tensor,
    scale: torch.Tensor,
    token_weight: torch.Tensor | None = None,
    runs: Runs | None = None,
    unions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the ReLU's output unchanged; in backward add the gradient of the count term to it.

    Formula: dL/da += scale * token_weight * p'(a) for a > 0, where p(a) = tanh(a / (2 * 0.1)). The sum of p over
    neurons is a smooth count of the active ones. Unlike L1, it does not press on a neuron that is far from off.

    With `runs` the smooth count of what neighbours activate together is added: for each run r of n_r tokens,
    scale * n_r * p(m_rf) summed over neurons, where m_rf is the largest a_tf of its tokens. So each token counts once
    by itself and once by its run, and a run that is shorter counts by its tokens. The gradient goes to the strongest
    token, in equal parts to those that are equally strong: dL/da_tf += scale * n_r * p'(m_rf) / k_rf for each of the
    k_rf tokens with a_tf = m_rf > 0. The report is the "gradient" of `unions`:
    unions.grad[0] += sum over runs and neurons of n_r * [m_rf > 0].

    Shapes: active (..., F); scale () fp32; token_weight (...) fp32 or None for ones; unions (1,) fp32 leaf, as `tally`
    of `inject_l1`, or None.
    """
    parts = (None, None, None) if runs is None else (runs.tokens, runs.run, runs.size)
    return _InjectCount.apply(active, scale, token_weight, *parts, unions)


def inject_l1(
    h: torch.Tensor,
    l1_scale: torch.Tensor | None,
    token_weight: torch.Tensor | None = None,
    tally: torch.Tensor | None = None,
    expert: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return h unchanged; in backward add the L1 gradient to it, and report what was active.

    Formula: dL/dh += l1_scale * token_weight * sign(h); nothing with an `l1_scale` of None. The report is the
    "gradient" of `tally`, so autograd itself sums it over micro-batches, exactly once for each backward:
    tally.grad[0] += sum(token_weight * |h|) and tally.grad[1 + f] += sum over tokens of token_weight * [h_f != 0]. A
    recomputed forward (gradient checkpointing, of either kind) therefore counts nothing twice.

    Where a row of h is a pair of a token and one of its experts, `expert` says which, and `token_weight` is the pair's:
    tally.grad[e] counts the tokens that come to expert e, then follow L1 and, at E + 1 + e F + f, neuron f of expert e.

    Shapes: h (..., F); l1_scale () fp32; token_weight (...) fp32 or None for ones; tally (1 + F,) fp32 leaf or None;
    expert (P,) int64 for an h (P, F) and a tally (E + 1 + E F,).
    """
    return _InjectL1.apply(h, l1_scale, token_weight, tally, expert)


def long_sum_dtype(device: torch.device | str) -> torch.dtype:
    """What sums over many tokens are in: fp64, or fp32 on Apple's GPUs, which have none and count to 2^24."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def new_tally(size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """A leaf of zeros, (size,) fp32, to whose gradient backward adds what it reports.

    The gradient is there from the beginning. Autograd would take over the first one that comes, and the next replay of
    a CUDA graph would write over that.
    """
    tally = torch.zeros(size, device=device, requires_grad=True)
    tally.grad = torch.zeros_like(tally)
    return tally


class _InjectCount(torch.autograd.Function):
    @staticmethod
    def forward(ctx, active, scale, token_weight, tokens, run, size, unions):
        # The product with up saves the same storage, so keeping it here costs no memory.
        ctx.save_for_backward(active, scale, token_weight, tokens, run, size)
        return active.view_as(active)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        active, scale, token_weight, tokens, run, size = ctx.saved_tensors
        each = scale if token_weight is None else (scale * token_weight).unsqueeze(-1)
        slope = each.to(active.dtype) * count_slope(active)
        report = None
        if tokens is not None:
            of_runs, report = _slope_of_runs(active, scale, tokens, run, size)
            slope += of_runs
        report = report if ctx.needs_input_grad[6] else None
        return grad + slope.masked_fill_(~(active > 0), 0), None, None, None, None, None, report


def count_slope(active: torch.Tensor) -> torch.Tensor:
    """p'(a)."""
    return (1 - torch.tanh(active / (2 * COUNT_WIDTH)).square()) / (2 * COUNT_WIDTH)


def _slope_of_runs(
    active: torch.Tensor, scale: torch.Tensor, tokens: torch.Tensor, run: torch.Tensor, size: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a run's count adds to the gradient of its strongest tokens, and the report; see `inject_count`."""
    active_TF = active.reshape(-1, active.shape[-1])
    if len(active_TF) == 0:
        return torch.zeros_like(active), active.new_zeros(1, dtype=torch.float32)
    # In place, as fresh memory of this size costs a CPU more than the arithmetic.
    active_RSF = active_TF[tokens.clamp(min=0)].masked_fill_((tokens < 0).unsqueeze(-1), 0)
    strongest_RF = active_RSF.amax(1)
    equals_RF = (active_RSF == strongest_RF.unsqueeze(1)).sum(1, dtype=torch.int32)  # 0 where a NaN is the strongest
    size_R1, wide = size.unsqueeze(1), torch.promote_types(active.dtype, torch.float32)
    slope_RF = scale * size_R1 * count_slope(strongest_RF.to(wide)) / equals_RF.clamp(min=1)
    slope_TF = slope_RF.to(active.dtype)[run].masked_fill_(active_TF != strongest_RF[run], 0)
    # Over runs first, as `count` sums over tokens first. A NaN is active, as `relu` keeps it.
    union_F = (size_R1 * (strongest_RF != 0)).sum(0, dtype=wide)
    return slope_TF.view_as(active), union_F.sum().view(1).float()


class _InjectL1(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, l1_scale, token_weight, tally, expert):
        # down_proj saves the same storage for its weight gradient, so keeping h here costs no memory.
        ctx.save_for_backward(h, l1_scale, token_weight, expert)
        ctx.size = None if tally is None else len(tally)
        return h.view_as(h)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_h):
        h, l1_scale, token_weight, expert = ctx.saved_tensors
        if l1_scale is not None:
            scale = l1_scale if token_weight is None else (l1_scale * token_weight).unsqueeze(-1)
            grad_h = grad_h + scale.to(h.dtype) * h.sign()
        report = None
        if ctx.needs_input_grad[3]:
            report = count(h, token_weight) if expert is None else count_pairs(h, token_weight, expert, ctx.size)
        return grad_h, None, None, report, None


def count_pairs(h: torch.Tensor, token_weight: torch.Tensor | None, expert: torch.Tensor, size: int) -> torch.Tensor:
    """What `inject_l1` reports about pairs' h (P, F) of these experts (P,): (size,) fp32, size = E + 1 + E F."""
    wide, width = torch.promote_types(h.dtype, torch.float32), h.shape[1]
    experts = (size - 1) // (width + 1)
    weight_P = torch.ones_like(expert, dtype=wide) if token_weight is None else token_weight.to(wide)
    weight_P1 = weight_P.unsqueeze(-1)
    h = torch.where(weight_P1 > 0, h, 0)  # padding may hold NaN, and 0 * NaN would count it
    l1 = (weight_P1 * h.abs()).sum().view(1)
    active_EF = weight_P1.new_zeros(experts, width).index_add(0, expert, weight_P1 * (h != 0))
    reached_E = weight_P.new_zeros(experts).index_add(0, expert, weight_P)
    return torch.cat([reached_E, l1, active_EF.flatten()]).float()


def count(h: torch.Tensor, token_weight: torch.Tensor | None = None) -> torch.Tensor:
    """What `inject_l1` reports about h: (1 + F,) fp32, the weighted sum of |h|, then each neuron's active tokens.

    Sums are in fp32, and in fp64 for an fp64 h. All of them are over tokens: where one over neurons read h as well,
    Inductor (PyTorch 2.10 to 2.13) would fuse both on a GPU and leave the neurons' part of the result unwritten. None
    is a matmul: a compiled backward runs under the forward's autocast, which would round it to 8 bits in bfloat16.
    """
    wide = torch.promote_types(h.dtype, torch.float32)
    h_TF = h.reshape(-1, h.shape[-1])
    if token_weight is None:
        l1_F, active_F = h_TF.abs().sum(0, dtype=wide), (h_TF != 0).sum(0, dtype=wide)
    else:
        weight_T1 = token_weight.reshape(-1, 1).to(wide)
        h_TF = torch.where(weight_T1 > 0, h_TF, 0)  # padding may hold NaN, and 0 * NaN would count it
        l1_F, active_F = (weight_T1 * h_TF.abs()).sum(0), (weight_T1 * (h_TF != 0)).sum(0)
    return torch.cat([l1_F.sum().view(1), active_F]).float()
