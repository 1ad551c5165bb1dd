"""The class that a layer's routed experts get, all of them together: a subclass of their own class."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_twell.blocks.calls import drop_activity
from hf_twell.blocks.layout import by_column, settle_down
from hf_twell.blocks.modeling import BlockSizes, L1Inputs, SparseBlock, all_modules_are_hooked, is_bare_relu
from hf_twell.blocks.operands import has_forward_of
from hf_twell.dispatch.activity import Activity
from hf_twell.dispatch.choose import choose_experts, max_experts_density, problem, takes_experts
from hf_twell.dispatch.key import CallKey, key_of
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
        if self.training:
            drop_activity(self, hidden_states)
        given = [each for each in (hidden_states, top_k_index, top_k_weights) if each is not None]
        if not (torch.compiler.is_compiling() and has_forward_of(SparseExperts, self)):
            self.twell_state.awaited = None
        if not torch.compiler.is_compiling() and hidden_states.is_cuda and torch.cuda.is_current_stream_capturing():
            self.twell_state.captured = True  # whichever way it goes: the graph holds down_proj's address
        form = self.twell.form
        l1 = self.l1_of(form.tokens(self, hidden_states))
        if l1 is not None:
            return form.result(self, self._with_term(l1, *form.routing(self, *given)))
        call = self._call(*given)
        if call is None:
            return super().forward(*given)
        way = "kernels" if self._settle(hidden_states, *call) else "plain"
        # Llama 4's own class computes every expert for every token; on a GPU, not to would wait for it.
        if way == "plain" and not (form.transposed and call[0].device == "cpu"):
            return super().forward(*given)
        y = experts.by_expert(*call[1](), *form.weights(self), backend=self.twell.backend, way=way)
        return form.result(self, y)

    def takes_kernels(self, *given: torch.Tensor) -> bool:
        """Whether a call with these goes by kernels, after those that the block has seen."""
        call = self._call(*given)
        return call is not None and self._kernels_pay(call[0]) and self._kernels_read(call[0])

    def _call(self, x: torch.Tensor, *others: torch.Tensor) -> tuple[CallKey, Callable[[], tuple]] | None:
        """The key of an expert's call, and what looks up the routing once; None where no kernels can be faster."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.numel() == 0:
            return None
        form = self.twell.form
        weights: Any = [self._parameters.get(name) for name in (form.gate_up, form.down)]
        plain = all(type(weight) is nn.Parameter and not weight.is_meta and weight.ndim == 3 for weight in weights)
        if not plain or all_modules_are_hooked() or not is_bare_relu(self._modules[form.activation]):
            return None
        if api.resolve(self.twell.backend, x.device.type) == "reference" or api.transformed():
            return None
        gate_up, down = form.weights(self)
        key = key_of(x, gate_up[0, : down.shape[2]], down[0], asked=self.twell.backend != "auto")
        if getattr(self, "_is_expert_parallel", False) or (problem(key) and not key.asked):  # asked for, they say it
            return None
        routing = functools.cache(functools.partial(form.routing, self, x, *others))
        on_cpu = key.device == "cpu"
        pairs = len(form.tokens(self, x)) * form.router.top_k if form.transposed else others[0].numel()
        key = key.of_expert(pairs, len(routing()[1].unique()) if on_cpu else len(down))
        if not (on_cpu or key.asked):
            by_chance = torch.are_deterministic_algorithms_enabled()  # when a sample arrives is no one's to say
            if by_chance or not (takes_experts(key, pairs, len(down)) and max_experts_density(key) > 0):
                return None
        return key, routing

    def _settle(self, x: torch.Tensor, key: CallKey, routing: Callable[[], tuple]) -> bool:
        """Sample a call's density where that is due, bring the weights' memory into the order that it wants, and say
        whether it goes by kernels."""
        form, recent, on_cpu = self.twell.form, self.twell_state.pairs, key.device == "cpu"
        if on_cpu or not key.asked:
            recent.look(len(form.tokens(self, x)), routing, form.weights(self)[0])
        faster, weight = self._kernels_pay(key), self._parameters[form.settled]
        if faster or (on_cpu and by_column(weight)):
            density = 0.0 if form.transposed else recent.density  # kernels read gate and up alike at every density
            settle_down(self, weight, x, density)
        return faster and self._kernels_read(key)

    def _kernels_pay(self, key: CallKey) -> bool:
        return choose_experts(key, Activity(self.twell_state.pairs.density)) == "kernels"

    def _kernels_read(self, key: CallKey) -> bool:
        """False where others hold the memory of gate and up, which kernels would copy in each call."""
        form = self.twell.form
        return key.asked or not form.transposed or by_column(self._parameters[form.gate_up])

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
