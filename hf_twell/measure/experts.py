"""What the neurons of a layer's routed experts do: a token's are those of its own experts, K F of the layer's E F."""

from typing import Any, NamedTuple

import torch
from torch import nn

from hf_twell.blocks.architectures import ExpertsSite
from hf_twell.measure.activity import RUNS, LayerActivity
from hf_twell.ops.experts import Pairs, grouped_linear
from hf_twell.ops.reference import long_sum_dtype


class RoutedH(NamedTuple):
    """What the tokens' experts hold, whoever computes them: h, what their activation gets, and which experts they are.

    Shapes: h, z (T, K, F); expert (T, K) int64.
    """

    h: torch.Tensor
    z: torch.Tensor
    expert: torch.Tensor

    @classmethod
    def of(cls, site: ExpertsSite, *given: torch.Tensor) -> "RoutedH":
        """From what the module is called with."""
        x, expert, _ = site.form.routing(site.module, *given)
        pairs = Pairs.of(expert, site.sizes[0])
        gate_up, _ = site.form.weights(site.module)
        x_PD = x[pairs.token] if x.ndim == 2 else x.flatten(0, 1)[pairs.order]
        rows = grouped_linear(x_PD.to(gate_up.dtype), gate_up, pairs.ends)
        gate, up = torch.empty_like(rows).index_copy_(0, pairs.order, rows).unflatten(0, expert.shape).chunk(2, dim=-1)
        return cls(site.activation(gate) * up, gate, expert)


class ExpertsActivity(LayerActivity):
    """`LayerActivity` of a layer's experts. To a token's figures its K experts are one block of K F neurons.

    A neuron's own figures go by the tokens that come to its expert. The union of neighbouring tokens is the share of
    active neurons among those of all experts that one of the tokens comes to, which dense experts would read; the mean
    over runs.
    """

    def __init__(self, experts: int, per_token: int, width: int, device: torch.device | str = "cpu") -> None:
        super().__init__(per_token * width, device)
        self.experts, self.per_token, self.width = experts, per_token, width
        self.tokens_of_neuron = self.tokens_of_neuron.new_zeros(experts * width)
        self.tokens_of_expert = self.tokens_of_neuron.new_zeros(experts)
        self.unions = self.l1.new_zeros(len(RUNS))  # sums over runs

    def add_routed(
        self, h: torch.Tensor, expert: torch.Tensor, valid: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Count in h (B, S, K, F) of these experts (B, S, K); returns what `LayerActivity.add` does."""
        active = (h != 0) & valid[..., None, None]
        l0_BS = active.sum((2, 3))
        self.tokens_of_l0.index_add_(0, l0_BS.flatten(), valid.flatten().long())
        came = valid.unsqueeze(-1).expand_as(expert)
        self.tokens_of_expert.index_add_(0, expert.flatten(), came.flatten().long())
        neurons = self.tokens_of_neuron.view(self.experts, self.width)
        neurons.index_add_(0, expert.flatten(), active.flatten(0, 2).long())
        for row, experts, mask in zip(active, expert, valid, strict=True):
            size, parts = RUNS[0], self._by_runs(row, experts, mask, RUNS[0])
            for index, run in enumerate(RUNS):
                times, size = run // size, run
                count = len(parts[0]) // times
                fired, came, padded = parts = [
                    part[: count * times].unflatten(0, (count, times)).any(1) for part in parts
                ]
                used_R, reached_R = fired[~padded].sum((1, 2)), came[~padded].sum(1)
                self.distinct[index] += used_R.sum()
                self.unions[index] += (used_R / (reached_R * self.width)).sum()
                self.runs[index] += (~padded).sum()
        return l0_BS, self._add_magnitudes(h.flatten(2), valid)

    def _by_runs(
        self, active_SKF: torch.Tensor, expert_SK: torch.Tensor, valid_S: torch.Tensor, run: int
    ) -> list[torch.Tensor]:
        """Of each whole run: which neurons (R, E, F) some token activates, to which experts (R, E) one comes, and
        whether one is padding (R,)."""
        runs = len(active_SKF) // run
        place = torch.arange(runs * run, device=expert_SK.device).div(run, rounding_mode="floor") * self.experts
        slot = (place.unsqueeze(1) + expert_SK[: runs * run]).flatten()
        fired = torch.zeros(runs * self.experts, self.width, dtype=torch.uint8, device=slot.device)
        fired.index_add_(0, slot, active_SKF[: runs * run].flatten(0, 1).to(torch.uint8))
        came = torch.zeros(runs * self.experts, dtype=torch.bool, device=slot.device)
        came[slot] = True
        padded = ~valid_S[: runs * run].view(runs, run).all(1)
        return [fired.view(runs, self.experts, self.width) > 0, came.view(runs, self.experts), padded]

    def report(self) -> dict[str, Any]:
        tokens = int(self.tokens_of_l0.sum())
        counts = self.tokens_of_neuron.cpu().view(self.experts, self.width)
        came = self.tokens_of_expert.cpu()
        dead_E = (counts == 0).sum(1)
        layer = super().report()
        sums = zip(RUNS, self.unions.tolist(), self.runs.tolist(), strict=True)
        unions = {str(run): share / runs if runs else None for run, share, runs in sums}
        reached = came > 0
        return layer | {
            "unions": unions,
            "experts": self.experts,
            "experts_per_token": self.per_token,
            "reached_experts": int(reached.sum()),
            "expert_tokens": came.tolist(),
            "expert_dead": [
                dead / self.width if tokens_of else None
                for dead, tokens_of in zip(dead_E.tolist(), came.tolist(), strict=True)
            ],
            # An expert that few tokens reach says little of its neurons, and weighs as little.
            "dead": (dead_E * came).sum().item() / (tokens * self.per_token * self.width),
            "dead_neurons": int(dead_E[reached].sum()),
            "always_on_neurons": int(((counts == came.unsqueeze(1)) & reached.unsqueeze(1)).sum()),
        }


class NegativeExperts:
    """`NegativeGates` of a layer's routed experts."""

    def __init__(self, site: ExpertsSite) -> None:
        self.relu, self._site = isinstance(site.activation, nn.ReLU), site
        self._energy: torch.Tensor | None = None

    def add(self, routed: RoutedH, valid: torch.Tensor) -> None:
        """Count the tokens in that `valid` (T,) has."""
        if self.relu:
            return
        down_EDF = self._site.form.weights(self._site.module)[1].detach()
        wide = torch.promote_types(down_EDF.dtype, torch.float32)
        norms_EF = torch.linalg.vector_norm(down_EDF, dim=1, dtype=wide)
        energy_TKF = (routed.h * norms_EF[routed.expert]).square() * valid[:, None, None]
        energy = torch.stack([torch.where(routed.z <= 0, energy_TKF, 0).sum(), energy_TKF.sum()])
        energy = energy.to(long_sum_dtype(energy.device))
        self._energy = energy if self._energy is None else self._energy + energy

    def report(self) -> float | None:
        if self.relu:
            return 0.0
        if self._energy is None:
            return None
        negative, everything = self._energy.tolist()
        return negative / everything if everything else 0.0
