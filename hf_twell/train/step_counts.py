"""What the L1 term's backward counted of a model's activity, and the figures that are reported of it."""

from typing import NamedTuple

import torch

from hf_twell.ops.reference import long_sum_dtype


class StepCounts(NamedTuple):
    """What one optimizer step saw, over all its micro-batches and ranks; or several of them, as a sum.

    Shapes: tokens () fp32, the non-padding ones; layers: for each sparse layer (1 + F,) fp32, the sum of |h| and then
    each neuron's active tokens; all on the device of the first layer. Of a sum, in `long_sum_dtype`.
    """

    tokens: torch.Tensor
    layers: list[torch.Tensor]

    def l1(self) -> torch.Tensor:
        """L1 of each layer, (L,); NaN where all was padding."""
        return torch.stack([layer[0] for layer in self.layers]) / self.tokens

    def size(self, term: str) -> torch.Tensor:
        """How large each layer's term is, (L,): L1, or with "count" L0, which is not finite either where L1 is not."""
        l1 = self.l1()
        if term == "l1":
            return l1
        return torch.where(l1.isfinite(), torch.stack([layer[1:].sum() for layer in self.layers]) / self.tokens, l1)

    def density(self) -> torch.Tensor:
        """Share of active neurons of each layer, (L,)."""
        return torch.stack([layer[1:].mean() for layer in self.layers]) / self.tokens.clamp(min=1)

    def added_to(self, earlier: "StepCounts | None") -> "StepCounts":
        """The sum of this step and earlier ones, which may pass 2^24, where fp32 stops counting."""
        dtype = long_sum_dtype(self.tokens.device)
        tokens, layers = self.tokens.to(dtype), [layer.to(dtype) for layer in self.layers]
        if earlier is None:
            return StepCounts(tokens, layers)
        total = [before + new for before, new in zip(earlier.layers, layers, strict=True)]
        return StepCounts(earlier.tokens + tokens, total)

    def figures(self, l1_weights: list[float]) -> dict | None:
        """What `L1Penalty.report` returns, with each layer's weight; None where all was padding."""
        tokens = self.tokens.item()
        if not tokens:
            return None
        layers = []
        for counts, weight in zip(self.layers, l1_weights, strict=True):
            l1, active = counts[0].item() / tokens, counts[1:]
            l0, dead = active.sum().item() / tokens, (active == 0).sum().item() / len(active)
            layers.append({"l0": l0, "density": l0 / len(active), "l1": l1, "dead": dead, "l1_weight": weight})
        mean = {key: sum(layer[key] for layer in layers) / len(layers) for key in layers[0]}
        return {**mean, "tokens": int(tokens), "layers": layers}

    def check_counted_once(self) -> None:
        """Refuse a step in which a neuron was active for more tokens than there are.

        Two forwards a micro-batch show where one is active for more than half of the tokens, as when training begins.

        Raises:
            ValueError: saying what to do.
        """
        tokens, most = self.tokens.item(), max(layer[1:].max().item() for layer in self.layers)
        if most > 1.001 * tokens:  # beyond 2^24 tokens fp32 rounds
            raise ValueError(
                f"a neuron was active for {most:.0f} of the {tokens:.0f} tokens of the first optimizer step: its "
                "micro-batches went through the model more than once with gradients (or backward did), and the L1 term "
                "would count each time. Run the model once for each micro-batch, with all its rows in one batch, and "
                "under torch.no_grad() what needs no gradient"
            )

    def check_counted(self) -> None:
        """Refuse a step of which no layer counted anything, though it has tokens: backward counts.

        Raises:
            ValueError: saying what to do.
        """
        if self.tokens.item() and not any(layer[1:].any().item() for layer in self.layers):
            raise ValueError(
                f"no backward came to the sparse blocks in the first optimizer step ({self.tokens.item():.0f} tokens), "
                "or every neuron of theirs is dead; call backward on each micro-batch's loss inside the loop over "
                "micro_batches (torch.autograd.grad and backward(inputs=...) leave the counts out), and measure "
                "without training by hf_twell.measure_sparsity"
            )
