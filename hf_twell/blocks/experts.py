"""The class that a layer's routed experts get, all of them together: a subclass of their own class."""

from typing import Any

import torch

from hf_twell.blocks.modeling import BlockSizes, L1Inputs, SparseBlock
from hf_twell.blocks.operands import has_forward_of
from hf_twell.ops import experts


class SparseExperts(SparseBlock):
    """Mixin put before the class of a layer's experts.

    Without the terms of sparse training they compute as their own class does, by whichever of Transformers'
    implementations the model's config names.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if has_forward_of(SparseExperts, self):
            return super().__call__(*args, **kwargs)
        return self.call_replaced(*args, **kwargs)

    def sizes(self) -> BlockSizes:
        number, _, width = getattr(self, self.twell.form.down).shape
        return BlockSizes(number, width)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if not (torch.compiler.is_compiling() and has_forward_of(SparseExperts, self)):
            self.twell_state.awaited = None
        l1 = self.l1_of(hidden_states)
        if l1 is None:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        return self._with_term(l1, hidden_states, top_k_index, top_k_weights)

    def _with_term(self, l1: L1Inputs, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        form: Any = self.twell.form
        gate_up, down = getattr(self, form.gate_up), getattr(self, form.down)
        _check_all_experts(self, down)
        options = {"count_scale" if l1.counts else "l1_scale": l1.scale}
        return experts.routed(
            x, index, weight, gate_up, down,
            activation=getattr(self, form.activation), token_weight=l1.token_weight, tally=l1.tally,
            runs=l1.runs, unions=l1.unions, **options,
        )  # fmt: skip


def _check_all_experts(ffn: SparseExperts, down: torch.Tensor) -> None:
    """Refuse the experts, or the parts of them, that parallelism leaves to one process.

    Raises:
        ValueError: naming the block.
    """
    number, _, width = down.shape
    if number * (width + 1) + 1 != len(ffn.twell_state.l1.tally) or getattr(ffn, "_is_expert_parallel", False):
        raise ValueError(
            f"{ffn.twell.name} has a part of its experts in this process (expert or tensor parallelism); L1 term and "
            "measures of sparsity need all of them: load the model without tp_plan, and train with DDP or FSDP2"
        )
