"""The class that a layer's routed experts get, all of them together: a subclass of their own class."""

from typing import Any

import torch
from torch import nn

from hf_twell.blocks.layout import by_column, settle_down
from hf_twell.blocks.modeling import BlockSizes, L1Inputs, SparseBlock, all_modules_are_hooked, is_bare_relu
from hf_twell.blocks.operands import has_forward_of
from hf_twell.dispatch.activity import Activity
from hf_twell.dispatch.choose import choose_experts, max_experts_density, problem, takes_experts
from hf_twell.dispatch.key import key_of
from hf_twell.ops import api, experts


class SparseExperts(SparseBlock):
    """Mixin put before the class of a layer's experts.

    They compute as their own class does, by whichever of Transformers' implementations the model's config names; in
    evaluation by kernels, where that is faster; and with the terms of sparse training by grouped matmuls.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if has_forward_of(SparseExperts, self):
            return super().__call__(*args, **kwargs)
        return self.call_replaced(*args, **kwargs)

    def sizes(self) -> BlockSizes:
        number, _, width = self.twell.form.weights(self)[1].shape
        return BlockSizes(number, width)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor | None = None,
        top_k_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        given = [each for each in (hidden_states, top_k_index, top_k_weights) if each is not None]
        if not (torch.compiler.is_compiling() and has_forward_of(SparseExperts, self)):
            self.twell_state.awaited = None
        form = self.twell.form
        x, index, weight = form.routing(self, *given)
        l1 = self.l1_of(x if x.ndim == 2 else x[:, 0])
        if l1 is not None:
            y = self._with_term(l1, x, index, weight)
        elif self.takes_kernels(x, index, look=True):
            y = experts.by_expert(x, index, weight, *form.weights(self), backend=self.twell.backend)
        else:
            return super().forward(*given)
        return form.result(self, y)

    def takes_kernels(self, x: torch.Tensor, index: torch.Tensor, look: bool = False) -> bool:
        """Whether a call goes by kernels; `look`: it is one, and its density may be sampled and its memory settled."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or index.numel() == 0:
            return False
        form = self.twell.form
        weights: Any = [self._parameters.get(name) for name in (form.gate_up, form.down)]
        plain = all(type(weight) is nn.Parameter and not weight.is_meta and weight.ndim == 3 for weight in weights)
        if not plain or all_modules_are_hooked() or not is_bare_relu(self._modules[form.activation]):
            return False
        asked = self.twell.backend != "auto"
        if api.resolve(self.twell.backend, x.device.type) == "reference" or api.transformed():
            return False
        gate_up, down = form.weights(self)
        if x.ndim == 3:  # each pair has its own
            x, index = x.flatten(0, 1), index.view(-1, 1)
        width = down.shape[2]
        key = key_of(x, gate_up[0, :width], down[0], asked=asked)
        if getattr(self, "_is_expert_parallel", False) or (problem(key) and not asked):  # asked for, they say it
            return False
        if look and x.is_cuda and torch.cuda.is_current_stream_capturing():
            self.twell_state.captured = True  # whichever way it goes: the graph holds down_proj's address
        on_cpu, pairs = key.device == "cpu", index.numel()
        key = key._replace(tokens=-(-pairs // (len(index.unique()) if on_cpu else len(down))))  # of an expert
        if not (on_cpu or asked):
            by_chance = torch.are_deterministic_algorithms_enabled()  # when a sample arrives is no one's to say
            if by_chance or not (takes_experts(key, pairs, len(down)) and max_experts_density(key) > 0):
                return False
        recent = self.twell_state.pairs
        if look and (on_cpu or not asked):
            recent.look(x, index, gate_up)
        del gate_up, down  # views, maybe: memory that they hold stays as it is
        taken = choose_experts(key, Activity(recent.density)) == "kernels"
        if look and (taken or (on_cpu and not form.per_token)):
            density = 0.0 if form.per_token else recent.density  # kernels read gate and up alike at every density
            settle_down(self, self._parameters[form.settled], x, density, "kCpuRowsAbove")
        # Where others hold the memory of gate and up, kernels would copy them in each call.
        return taken and (asked or not form.per_token or by_column(self._parameters[form.gate_up]))

    def _with_term(self, l1: L1Inputs, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        form = self.twell.form
        gate_up, down = form.weights(self)
        _check_all_experts(self, down, l1)
        options = {"count_scale" if l1.counts else "l1_scale": l1.scale}
        return experts.routed(
            x, index, weight, gate_up, down,
            activation=getattr(self, form.activation), token_weight=l1.token_weight, tally=l1.tally,
            runs=l1.runs, unions=l1.unions, **options,
        )  # fmt: skip


def _check_all_experts(ffn: SparseExperts, down: torch.Tensor, l1: L1Inputs) -> None:
    """Refuse the experts, or the parts of them, that parallelism leaves to one process.

    Raises:
        ValueError: naming the block.
    """
    number, _, width = down.shape
    if number * (width + 1) + 1 != len(l1.tally) or getattr(ffn, "_is_expert_parallel", False):
        raise ValueError(
            f"{ffn.twell.name} has a part of its experts in this process (expert or tensor parallelism); L1 term and "
            "measures of sparsity need all of them: load the model without tp_plan, and train with DDP or FSDP2"
        )
