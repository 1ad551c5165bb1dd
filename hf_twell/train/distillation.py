"""`Distillation`: a dense parent in the same process teaches the sparse model, through gradients alone."""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_twell.blocks.architectures import decoder_of, dense_ffns
from hf_twell.blocks.batches import token_weight
from hf_twell.ops.reference import new_tally
from hf_twell.train.divergence import IGNORED, DistilledLoss, InjectKl
from hf_twell.train.trainers import computes_causal_loss


class Distillation:
    """Adds what a dense parent knows to each gradient: its logits, its feed-forward outputs, or both.

    Formula: the objective becomes (1 - logits) * task loss + logits * KL(parent || model) + layers * E. KL is averaged
    over the non-padding tokens of the optimizer step; E is the mean over layers of the squared error of the block's
    output over the parent's squared output, both averaged over the same tokens (a micro-batch's own, for the latter).

    Like the L1 term, both enter in backward, at the logits and at each block's output: the logged loss stays the task
    loss, and accumulation, processes, gradient checkpointing and torch.compile change nothing. Where a trainer computes
    Transformers' causal loss, that is computed here in training, and backward makes one gradient of it and the
    divergence.

    Memory: the parent's weights and, for a micro-batch, its last hidden states (B, S, D); for `layers`, each block's
    output (B, S, D) of the parent and of the model. With `logits` above 0 the model's logits (B, S, V) are kept for
    backward, which makes a gradient of that size, both in the logits' dtype; beside them is what a trainer's own loss
    takes. The parent's logits, and what is computed in float32, exist for a sixteenth of the tokens at a time (or
    64 MiB in float32, where that is more). Accelerate's mixed precision copies all logits to float32 until the loss is
    known.

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
        self._layers: list[_Layer] = []
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
            for student, teacher in zip(mine, theirs, strict=True):
                layer = _Layer()
                self._layers.append(layer)
                self._handles.append(student.module.register_forward_hook(layer.teach))
                self._handles.append(teacher.module.register_forward_hook(layer.see))
        torch.compiler.reset()  # what was compiled for models without these hooks would be taken, and pass over them
        self._batch: _Batch | None = None
        self._parent_on: torch.device | None = None
        self._ran = False  # since the last report
        self._backend: str | None = None
        self._gives_loss_of: Trainer | None = None  # the trainer that it joined, if `_loss` is what that computes
        # Backward adds to the gradient of each: the total, and the tokens or blocks that it is of. So nothing but
        # autograd is needed to report, in compiled models too.
        self._sums = {"kl": new_tally(2), "layer_error": new_tally(2)}

    def join(self, trainer: Trainer) -> None:
        """Fit in with how a trainer computes: compile what it compiles, and look at the loss that it computes.

        Where that is the plain causal one, `micro_batch` computes it in its place, and its gradient is made together
        with the divergence's. A trainer with a loss of its own keeps it, and the divergence enters at the logits.
        """
        args, plugin = trainer.args, trainer.accelerator.state.dynamo_plugin
        if args.torch_compile:
            decoder = decoder_of(self.parent)
            layers = getattr(decoder, "layers", [decoder])  # some families name them otherwise
            for part in layers if plugin.use_regional_compilation else [decoder]:
                part.compile(backend=args.torch_compile_backend)
            self._backend = args.torch_compile_backend
        self._gives_loss_of = trainer if self.logits and computes_causal_loss(trainer) else None

    def _loss(
        self, outputs: Mapping, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Trainer's `compute_loss_func` of a micro-batch: the task loss, with the gradient of the whole objective."""
        batch = self._batch
        assert batch is not None
        if not torch.is_grad_enabled():  # another callback evaluates meanwhile
            return ForCausalLMLoss(outputs["logits"], labels, outputs["logits"].shape[-1], num_items_in_batch)
        if batch.logits is None:
            raise ValueError(
                "the model did not call the output head that it had when the Distillation was made; make it after what "
                "replaces the head, such as resize_token_embeddings"
            )
        if labels is None:
            raise ValueError("the batch has no labels to compute a loss of; give 'labels', as a copy of 'input_ids'")
        logits, batch.logits = batch.logits, None  # else they would be kept to the end of backward
        batch.has_loss = True
        shifted = F.pad(labels, (0, 1), value=IGNORED)[..., 1:] if batch.shift_labels is None else batch.shift_labels
        labels_T = shifted.flatten().to(logits.device)
        if num_items_in_batch is None:  # the mean over micro-batches of their means
            num_items_in_batch = batch.micro_batches * (labels_T != IGNORED).sum()
        count = torch.as_tensor(num_items_in_batch, device=logits.device)
        return DistilledLoss.apply(logits, self._sums["kl"].to(logits.device), labels_T, count, batch, self._backend)

    def detach(self) -> None:
        """Take it off the model, which until then holds the parent in memory, in its copies and pickles too."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def micro_batch(
        self, batch: Mapping, scale: torch.Tensor, micro_batches: int = 1, trainer: Trainer | None = None
    ) -> Iterator[None]:
        """The parent reads the batch, as the model receives it, now; what the model computes inside learns from it.
        `scale` () is the world size over the step's tokens (times an fp16 loss scale). `micro_batches` is how many the
        step has. `trainer` is one that it has joined, whose loss is computed here meanwhile: outside, as in evaluation,
        the trainer computes it as ever. A ValueError where the model made no logits."""
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
        joined = trainer if trainer is self._gives_loss_of else None
        try:
            for layer in self._layers:
                layer.looks = True
            with torch.no_grad():
                hidden = decoder_of(self.parent)(**reads, use_cache=False).last_hidden_state
            weight = torch.ones(hidden.shape[:2], device=hidden.device) if weight is None else weight.to(hidden.device)
            self._give_layers(weight, scale)
            self._batch = _Batch(
                hidden,
                weight,
                scale,
                head=self.parent.get_output_embeddings(),
                share=self.logits,
                micro_batches=micro_batches,
                shift_labels=batch.get("shift_labels"),
                gives_loss=joined is not None,
            )
            self._ran = True
            if joined is not None and joined.compute_loss_func is None:
                joined.compute_loss_func = self._loss
            yield
            if joined is not None and not self._batch.has_loss:
                raise ValueError(
                    "the trainer computes another loss than when the distillation joined it; give it its compute_loss "
                    "or compute_loss_func before the SparsityCallback is made"
                )
            if self.logits and not self._batch.has_loss:
                raise ValueError(
                    "distilling logits needs those of the model, but its loss was computed without them, by a fused "
                    "output head (SFTTrainer's own; Liger's, unless fused_linear_cross_entropy is False); use Trainer "
                    "or give SFTTrainer a compute_loss_func, or distil layers alone: logits=0"
                )
        finally:
            self._batch = None
            for layer in self._layers:
                layer.let_go()
            if joined is not None and joined.compute_loss_func == self._loss:
                joined.compute_loss_func = None

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

    def _give_layers(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        """Give each block what the parent's put out, and (2): what multiplies the difference in its gradient, and the
        square of it in its error."""
        tokens = weight.sum().clamp(min=1)
        for layer in self._layers:
            target, layer.looks = layer.target, False
            assert target is not None
            weight, tokens = weight.to(target.device), tokens.to(target.device)
            power = torch.where(weight.unsqueeze(-1) > 0, target, 0).float().square().sum() / tokens
            power = power.clamp(min=1e-12)
            gradient = 2 * self.layers / len(self._layers) * scale.to(target.device) / power
            factors = torch.stack([gradient, 1 / (power * tokens)])
            layer.given = target, weight, factors, self._sums["layer_error"]

    # A compiler would unroll backward's loop over the tokens.
    @torch.compiler.disable(reason="distillation goes through the logits a few tokens at a time")
    def _see_logits(self, module: nn.Module, args: tuple, logits: torch.Tensor) -> torch.Tensor | None:
        batch = self._batch
        if batch is None or not torch.is_grad_enabled():
            return None
        if batch.gives_loss:
            batch.logits = logits  # before accelerate turns them to float32
            return None
        batch.has_loss = True
        return InjectKl.apply(logits, self._sums["kl"].to(logits.device), batch, self._backend)


@dataclasses.dataclass
class _Batch:
    """What a micro-batch's gradients need of the parent, and the loss of the batch and the model."""

    hidden: torch.Tensor  # (B, S, D)
    weight: torch.Tensor  # (B, S)
    scale: torch.Tensor  # ()
    head: nn.Module
    share: float
    micro_batches: int  # of the step
    shift_labels: torch.Tensor | None
    gives_loss: bool  # whether `_loss` stands in for the trainer's own
    has_loss: bool = False  # of the model's logits
    logits: torch.Tensor | None = None  # (B, S, V), the model's, until `_loss` takes them


class _Layer:
    """The hooks of one block and of the parent's, picklable: the block's output learns from the parent's.

    What a micro-batch gives to the block lies here, and not in a list of all layers: a graph would be guarded by the
    place in it, and layers that are compiled one by one would share none.

    Attributes:
        looks: whether the parent reads a micro-batch now; others may run the parent too, to score it.
        target: what the parent's block put out, (B, S, D).
        given: arguments of `_InjectError` after the block's output; None outside of a micro-batch.
    """

    def __init__(self) -> None:
        self.looks = False
        self.target: torch.Tensor | None = None
        self.given: tuple[torch.Tensor, ...] | None = None

    def let_go(self) -> None:
        self.looks, self.target, self.given = False, None, None

    def see(self, module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        if self.looks:
            self.target = output

    def teach(self, module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor | None:
        if self.given is None or not output.requires_grad:
            return None
        return _InjectError.apply(output, *(each.to(output.device) for each in self.given))


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
        for key in (
            "final_logit_softcapping",
            "logits_soft_cap",
            "logits_scaling",
            "logit_scale",
            "lm_head_multiplier",
        ):
            if getattr(config, key, None) not in (None, 1, 1.0):
                raise ValueError(
                    f"{type(each).__name__} changes its logits after the head ({key}); distil layers alone: logits=0"
                )
    sizes = [each.get_output_embeddings().weight.shape[0] for each in (model, parent)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the model has {sizes[0]} output words and the parent {sizes[1]}; distilling logits needs the same"
        )
