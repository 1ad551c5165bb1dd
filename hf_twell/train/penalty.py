"""The term of sparse training, L1 or a count: what it adds to each gradient, and what it sees of the sparsity."""

import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from transformers.utils import is_accelerate_available

from hf_twell.blocks.batches import batch_size_tokens, check_one_stream, runs_of, token_weight
from hf_twell.blocks.modeling import L1Inputs, SparseBlock, SparseFfn, sparse_ffns
from hf_twell.convert.entry import record_density
from hf_twell.dispatch.limits import limit
from hf_twell.dispatch.training import Block, ModelChoice
from hf_twell.ops.reference import new_tally
from hf_twell.train.schedule import TERMS, check_share
from hf_twell.train.step_counts import StepCounts

logger = logging.getLogger(__name__)


class L1Penalty:
    """Adds `l1_weight` times the mean over layers of L1 to the objective, by its gradient alone.

    Formula: L1 of a layer = sum over neurons of |h|, averaged over all non-padding tokens of the optimizer step, that
    is over all its micro-batches and ranks. The gradient enters in the blocks' own backward, never through a returned
    loss, so it is exact whatever the trainer does with losses, and under gradient checkpointing.

    A hand-written loop needs two lines of it:

        penalty = L1Penalty(model, l1_weight=2e-4)
        for batches in optimizer_steps:
            for batch in penalty.micro_batches(batches):
                (model(**batch).loss / len(batches)).backward()
            optimizer.step()

    A model that is trained without them, and so without the term, warns once.

    Under DistributedDataParallel every rank calls it alike, with tokens of its own: gradients are taken to be averaged
    over ranks.

    Args:
        model: a sparsified model, or that in DistributedDataParallel.
        l1_weight: the coefficient; may be changed between optimizer steps. 0 only measures.
        term: "l1", or "count": in place of |h|, the smooth count of active neurons of
            `hf_twell.ops.reference.inject_count`.
        share: with "count", the term also presses on the smooth count of what each run of so many neighbouring tokens
            of a sequence activates together, such as 64; that is what kernels for many tokens pay for. None: on each
            token's count alone. `hf_twell.blocks.batches.runs_of` says where runs begin. A run at a sequence's end may
            be shorter, and counts by its tokens, in the term and in the reported union.

    Attributes:
        config: the model's; None of a module that has none.
        layer_weights: in place of `l1_weight`, a coefficient for each layer, (L,) fp32; None for one.
        token_scale: (), what turns a token's term into its share of the step's mean: ranks over tokens, times the
            fp16 loss scale.

    Raises:
        ValueError: a model without sparse blocks, an encoder-decoder, or context or sequence parallelism, where ranks
            share sequences; after the first step, if the model ran more than once in a micro-batch, or `micro_batches`
            saw no backward.

    Source: arXiv 2603.23198, section 2 (the sum over neurons instead of their mean).
    """

    def __init__(self, model: nn.Module, l1_weight: float, *, term: str = "l1", share: int | None = None) -> None:
        self.ffns = sparse_ffns(model)
        if not self.ffns:
            raise ValueError(f"{type(model).__name__} has no sparse blocks; call hf_twell.sparsify(model) first")
        if not isinstance(l1_weight, int | float) or not 0 <= l1_weight < math.inf:
            raise ValueError(f"l1_weight={l1_weight!r}; give a finite number of at least 0")
        if term not in TERMS:
            raise ValueError(f"term={term!r}; choose one of {', '.join(map(repr, TERMS))}")
        check_share(share, term)
        check_one_stream(model)
        _check_ranks_share_no_sequence()
        self.l1_weight, self.term, self.share = l1_weight, term, share
        self.layer_weights: torch.Tensor | None = None
        self.token_scale: torch.Tensor | None = None
        self._scale: torch.Tensor | None = None
        self._tallies: list[torch.Tensor] = []
        self._unions: list[torch.Tensor | None] = []
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []  # each tally and its gradient in its device's table
        self._tables: dict[torch.device, torch.Tensor] = {}
        self._step_tokens: torch.Tensor | None = None
        self._broke_off = False  # a micro-batch of the step, which is then not counted
        self._checked = False
        self._window: StepCounts | None = None
        self._choice = ModelChoice()
        self._batch_tokens = 0.0  # of a micro-batch of this rank, padding included
        self._in_runs: torch.Tensor | None = None  # this rank's tokens in runs of `share`, and in all
        self._model = model
        self.config = next((module.config for module in model.modules() if hasattr(module, "config")), None)
        _unwatch(model)
        model.register_forward_pre_hook(_warn_of_no_step)

    def detach(self) -> None:
        """The model trains without the term from here on, and nothing warns of it."""
        _unwatch(self._model)

    def begin_step(self, batches: Iterable[Mapping], *, scaler: torch.amp.GradScaler | None = None) -> None:
        """Count the tokens of an optimizer step: all micro-batches of this rank, and of the others.

        Args:
            batches: the micro-batches as the model receives them (`attention_mask` marks padding by 0).
            scaler: the fp16 gradient scaler, where one is used; its factor is divided out again by the optimizer step.
        """
        _check_ranks_share_no_sequence()
        if sparse_ffns(self._model) != self.ffns:
            raise ValueError(
                "layers of this L1Penalty are not sparse any more, or not the model's; after unpatch or sparsify, and "
                "after blocks are replaced, cut off or copied by an adapter, make a new one"
            )
        _unwatch(self._model)
        # What was measured is not true of what the step makes. Blocks drop it themselves, but not in evaluation mode.
        record_density(self.config, self.ffns, None)
        for ffn in self.ffns:
            vars(getattr(ffn, ffn.twell.form.activation)).pop("replaces", None)  # nor is it a dense parent's any more
        self.end_step()
        device = self.device
        tokens, sizes = torch.zeros((), device=device), []
        for batch in batches:
            weight = token_weight(batch)
            sizes.append(batch_size_tokens(batch) if weight is None else weight.numel())
            tokens += sizes[-1] if weight is None else weight.sum().to(device)
        self._batch_tokens = sum(sizes) / max(1, len(sizes))
        world_size = 1
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(tokens)
            world_size = dist.get_world_size()
        self._step_tokens, self._broke_off = tokens, False
        self.token_scale = world_size / tokens.clamp(min=1)
        if scaler is not None:
            self.token_scale = scaler.scale(self.token_scale)
        weights = self.l1_weight if self.layer_weights is None else self.layer_weights.to(device)
        self._scale = (weights / len(self.ffns) * self.token_scale).expand(len(self.ffns))
        if not self._tallies:
            self._make_tallies()
        for ffn in self.ffns:
            ffn.twell_state.step_choice.begin_step()

    @contextmanager
    def micro_batch(self, batch: Mapping) -> Iterator[None]:
        """Forward and backward of one micro-batch of the step run inside; outside, the model is as if untouched.

        A step of which one breaks off, by an exception on any rank, is in no report: not all its tokens were read.
        """
        if self._scale is None:
            raise ValueError(
                "begin_step(batches) must come before micro_batch(batch): the step's tokens are not counted"
            )
        weight, step = token_weight(batch), self._step_tokens
        runs = None if self.share is None else runs_of(batch, self.share)
        if runs is not None:
            counted = torch.stack([(runs.size == self.share).sum() * self.share, runs.size.sum()])
            self._in_runs = counted if self._in_runs is None else self._in_runs + counted
        runs_on = {device: None if runs is None else runs.to(device) for device in self._tables}
        for ffn, scale, tally, unions in zip(self.ffns, self._scale, self._tallies, self._unions, strict=True):
            ffn.twell_state.l1 = L1Inputs(
                scale.to(tally.device),
                None if weight is None else weight.to(tally.device, torch.float32, non_blocking=True),
                tally,
                batch_size_tokens(batch) if weight is None else None,
                counts=self.term == "count",
                runs=runs_on[tally.device],
                unions=unions,
            )
        try:
            yield
        except BaseException:
            # A loop over `micro_batches` that is kept in a variable may be closed in a later step.
            self._broke_off |= self._step_tokens is step
            raise
        finally:
            for ffn in self.ffns:
                ffn.twell_state.l1 = None

    @property
    def in_whole_runs(self) -> float:
        """Share of this process's tokens that stood in runs of `share` tokens, not in shorter ones at a sequence's end;
        0 without any. The host waits for it."""
        whole, tokens = (0, 0) if self._in_runs is None else self._in_runs.tolist()
        return whole / max(1, tokens)

    @property
    def is_on(self) -> bool:
        """Whether a micro-batch runs."""
        return self.ffns[0].twell_state.l1 is not None

    def micro_batches(
        self, batches: Iterable[Mapping], *, scaler: torch.amp.GradScaler | None = None
    ) -> Iterator[Mapping]:
        """Yield the micro-batches of one optimizer step, each with the L1 term switched on.

        A step whose loop is left before its end is in no report, as for `micro_batch`.
        """
        if isinstance(batches, Mapping):
            raise ValueError("micro_batches takes the micro-batches of an optimizer step; put a single one into a list")
        batches = list(batches)
        self.begin_step(batches, scaler=scaler)
        for batch in batches:
            with self.micro_batch(batch):
                yield batch
        self._end_step(must_count=True)

    def end_step(self) -> StepCounts | None:
        """Count the step that has run into the next report, once; None if there was none since the last call.

        Every rank must call it alike. `begin_step` and `report` do, so only who needs the counts has to.
        """
        return self._end_step()

    def _end_step(self, *, must_count: bool = False) -> StepCounts | None:
        if self._step_tokens is None:
            return None
        for tally, row in self._rows:
            if tally.grad is not row:  # backward under create_graph has put another in its place
                tally.grad = row.copy_(tally.grad.detach())
        table = sum(table.to(self.device) for table in self._tables.values())
        if self._broke_off:  # all ranks are to know, without another exchange or waiting for the device
            table.fill_(torch.nan)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(table)
        most = max(sizes.experts or 0 for sizes in self._sizes)
        whole = table[0, most + 1].isfinite()  # a count, which is NaN for no other reason
        tokens, table = (torch.where(whole, each, 0) for each in (self._step_tokens, table))
        unions = None if self.share is None else table[:, -1]
        table = table[:, : most + 1 + max(sizes.neurons for sizes in self._sizes)]
        step = StepCounts(tokens, table[:, most:], self._sizes, unions, self.share, table[:, :most] if most else None)
        self._step_tokens = None
        for table in self._tables.values():
            table.zero_()
        if not self._checked:  # the first step alone: it waits for the device
            step.check_counted_once()
            if must_count:
                step.check_counted()
            self._checked = not self._broke_off
        self._window = step.added_to(self._window)
        self._choose_for_compiled(step)
        return step

    def report(self) -> dict | None:
        """Sparsity of all tokens since the last report, over all ranks (each must call it); None if there were none.

        Only `micro_batches` (or `begin_step` and `micro_batch`) counts: None comes back of training outside it, too,
        which has no L1 term.

        Returns:
            l0, density, l1 (means over layers), dead (share of neurons that no token activated), tokens, l1_weight
            (mean), with `share` also the union, as `union_64` (share of neurons active in at least one token of a run),
            and `layers`: the same figures, but tokens, for each sparse layer.
        """
        self.end_step()
        if self._window is None:
            return None
        window, self._window = self._window, None
        weights = self.layer_weights.tolist() if self.layer_weights is not None else [self.l1_weight] * len(self.ffns)
        return window.figures(weights)

    def _choose_for_compiled(self, step: StepCounts) -> None:
        """Blocks of a compiled model cannot choose for themselves; `ModelChoice` does it by the step's counts."""
        compiled = [
            (ffn, Block(layer, sizes.width, ffn.twell_state.step_choice))
            for layer, (ffn, sizes) in enumerate(zip(self.ffns, step.sizes, strict=True))
            if isinstance(ffn, SparseFfn) and not ffn.twell_state.step_choice.chose
        ]
        # Layers that are compiled one by one share the graph that the first was traced for.
        if not any(block.choice.traced for _, block in compiled):
            return
        for ffn, block in compiled:
            ffn.twell_state.on_kernels = block.choice.sparse or ffn.twell.backend != "auto"
        blocks = [block for ffn, block in compiled if ffn.twell.backend == "auto"]
        if not blocks:
            return
        moved = self._choice.end_step(blocks, self._batch_tokens, step.density, partial(_union_of_neighbours, step))
        if moved and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
            logger.warning(
                "blocks are so sparse now that the compiled model goes over to kernels: the next step compiles it "
                "anew, which may take a minute"
            )

    @property
    def device(self) -> torch.device:
        """Where the counts of all layers come together."""
        return self._device(self.ffns[0])

    def _make_tallies(self) -> None:
        """A block's gradient is a row of its device's table, so that all are read and set to zero at once.

        First the tokens of each expert, so that these end where L1 is, then the neurons; with `share`, the last column
        is that of the runs.
        """
        self._sizes = tuple(ffn.sizes() for ffn in self.ffns)
        most = max(sizes.experts or 0 for sizes in self._sizes)
        columns = most + 1 + max(sizes.neurons for sizes in self._sizes) + (self.share is not None)
        devices = [self._device(ffn) for ffn in self.ffns]
        self._tables = {device: torch.zeros(len(self.ffns), columns, device=device) for device in devices}
        rows = [self._tables[device][layer] for layer, device in enumerate(devices)]
        self._tallies = [
            self._tally(row[most - (sizes.experts or 0) : most + 1 + sizes.neurons])
            for row, sizes in zip(rows, self._sizes, strict=True)
        ]
        self._unions = [None if self.share is None else self._tally(row[-1:]) for row in rows]

    def _tally(self, row: torch.Tensor) -> torch.Tensor:
        tally = new_tally(len(row), row.device)
        tally.grad = row
        self._rows.append((tally, row))
        return tally

    @staticmethod
    def _device(ffn: SparseBlock) -> torch.device:
        return next(ffn.parameters()).device


def _union_of_neighbours(step: StepCounts) -> torch.Tensor | None:
    """What takes the place of the union of 128 neighbours in a compiled model's choice, (L,): that of the runs, or all
    neurons where these are too short to tell. None without runs."""
    union = step.union()
    if union is None or step.share is None or step.share >= limit("kCudaTrainingLeastRun"):
        return union
    return torch.ones_like(union)


# A function of the module, which copies and pickles of a model hold by its name.
def _warn_of_no_step(model: nn.Module, args: tuple) -> None:
    """A hook that a model has until the first step of its penalty begins."""
    if not (model.training and torch.is_grad_enabled()):
        return
    ffns = sparse_ffns(model)
    if ffns and all(ffn.twell_state.l1 is None for ffn in ffns):
        _unwatch(model)
        warnings.warn(
            f"{type(model).__name__} has an L1Penalty, but trains without the L1 term: no step was begun. Take each "
            "micro-batch from penalty.micro_batches([...]), or call begin_step and micro_batch",
            stacklevel=2,
        )


def _unwatch(model: nn.Module) -> None:
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _warn_of_no_step:
            del model._forward_pre_hooks[key]


def _check_ranks_share_no_sequence() -> None:
    if not is_accelerate_available():
        return
    from accelerate.state import AcceleratorState, is_initialized

    config = getattr(AcceleratorState(), "parallelism_config", None) if is_initialized() else None
    for name in ("cp_size", "sp_size"):
        size = getattr(config, name, 1)
        if size > 1:
            raise ValueError(
                f"accelerate's {name}={size} cuts each sequence over {size} ranks, and the L1 term would count it on "
                f"every one of them, {size} times too weak; set {name}=1 and use FSDP2 or gradient checkpointing"
            )
