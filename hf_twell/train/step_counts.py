"""What the L1 term's backward counted of a model's activity, and the figures that are reported of it."""

from typing import NamedTuple

import torch

from hf_twell.blocks.modeling import BlockSizes
from hf_twell.ops.reference import long_sum_dtype


class StepCounts(NamedTuple):
    """What one optimizer step saw, over all its micro-batches and ranks; or several of them, as a sum.

    One table for all layers: thirty tensors would each take the host an operation for each figure. A layer is a sparse
    block: a dense one, or all routed experts of a layer of the model.

    Shapes: tokens () fp32, the non-padding ones; table (L, 1 + F) fp32, for each sparse layer the sum of |h| and then
    each neuron's active tokens (of experts, those of the first expert first), with zeros after those of a layer that
    has fewer than others; sizes: each layer's; all on the device of the first layer. Of a sum, in `long_sum_dtype`.
    Where the runs of `share` neighbouring tokens were looked at, unions (L,) fp32: the sum over tokens of the neurons
    that are active in a token's run. Where layers have experts, reached (L, E) fp32: the tokens that came to each,
    after zeros where other layers have more.
    """

    tokens: torch.Tensor
    table: torch.Tensor
    sizes: tuple[BlockSizes, ...]
    unions: torch.Tensor | None = None
    share: int | None = None
    reached: torch.Tensor | None = None

    @property
    def active(self) -> list[torch.Tensor]:
        """For each layer, every neuron's active tokens, (F,); of experts (E F,)."""
        return [row[1 : 1 + sizes.neurons] for row, sizes in zip(self.table, self.sizes, strict=True)]

    def l1(self) -> torch.Tensor:
        """L1 of each layer, (L,); NaN where all was padding."""
        return self.table[:, 0] / self.tokens

    def size(self, term: str) -> torch.Tensor:
        """How large each layer's term is, (L,): L1, or with "count" L0, which is not finite either where L1 is not.

        Where it presses on runs too, what a token's run activates is added to L0.
        """
        l1 = self.l1()
        if term == "l1":
            return l1
        active = self.table[:, 1:].sum(1)
        if self.unions is not None:
            active = active + self.unions
        return torch.where(l1.isfinite(), active / self.tokens, l1)

    def density(self) -> torch.Tensor:
        """Share of active neurons of each layer, (L,)."""
        return self._share_of_neurons(self.table[:, 1:].sum(1))

    def union(self) -> torch.Tensor | None:
        """Share of each layer's neurons that are active in at least one token of a run, (L,): the mean over tokens.

        Where all runs are as long, that is the mean over runs; a shorter one counts by its tokens.
        """
        return None if self.unions is None else self._share_of_neurons(self.unions)

    def _share_of_neurons(self, active: torch.Tensor) -> torch.Tensor:
        """Of those that a layer's tokens come to: all of a dense block's, and of experts those of the tokens' own."""
        came = self.tokens
        if self.reached is not None:
            dense = torch.tensor([sizes.experts is None for sizes in self.sizes], device=came.device)
            came = torch.where(dense, came, self.reached.sum(1))
        return active / self._widths() / came.clamp(min=1)

    def _widths(self) -> torch.Tensor | int:
        # A tensor of the widths would be copied to the device, which the host waits for.
        same = len({sizes.width for sizes in self.sizes}) == 1
        return self.sizes[0].width if same else self.table.new_tensor([sizes.width for sizes in self.sizes])

    def added_to(self, earlier: "StepCounts | None") -> "StepCounts":
        """The sum of this step and earlier ones, which may pass 2^24, where fp32 stops counting."""
        dtype = long_sum_dtype(self.tokens.device)
        sums = [None if part is None else part.to(dtype) for part in self._sums()]
        if earlier is not None:
            before = earlier._sums()
            sums = [None if part is None else part + more for part, more in zip(before, sums, strict=True)]
        tokens, table, unions, reached = sums
        return StepCounts(tokens, table, self.sizes, unions, self.share, reached)

    def _sums(self) -> tuple:
        return self.tokens, self.table, self.unions, self.reached

    def figures(self, l1_weights: list[float]) -> dict | None:
        """What `L1Penalty.report` returns, with each layer's weight; None where all was padding."""
        tokens = self.tokens.item()
        if not tokens:
            return None
        density, union = self.density(), self.union()
        union = torch.zeros_like(density) if union is None else union
        l0 = self.table[:, 1:].sum(1) / tokens
        columns = torch.stack([self.l1(), l0, density, self._dead(), union]).tolist()  # the host waits for them once
        layers = []
        for l1, l0, density, dead, union, weight in zip(*columns, l1_weights, strict=True):
            of_runs = {} if self.share is None else {f"union_{self.share}": union}
            layers.append({"l0": l0, "density": density, **of_runs, "l1": l1, "dead": dead, "l1_weight": weight})
        mean = {key: sum(layer[key] for layer in layers) / len(layers) for key in layers[0]}
        return {**mean, "tokens": int(tokens), "layers": layers}

    def _dead(self) -> torch.Tensor:
        """Share of each layer's neurons that no token activated, (L,).

        Experts count by the tokens that came to them: it is the share of its own expert's neurons that a token meets
        dead. An expert that few tokens reach says little of its neurons, and weighs as little.
        """
        fired = (self.table[:, 1:] != 0).sum(1).to(self.table.dtype)
        if self.reached is not None:
            for layer, (active, (experts, width)) in enumerate(zip(self.active, self.sizes, strict=True)):
                if experts is not None:
                    reached_E = self.reached[layer, -experts:]
                    fired_E = (active.view(experts, width) != 0).sum(1)
                    fired[layer] = (fired_E * reached_E).sum() / reached_E.sum().clamp(min=1)
        widths = self._widths()
        return (widths - fired) / widths

    def check_counted_once(self) -> None:
        """Refuse, by a ValueError, a step in which a neuron was active for more tokens than there are. Two forwards a
        micro-batch show where one is active for more than half of the tokens, as when training begins."""
        tokens, most = self.tokens.item(), self.table[:, 1:].max().item()
        if most > 1.001 * tokens:  # beyond 2^24 tokens fp32 rounds
            raise ValueError(
                f"a neuron was active for {most:.0f} of the {tokens:.0f} tokens of the first optimizer step: its "
                "micro-batches went through the model more than once with gradients (or backward did), and the L1 term "
                "would count each time. Run the model once for each micro-batch, with all its rows in one batch, and "
                "under torch.no_grad() what needs no gradient"
            )

    def check_counted(self) -> None:
        """Refuse, by a ValueError, a step of which no layer counted anything, though it has tokens: backward counts."""
        if self.tokens.item() and not self.table[:, 1:].any().item():
            raise ValueError(
                f"no backward came to the sparse blocks in the first optimizer step ({self.tokens.item():.0f} tokens), "
                "or every neuron of theirs is dead; call backward on each micro-batch's loss inside the loop over "
                "micro_batches (torch.autograd.grad and backward(inputs=...) leave the counts out), and measure "
                "without training by hf_twell.measure_sparsity"
            )
