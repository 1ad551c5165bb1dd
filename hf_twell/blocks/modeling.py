"""The class that a sparse feed-forward block gets: a subclass of its own class, so the model stays what it was.

That of a dense block; `hf_twell.blocks.experts` has that of a layer's experts.
"""

import functools
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, SupportsIndex

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_twell.blocks import calls
from hf_twell.blocks.architectures import Site, input_name, only_input
from hf_twell.blocks.layout import restore_down
from hf_twell.blocks.operands import (
    Operands,
    has_forward_of,
    is_hooked,
    linear_of,
    operands_of,
    plain_parameters,
    quantize_x_alike,
    quantized_parameters,
    reads_any_order,
)
from hf_twell.dispatch.activity import Activity, RecentInputs, RecentPairs
from hf_twell.dispatch.training import TrainingChoice
from hf_twell.ops import api, reference
from hf_twell.ops.runs import Runs


@dataclass
class L1Inputs:
    """What one layer needs to add the L1 gradient while a micro-batch runs; see `hf_twell.ops.reference.inject_l1`.

    `tokens` is how many the micro-batch holds, where no `token_weight` says so by its shape. With `counts` it is the
    gradient of the count term (`inject_count`) that is added, and with `runs` that of runs of tokens too.
    """

    scale: torch.Tensor
    token_weight: torch.Tensor | None
    tally: torch.Tensor
    tokens: int | None = None
    counts: bool = False
    runs: Runs | None = None
    unions: torch.Tensor | None = None

    def to(self, device: torch.device) -> "L1Inputs":
        """The same on x's device: where FSDP2 offloads parameters to the CPU, these were made there, too."""
        weight = None if self.token_weight is None else self.token_weight.to(device)
        moved = replace(self, scale=self.scale.to(device), token_weight=weight, tally=self.tally.to(device))
        if self.runs is None or self.unions is None:
            return moved
        return replace(moved, runs=self.runs.to(device), unions=self.unions.to(device))


@dataclass
class FfnSettings:
    """What `sparsify` decided for a block: its name in the model, its layer, its form and the backend asked for.

    `place` is its place among all of the model's blocks, and `part` what tells it from others of its layer, "experts"
    say; None where no layer has two. `activity` is what the model's config says of it, if it does. `choices` is what
    that means for compiled evaluation on a GPU of compute capability 9.0, and `choices_elsewhere` on others: see
    `hf_twell.blocks.calls.store_density`. `config` is the model's, while that says it: see
    `hf_twell.blocks.calls.drop_activity`.
    """

    name: str
    layer: int
    form: Any  # an FfnForm; of routed experts an ExpertsForm
    backend: str
    place: int = 0
    part: str | None = None
    activity: Activity | None = None
    choices: dict[float, bool] | None = None
    choices_elsewhere: dict[float, bool] | None = None
    config: PreTrainedConfig | None = None

    def __deepcopy__(self, memo: dict) -> Self:
        # The copy of a block alone (PEFT's `modules_to_save` trains one) goes on in a model that keeps its config.
        whole = any(isinstance(each, PreTrainedModel) for each in memo.values())
        return replace(self, config=deepcopy(self.config, memo) if whole else self.config)


@dataclass(eq=False)
class FfnState:
    """What a block's calls leave behind for the next ones.

    Attributes:
        l1: set while a micro-batch of sparse training runs.
        step_choice: how the block trains on a GPU.
        on_kernels: which way the last forward of training on a GPU went; None where there was none, or no choice.
        recent: the density of its inputs in evaluation; `pairs` that of experts.
        last_call: in evaluation, what the last call found out.
        captured: whether a CUDA graph may hold the weights' addresses: their memory then stays where it is.
        awaited: the mark of a call of a forward that others put on the block, until that comes to the block's own.
    """

    l1: L1Inputs | None = None
    step_choice: TrainingChoice = field(default_factory=TrainingChoice)
    on_kernels: bool | None = None
    recent: RecentInputs = field(default_factory=RecentInputs)
    pairs: RecentPairs = field(default_factory=RecentPairs)
    last_call: calls.LastCall | None = None
    captured: bool = False
    awaited: list | None = None


class BlockSizes(NamedTuple):
    """How many experts a block has, None of a dense one, and F: of an expert."""

    experts: int | None
    width: int

    @property
    def neurons(self) -> int:
        return (self.experts or 1) * self.width


class SparseBlock(nn.Module):
    """Mixin put before a block's own class, which is `stock_class` and calls its x `twell_input`."""

    stock_class: type
    mixin: type
    twell: FfnSettings
    twell_state: FfnState

    def sizes(self) -> BlockSizes:
        raise NotImplementedError

    def call_replaced(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What `__call__` does where somebody has replaced the block's forward."""
        # The forward that replaced ours calls it (Accelerate's hooks, wrappers, compilers) or does not (Liger's SwiGLU,
        # which computes SiLU). The mark is of this call alone, as other threads may be in theirs, and a list because
        # Dynamo cannot make an object().
        state = self.twell_state
        mark: list = []
        state.awaited = mark
        try:
            y = super().__call__(*args, **kwargs)
            missed = state.awaited is mark
        finally:
            state.awaited = None
        if missed:
            raise ValueError(
                f"the forward of {self.twell.name} was replaced after sparsify by one that does not call it (Liger's "
                "SwiGLU patch does that, and computes SiLU); leave that patch out: "
                "TrainingArguments(liger_kernel_config={'swiglu': False}), or apply_liger_kernel_to_...(swiglu=False)"
            )
        return y

    def train(self, mode: bool = True) -> Self:
        if mode:  # a compiled forward does not, and fused optimizers pair weights with states of the stock order
            restore_down(self)
        return super().train(mode)

    def l1_of(self, x: torch.Tensor) -> L1Inputs | None:
        """What the micro-batch that runs asks of this call; None outside of one."""
        # Without gradients (text generated inside a training step) the batch need not be the step's.
        l1 = self.twell_state.l1 if torch.is_grad_enabled() else None
        if l1 is None:
            return None
        l1 = l1 if l1.tally.device == x.device else l1.to(x.device)
        if x.ndim == 2 and l1.token_weight is not None and l1.token_weight.numel() == len(x):
            # A mixture of experts, and the dense expert beside it, have the tokens of all sequences in one row.
            l1 = replace(l1, token_weight=l1.token_weight.flatten())
        _check_tokens(self, x.shape[:-1], l1)
        return l1

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        # The subclass is made at run time, so pickle and deepcopy rebuild it from the class it was made of.
        return _new_instance, (self.stock_class, self.mixin), self.__dict__.copy()


class SparseFfn(SparseBlock):
    """That of a dense block."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) == 1 and not kwargs and not torch.compiler.is_compiling():
            y = calls.repeat(self, args[0])
            if y is not None:
                return y
            self.twell_state.last_call = None
        if has_forward_of(SparseFfn, self):
            return super().__call__(*args, **kwargs)
        return self.call_replaced(*args, **kwargs)

    def sizes(self) -> BlockSizes:
        return BlockSizes(None, getattr(self, self.twell.form.down).in_features)

    def forward(self, x: torch.Tensor | None = None, **named: torch.Tensor) -> torch.Tensor:
        if x is None or named:
            x = only_input(self, x, named)
        if self.training:
            calls.drop_activity(self, x)
        # Where __call__ left no mark, as its own guards say, a compiled forward assigns nothing.
        if not (torch.compiler.is_compiling() and has_forward_of(SparseFfn, self)):
            self.twell_state.awaited = None
        l1 = self.l1_of(x)
        operands = self._operands(x)
        return self._through_submodules(x, l1) if operands is None else self._compute(x, l1, operands)

    def _operands(self, x: torch.Tensor) -> Operands | None:
        """What computes the block beside x; None where only its submodules can, hooked or replaced as they may be."""
        if all_modules_are_hooked() or not is_bare_relu(self._modules[self.twell.form.activation]):
            return None
        if api.resolve(self.twell.backend, x.device.type) == "reference" or api.transformed():
            return None
        return self._read_weights(not torch.is_grad_enabled())

    def _read_weights(self, eight_bit: bool = True) -> Operands | None:
        """Of plain linears, neither hooked nor replaced, or 8-bit ones that kernels read with one x; else None."""
        modules, form = self._modules, self.twell.form
        operands = operands_of(modules, form, plain_parameters)
        if operands is None and eight_bit:
            operands = operands_of(modules, form, quantized_parameters)
            if operands is not None and not quantize_x_alike(*(modules[name] for name in form.linears)):
                return None
        return operands

    def _compute(self, x: torch.Tensor, l1: L1Inputs | None, operands: Operands) -> torch.Tensor:
        key, way = calls.settle(self, x, operands, reports=l1 is not None)
        if way == "plain":
            y = self._through_submodules(x, l1)
        else:
            w_down = operands.w_down if key.compiled else _held(operands.w_down, x, self.training)
            weights = operands.w_up, w_down, operands.w_gate
            options: dict[str, Any] = {"b_up": operands.b_up, "b_down": operands.b_down, "b_gate": operands.b_gate}
            if l1 is not None:
                term = "count_scale" if l1.counts else "l1_scale"
                options |= {term: l1.scale, "token_weight": l1.token_weight, "tally": l1.tally}
                if l1.runs is not None:
                    options |= {"runs": l1.runs, "unions": l1.unions}
            if way == "dense":
                y = api.dense_ffn(x, *weights, **options)
            else:
                if operands.s_up is not None:
                    options |= {"s_up": operands.s_up, "s_down": operands.s_down, "s_gate": operands.s_gate}
                    options["quantize_x"] = key.quantize_x
                else:
                    options["capacity"] = self.twell_state.step_choice.capacity if torch.is_grad_enabled() else None
                y = api.ffn(x, *weights, **options, backend=self.twell.backend, key=key, way=way)
        calls.remember(self, x, operands, key, way)
        return y

    def _through_submodules(self, x: torch.Tensor, l1: L1Inputs | None) -> torch.Tensor:
        """Adapters, hooks and replaced linears or activations all count here."""
        modules, form = self._modules, self.twell.form
        up, down = modules[form.up], modules[form.down]
        z, u = form.split(linear_of(modules[form.gate or form.up], x))
        active = modules[form.activation](z)
        if l1 is not None and l1.counts:
            active = reference.inject_count(active, l1.scale, l1.token_weight, l1.runs, l1.unions)
        h = active if form.gate is None else active * (linear_of(up, x) if u is None else u)
        if l1 is not None:
            check_whole(h, len(l1.tally) - 1, self.twell)
            h = reference.inject_l1(h, None if l1.counts else l1.scale, l1.token_weight, l1.tally)
        if torch.compiler.is_compiling() and not reads_any_order(down):
            read: Any = quantized_parameters(down)
            values, bias, scale = read
            return reference.linear(h, values, scale, bias)
        return linear_of(down, h)


def _held(w_down: torch.Tensor, x: torch.Tensor, training: bool) -> torch.Tensor:
    """The same weight, whose memory stays while another thread gives the parameter new one."""
    if not torch.is_grad_enabled():
        # Autocast knows its cast of a parameter by the parameter itself.
        cast = w_down.requires_grad and torch.is_autocast_enabled(x.device.type)
        return w_down if cast else w_down.detach()
    return w_down.view_as(w_down) if x.is_cpu and not training else w_down  # until its backward, too


def is_bare_relu(activation: nn.Module) -> bool:
    """Whether it computes ReLU unwatched: nobody has put in another one, replaced its forward or hooked it."""
    return type(activation) is nn.ReLU and not is_hooked(nn.ReLU, activation)


def all_modules_are_hooked() -> bool:
    """Whether somebody watches every module, as `register_module_forward_hook` and FlopCounterMode let them."""
    return not torch.compiler.is_compiling() and bool(torch.nn.modules.module._has_any_global_hook())


def _check_tokens(ffn: SparseBlock, shape: torch.Size, l1: L1Inputs) -> None:
    """Refuse hidden states that are not those of the micro-batch whose tokens were counted.

    It takes the block and not its name: a compiled layer that reads its name is compiled anew for each layer.
    """
    if l1.token_weight is not None:
        if l1.token_weight.shape == shape:
            return
        counted = f"attention_mask has shape {tuple(l1.token_weight.shape)}"
    elif torch.compiler.is_compiling() or l1.tokens in (None, shape.numel()):  # a graph would be guarded by the number
        return
    else:
        counted = f"input_ids hold {l1.tokens}, without an attention_mask"
    raise ValueError(
        f"{ffn.twell.name} got hidden states for {tuple(shape)} tokens, but the batch's {counted}; the L1 term counts "
        "the batch's tokens: pass the batch that the model really receives, with no virtual tokens added to it (prompt "
        "tuning: use LoRA or prefix tuning) and no part of it left out."
    )


def sparse_class(stock_class: type, mixin: type | None = None) -> type[nn.Module]:
    """The sparse subclass of a feed-forward block's class; always the same one for the same class.

    Args:
        mixin: what computes it, by default `SparseFfn`.
    """
    return _sparse_class(stock_class, mixin or SparseFfn)


@functools.cache
def _sparse_class(stock_class: type, mixin: type) -> type[nn.Module]:
    doc = f"{stock_class.__name__} computed over its active neurons."
    attributes = {"stock_class": stock_class, "mixin": mixin, "twell_input": input_name(stock_class), "__doc__": doc}
    return type(f"Sparse{stock_class.__name__}", (mixin, stock_class), attributes)


def _new_instance(stock_class: type, mixin: type) -> nn.Module:
    cls: Any = sparse_class(stock_class, mixin)
    return cls.__new__(cls)


def check_whole(h: torch.Tensor, width: int, block: FfnSettings | Site) -> None:
    """Refuse the part of a block's h (..., F) that tensor parallelism leaves to one process.

    Args:
        block: what has the block's `name`, which is read for the error alone (as in `_check_tokens`).

    Raises:
        ValueError: naming the block.
    """
    if h.shape[-1] != width:
        raise ValueError(
            f"{block.name} has {h.shape[-1]} of its {width} neurons in this process (tensor parallelism); L1 term "
            "and measures of sparsity need whole blocks: load the model without tp_plan, and train with DDP or FSDP2"
        )


def sparse_ffns(model: nn.Module) -> list[nn.Module]:
    """The model's sparse blocks, in layer order."""
    idle, found = set(), []
    for module in model.modules():  # once: a step of training comes here, and the walk takes longer than the rest
        if isinstance(module, SparseBlock):
            found.append(module)
        # PEFT's `modules_to_save` keeps a block and a copy of it for each adapter; the active adapter's computes.
        copies = module._modules.get("modules_to_save")
        if copies is not None:
            active = [copies[name] for name in module.active_adapters if name in copies] or [module.original_module]
            idle |= {module.original_module, *copies.values()} - set(active)
    return [ffn for ffn in found if ffn not in idle]
