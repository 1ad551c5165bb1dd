"""`Distillation`: a dense parent in the same process teaches the sparse model, through gradients alone."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import Trainer

from hf_twell.blocks.architectures import decoder_of, dense_ffns
from hf_twell.blocks.batches import token_weight
from hf_twell.ops.reference import new_tally
from hf_twell.train.divergence import InjectKl, KlAlone, divergence_of


class Distillation:
    """Adds what a dense parent knows to each gradient: its logits, its feed-forward outputs, or both.

    Formula: the objective becomes (1 - logits) * task loss + logits * KL(parent || model) + layers * E. KL is averaged
    over the non-padding tokens of the optimizer step; E is the mean over layers of the squared error of the block's
    output over the parent's squared output, both averaged over the same tokens (a micro-batch's own, for the latter).

    Like the L1 term, both enter in backward, at the logits and at each block's output: the logged loss stays the task
    loss, and accumulation, processes, gradient checkpointing and torch.compile change nothing. With `logits=1` the task
    loss teaches nothing, and `join` spares its backward.

    Memory: the parent's weights and, for a micro-batch, its last hidden states (B, S, D); for `layers`, each block's
    output (B, S, D) of the parent and of the model. With `logits` above 0 the model's logits (B, S, V) are kept for
    backward, which makes one gradient of that size beside the one that it gets, both in the logits' dtype. The
    parent's logits exist for a sixteenth of the tokens at a time (or 64 MiB of them in float32, where that is more).

    Args:
        model: the model to train.
        parent: the dense model it was converted from, or another with the same vocabulary; it is frozen. With `layers`,
            as many layers and the same hidden size.
        logits: share of the parent's logits in the objective, 0 to 1.
        layers: weight of the feed-forward outputs' error.

    Raises:
        ValueError: shares out of range, or two models that do not fit together.
    """

    def __init__(self, model: nn.Module, parent: nn.Module, *, logits: float = 0.5, layers: float = 0.0) -> None:
        if not 0 <= logits <= 1 or layers < 0 or not (logits or layers):
            raise ValueError(
                f"distillation with logits={logits} and layers={layers}; give logits from 0 to 1, layers of at least "
                "0, and one of them above 0"
            )
        self.logits, self.layers = logits, layers
        self.parent = parent.eval().requires_grad_(False)
        self._handles: list = []
        if logits:
            _check_heads(model, parent)
            self._handles.append(model.get_output_embeddings().register_forward_hook(self._see_logits))
        if layers:
            mine, theirs = (dense_ffns(each, "distillation of layers") for each in (model, parent))
            shapes = [(len(sites), sites[0].linear("down").out_features) for sites in (mine, theirs)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"distillation of layers needs as many layers of one size; the model has {shapes[0]}, the parent "
                    f"{shapes[1]} (layers, hidden size)"
                )
            for index, (student, teacher) in enumerate(zip(mine, theirs, strict=True)):
                self._handles.append(student.module.register_forward_hook(_Layer(self, index)))
                self._handles.append(teacher.module.register_forward_hook(self._see_parent_layer))
        torch.compiler.reset()  # what was compiled for models without these hooks would be taken, and pass over them
        self._batch: _Batch | None = None
        self._parent_on: torch.device | None = None
        self._outputs: list[torch.Tensor] | None = None  # of the parent's blocks, while it reads a micro-batch
        self._ran = False  # since the last report
        self._backend: str | None = None
        self._task_loss: Callable | None = None  # the model's own, where `_loss` stands in for it
        # Backward adds to the gradient of each: the total, and the tokens or blocks that it is of. So nothing but
        # autograd is needed to report, in compiled models too.
        self._sums = {"kl": new_tally(2), "layer_error": new_tally(2)}

    def join(self, trainer: Trainer) -> None:
        """Fit in with how a trainer computes: compile what it compiles, and spare a task loss that teaches nothing.

        With `logits=1` that loss is computed for the log alone, together with the divergence: its backward over all
        logits would take a fifth of a small model's step. It stays where the trainer has a loss of its own.
        """
        args, plugin = trainer.args, trainer.accelerator.state.dynamo_plugin
        if args.torch_compile:
            decoder = decoder_of(self.parent)
            layers = getattr(decoder, "layers", [decoder])  # some families name them otherwise
            for part in layers if plugin.use_regional_compilation else [decoder]:
                part.compile(backend=args.torch_compile_backend)
            self._backend = args.torch_compile_backend
        model = trainer.accelerator.unwrap_model(trainer.model)
        plain = trainer.compute_loss_func is None and trainer.label_smoother is None
        plain = plain and type(trainer).compute_loss is Trainer.compute_loss and trainer.model_accepts_loss_kwargs
        if self.logits == 1 and plain and getattr(model, "loss_type", None) == "ForCausalLM":
            self._task_loss, trainer.compute_loss_func = model.loss_function, self._loss

    def leave(self, trainer: Trainer) -> None:
        """Give the trainer its own loss back."""
        if trainer.compute_loss_func == self._loss:
            self._task_loss = trainer.compute_loss_func = None

    def _loss(
        self, outputs: Mapping, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Trainer's `compute_loss_func`: the task loss; in training its gradient is the divergence's."""
        batch = self._batch
        if batch is None or batch.logits is None:  # in evaluation
            logits = outputs["logits"]
            options = {"vocab_size": logits.shape[-1], "num_items_in_batch": num_items_in_batch}
            assert self._task_loss is not None
            return self._task_loss(logits=logits, labels=labels, **options)
        kept = self._sums["kl"].to(batch.logits.device)
        return KlAlone.apply(batch.logits, kept, labels, num_items_in_batch, batch, divergence_of(self._backend))

    def detach(self) -> None:
        """Take it off the model, which until then holds the parent in memory, in its copies and pickles too."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def micro_batch(self, batch: Mapping, scale: torch.Tensor) -> Iterator[None]:
        """The parent reads the batch, as the model receives it, now; what the model computes inside learns from it.
        `scale` () is the world size over the step's tokens (times an fp16 loss scale). A ValueError where the model
        made no logits."""
        if self._parent_on != scale.device:  # going through all its modules takes the host 5 ms
            self.parent.to(scale.device)
            self._parent_on = scale.device
        if any(slot.device != scale.device for slot in self._sums.values()):
            self._sums = {name: new_tally(2, scale.device) for name in self._sums}
        reads = {
            key: value for key, value in batch.items() if not key.startswith(("labels", "shift_labels", "num_items"))
        }
        reads = {k: v.to(scale.device) if isinstance(v, torch.Tensor) else v for k, v in reads.items()}
        weight = token_weight(reads)
        outputs: list[torch.Tensor] = []
        self._outputs = outputs
        try:
            with torch.no_grad():
                hidden = decoder_of(self.parent)(**reads, use_cache=False).last_hidden_state
        finally:
            self._outputs = None
        weight = torch.ones(hidden.shape[:2], device=hidden.device) if weight is None else weight.to(hidden.device)
        head = self.parent.get_output_embeddings()
        factors = self._factors(outputs, weight, scale)
        self._batch = _Batch(hidden, outputs, weight, scale, factors, head, self.logits)
        self._ran = True
        try:
            yield
            if self.logits and not self._batch.made_logits:
                raise ValueError(
                    "distilling logits needs those of the model, but its loss was computed without them, by a fused "
                    "output head (SFTTrainer's own; Liger's, unless fused_linear_cross_entropy is False); use Trainer "
                    "or give SFTTrainer a compute_loss_func, or distil layers alone: logits=0"
                )
        finally:
            self._batch = None

    def report(self) -> dict[str, float]:
        """KL in nats per token and the layers' relative error since the last report, over this process's tokens."""
        sums = {name: slot.grad.tolist() for name, slot in self._sums.items()}
        if self.layers and self._ran and not sums["layer_error"][1]:
            warnings.warn(
                "distilled layers taught nothing: the blocks that Distillation was given are not those that train. "
                "Make it after what replaces or copies blocks, such as PEFT's modules_to_save",
                stacklevel=2,
            )
        self._ran = False
        for slot in self._sums.values():
            slot.grad.zero_()
        return {f"twell/{name}": total / count for name, (total, count) in sums.items() if count}

    def _factors(self, outputs: list[torch.Tensor], weight: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
        """For each block (2): what multiplies the difference in its gradient, and the square of it in its error."""
        tokens = weight.sum().clamp(min=1)
        factors = []
        for output in outputs:
            weight, tokens = weight.to(output.device), tokens.to(output.device)
            power = torch.where(weight.unsqueeze(-1) > 0, output, 0).float().square().sum() / tokens
            power = power.clamp(min=1e-12)
            gradient = 2 * self.layers / len(outputs) * scale.to(output.device) / power
            factors.append(torch.stack([gradient, 1 / (power * tokens)]))
        return factors

    def _see_parent_layer(self, module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        if self._outputs is not None:  # others may run the parent too, to score it
            self._outputs.append(output)

    # A compiler would unroll backward's loop over the tokens.
    @torch.compiler.disable(reason="distillation goes through the logits a few tokens at a time")
    def _see_logits(self, module: nn.Module, args: tuple, logits: torch.Tensor) -> torch.Tensor | None:
        batch = self._batch
        if batch is None or not torch.is_grad_enabled():
            return None
        batch.made_logits = True
        if self._task_loss is not None:
            batch.logits = logits  # before they are turned to float32 for the loss
            return None
        return InjectKl.apply(logits, self._sums["kl"].to(logits.device), batch, divergence_of(self._backend))


class _Batch:
    """What a micro-batch's gradients need of the parent, and the model's logits where the task loss is spared.

    Shapes: hidden and each of outputs (B, S, D), weight (B, S), scale (), each of factors (2), logits (B, S, V).
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        outputs: list[torch.Tensor],
        weight: torch.Tensor,
        scale: torch.Tensor,
        factors: list[torch.Tensor],
        head: nn.Module,
        share: float,
    ) -> None:
        self.hidden, self.outputs, self.weight, self.scale = hidden, outputs, weight, scale
        self.factors, self.head, self.share = factors, head, share
        self.made_logits = False
        self.logits: torch.Tensor | None = None


class _Layer:
    """The hook of one block, picklable: its output learns from the parent's."""

    def __init__(self, distillation: Distillation, index: int) -> None:
        self.distillation, self.index = distillation, index

    def __call__(self, module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor | None:
        batch = self.distillation._batch
        if batch is None or not output.requires_grad:
            return None
        target, factors = batch.outputs[self.index], batch.factors[self.index]
        given = (target, batch.weight, factors, self.distillation._sums["layer_error"])
        return _InjectError.apply(output, *(each.to(output.device) for each in given))


class _InjectError(torch.autograd.Function):
    """A block's output unchanged; backward adds the gradient of its relative squared error against the parent's."""

    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor,
        factors: torch.Tensor,
        sums: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(y, target, weight, factors)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, target, weight, factors = ctx.saved_tensors
        difference = torch.where(weight.unsqueeze(-1) > 0, y.float() - target.float(), 0)
        error = difference.square().sum() * factors[1]
        grad = grad_y + (factors[0] * difference).to(y.dtype)
        return grad, None, None, None, torch.stack([error, torch.ones_like(error)])


def _check_heads(model: nn.Module, parent: nn.Module) -> None:
    for each in (model, parent):
        config = each.config.get_text_config()
        if each.get_output_embeddings() is None:
            raise ValueError(f"{type(each).__name__} has no output embeddings whose logits could be distilled")
        for key in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
            if getattr(config, key, None) not in (None, 1, 1.0):
                raise ValueError(
                    f"{type(each).__name__} changes its logits after the head ({key}); distil layers alone: logits=0"
                )
    sizes = [each.get_output_embeddings().weight.shape[0] for each in (model, parent)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the model has {sizes[0]} output words and the parent {sizes[1]}; distilling logits needs the same"
        )
