"""Routed experts: feed-forward blocks of which each token goes through a few, in plain PyTorch.

Shapes: x (T, D), in `routed` and `by_expert` also (T, K, D), where each pair has its own; index, weight (T, K): the
experts of each token, and what each counts in the sum; w_gate_up (E, 2F, D), gate's rows first; w_down (E, D, F). A
pair is a token and one of its experts; there are P = T K of them.
"""

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from hf_twell.dispatch.choose import takes_experts
from hf_twell.dispatch.key import dtype_of, key_of
from hf_twell.ops import api, reference
from hf_twell.ops.runs import Runs


def experts(
    x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor
) -> torch.Tensor:
    """One expert after the other: the truth that everything else is compared with. Returns y (T, D).

    Formula: y_t = sum over k of weight_tk * down_e(relu(gate_e(x_t)) * up_e(x_t)), where e = index_tk.
    """
    y = torch.zeros_like(x)
    for expert, (gate_up, down) in enumerate(zip(w_gate_up.unbind(), w_down.unbind(), strict=True)):
        token, slot = (index == expert).nonzero(as_tuple=True)
        if len(token):
            gate, up = gate_up.chunk(2)
            each = reference.ffn(x[token], up, down, gate) * weight[token, slot].unsqueeze(-1)
            y = y.index_add(0, token, each.to(y.dtype))
    return y


class Pairs(NamedTuple):
    """Pairs sorted by expert, those of an expert by token. Nothing here waits for the device.

    Shapes: order (P,), each pair's place in `index` seen as (T K,); token, expert (P,) int64; ends (E,) int32: how many
    pairs the experts up to each have.
    """

    order: torch.Tensor
    token: torch.Tensor
    expert: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, index: torch.Tensor, experts: int) -> Self:
        expert, order = index.flatten().sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(experts, device=index.device), right=True)
        return cls(order, order // index.shape[1], expert, ends.int())


def routed(
    x: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    activation: torch.nn.Module | None = None,
    l1_scale: torch.Tensor | None = None,
    count_scale: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    tally: torch.Tensor | None = None,
    runs: Runs | None = None,
    unions: torch.Tensor | None = None,
) -> torch.Tensor:
    """`experts` by grouped matmuls over sorted pairs, with the terms of sparse training. Returns y (T, D).

    Each token's K results are added in the order of its experts in `index`, in float32.

    Formula: that of `experts`; in backward a pair's h gets the L1 gradient, and its relu(gate) that of the count term,
    as a token's does in `hf_twell.ops.reference.inject_l1` and `inject_count`. So L1 and L0 of a token are sums over
    the K F neurons of its experts. With `runs`, neighbours share a count as there: m_ref is the largest a_tef of the
    run's tokens that come to expert e. The report is then that of a run's share of the neurons of all experts that its
    tokens come to: unions.grad[0] += sum over runs of n_r K * [m_ref > 0] summed / experts reached.

    Shapes:
        l1_scale, count_scale () fp32; token_weight (T,) fp32, None for ones; tally (E + 1 + E F,) fp32 leaf or None:
        see `inject_l1`; runs, unions: as in `inject_count`.

    Args:
        activation: the module that computes ReLU, with whatever hooks it has.
    """
    w_gate_up, w_down, x = (t.to(dtype_of(x)) for t in (w_gate_up, w_down, x))
    pairs = Pairs.of(index, len(w_down))
    of_pairs = None if token_weight is None else token_weight[pairs.token]
    # A permutation, and not x[token]: so each gradient is added once, in any order, and then over a token's K pairs.
    x_TKD = x if x.ndim == 3 else x.unsqueeze(1).expand(-1, index.shape[1], -1)
    x_PD = x_TKD.flatten(0, 1).index_select(0, pairs.order)
    gate, up = grouped_linear(x_PD, w_gate_up, pairs.ends).chunk(2, dim=-1)
    active = torch.relu(gate) if activation is None else activation(gate)
    if count_scale is not None:
        active = reference.inject_count(active, count_scale, of_pairs)
        if runs is not None:
            of_runs = runs.run, runs.size, unions
            active = _InjectShared.apply(active, count_scale, pairs.token, pairs.expert, *of_runs, len(w_down))
    h = active * up
    if l1_scale is not None or tally is not None:
        h = reference.inject_l1(h, l1_scale, of_pairs, tally, pairs.expert)
    y = grouped_linear(h, w_down, pairs.ends) * weight.flatten().index_select(0, pairs.order).unsqueeze(-1)
    y = torch.zeros_like(y).index_copy(0, pairs.order, y)
    return y.unflatten(0, index.shape).sum(1, dtype=torch.promote_types(y.dtype, torch.float32)).to(x.dtype)


def by_expert(
    x: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    backend: str = "auto",
    way: str = "kernels",
) -> torch.Tensor:
    """`experts` by the sparse kernels, or one call of matmuls for each that has tokens. Returns y (T, D).

    Without gradients. Each token's K results are added in the order of its experts in `index`, in float32. A number of
    E or more in `index` is an expert that lies elsewhere, and adds nothing.

    On a GPU one operator computes up to kCudaExpertPairs pairs of up to kCudaExperts experts in bfloat16 or float16,
    where x (or autocast) and the weights are of one type. It waits for nothing. It reads w_down by columns: rows are
    copied in each call. All else is one call for each expert that has tokens. How many each has must come to the host:
    on a GPU that waits for it, so there it serves exactness alone.
    """
    if x.ndim == 3:
        of_pairs = x.flatten(0, 1), index.view(-1, 1), weight.view(-1, 1)
        y = by_expert(*of_pairs, w_gate_up, w_down, backend=backend, way=way)
        return y.unflatten(0, index.shape).sum(1)
    key = key_of(x, w_gate_up[0, : w_down.shape[2]], w_down[0], asked=True)
    at_once = way == "kernels" and takes_experts(key, index.numel(), len(w_down))
    if at_once and api.resolve(backend, x.device.type) == "cuda":
        gate, up = w_gate_up.chunk(2, dim=1)
        return torch.ops.hf_twell.experts(x.to(key.dtype), index, weight, gate, up, w_down).to(x.dtype)
    pairs = Pairs.of(index, len(w_down))
    rows, begin = x[pairs.token], 0
    y = torch.zeros_like(rows)
    for expert, end in enumerate(pairs.ends.tolist()):
        if end > begin:
            (gate, up), down = w_gate_up[expert].chunk(2), w_down[expert]
            if way == "kernels":
                y[begin:end] = api.ffn(rows[begin:end], up, down, gate, backend=backend, way="kernels")
            else:
                y[begin:end] = reference.ffn(rows[begin:end], up, down, gate)
        begin = end
    y = y * weight.flatten()[pairs.order].unsqueeze(-1)
    y = torch.empty_like(y).index_copy_(0, pairs.order, y)
    return y.unflatten(0, index.shape).sum(1, dtype=torch.promote_types(y.dtype, torch.float32)).to(x.dtype)


class _InjectShared(torch.autograd.Function):
    """What runs of tokens add to the count term's gradient: (R E, F) groups, each of a run's pairs of one expert."""

    @staticmethod
    def forward(ctx, active, scale, token, expert, run, size, unions, experts):
        ctx.save_for_backward(active, scale, run[token] * experts + expert, size)
        ctx.experts, ctx.tokens = experts, len(run)
        return active.view_as(active)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        active_PF, scale, group_P, size_R = ctx.saved_tensors
        wide, groups = torch.promote_types(active_PF.dtype, torch.float32), len(size_R) * ctx.experts
        zeros_GF = torch.zeros(groups, active_PF.shape[1], dtype=active_PF.dtype, device=active_PF.device)
        strongest_GF = zeros_GF.scatter_reduce(0, group_P.unsqueeze(1).expand_as(active_PF), active_PF, "amax")
        is_strongest_PF = active_PF == strongest_GF[group_P]
        equals_GF = zeros_GF.to(wide).index_add_(0, group_P, is_strongest_PF.to(wide))
        size_G1 = size_R.repeat_interleave(ctx.experts).unsqueeze(1)
        slope_GF = scale * size_G1 * reference.count_slope(strongest_GF.to(wide)) / equals_GF.clamp(min=1)
        slope_PF = slope_GF.to(active_PF.dtype)[group_P].masked_fill_(~is_strongest_PF | ~(active_PF > 0), 0)
        report = None
        if ctx.needs_input_grad[6]:
            came_R = zeros_GF.new_zeros(groups, dtype=wide).index_fill_(0, group_P, 1).view(len(size_R), -1).sum(1)
            fired_R = (strongest_GF != 0).view(len(size_R), -1).sum(1, dtype=wide)
            # So that a share of the neurons comes of it where it is divided by those of a token's own experts.
            per_token = len(group_P) / max(1, ctx.tokens)
            report = (size_R * per_token * fired_R / came_R.clamp(min=1)).sum().view(1).float()
        return grad + slope_PF, None, None, None, None, None, report, None


def grouped_linear(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x_p w_e^T for each pair p of expert e: x (P, K), w (E, N, K), ends (E,) int32; returns (P, N).

    By PyTorch's grouped matmul, where it takes the type and sizes; else expert by expert, which on a GPU waits for it.
    """
    taken = x.dtype in (torch.bfloat16, torch.float16, torch.float32) and not w.shape[1] * w.element_size() % 16
    taken = taken and not w.shape[2] * w.element_size() % 16
    if torch.compiler.is_compiling():  # Inductor takes no other
        taken = taken and x.dtype == torch.bfloat16
    if taken and x.is_cuda:
        taken = torch.cuda.get_device_capability(x.device) >= (8, 0)
    if taken:
        return F.grouped_mm(x.contiguous(), w.transpose(1, 2), offs=ends)
    parts = x.tensor_split(ends[:-1].tolist())
    return torch.cat([F.linear(part, each) for part, each in zip(parts, w.unbind(), strict=True)])
