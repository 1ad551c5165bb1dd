"""How blocks train: by plain matmuls or by kernels, which on a GPU changes only between optimizer steps.

There an eager block samples its density as in evaluation. The blocks of a compiled model cannot sample: all of them
together follow what the L1 term counts.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from hf_twell.dispatch.activity import UNKNOWN, Activity, Sample, active_share, shares_of_runs
from hf_twell.dispatch.choose import columns_pay, faster, max_density
from hf_twell.dispatch.constant import assume_constant_result
from hf_twell.dispatch.key import HOPPER, CallKey
from hf_twell.dispatch.limits import limit


def sampled_on_cpu(key: CallKey, x: torch.Tensor, w_gate: torch.Tensor, b_gate: torch.Tensor | None) -> Activity:
    """What `choose` goes by in an eager call that trains on a CPU, each of which is sampled; else nothing.

    Kernels' forward would follow the density itself, but its backward computes again what plain matmuls keep. Equal
    inputs get equal answers: a checkpoint's forward without gradients goes as its recomputation.
    """
    if key.device != "cpu" or key.asked or key.compiled or x.numel() == 0:
        return UNKNOWN
    return Activity(active_share(x, w_gate, b_gate).item())


class TrainingChoice:
    """How one block trains: by plain matmuls, or by kernels that keep so much. Copies and pickles start anew.

    It changes only between optimizer steps, so that every micro-batch of a step and every recomputation of a checkpoint
    goes the way that the first forward went. A new step is recognized by the version counter of the gate's weight,
    which autograd forbids to change between forward and backward. Where the counter stays (frozen weights; fused
    optimizers, FSDP2 and DeepSpeed write past it) somebody must call `begin_step`, as `L1Penalty` does; else the choice
    never changes.

    Attributes:
        density: by the latest sample; None until one has arrived, and until then training is dense.
        union: by the latest sample, if it was of at least kNeighbours tokens; else None.
        capacity: what the kernels' state is sized for where no runs of tokens count, see `hf_twell.ops.ffn`; None for
            the default.
        sparse: whether the kernels pay at the size of the step's first micro-batch.
        traced: whether a compiled graph was made by it: from then on `ModelChoice` sets it, for all blocks at once.
    """

    def __init__(self) -> None:
        self.density: float | None = None
        self.union: float | None = None
        self.capacity: int | None = None
        self.sparse = False
        self.traced = False
        self._version: int | None = None  # of the step that runs
        self._steps = 0
        self._sample: Sample | None = None

    def __reduce__(self) -> tuple:
        return type(self), ()

    def begin_step(self) -> None:
        """Say that an optimizer step begins: the next forward may choose anew."""
        self._version = None

    @property
    def chose(self) -> bool:
        """Whether a forward of this step chose: one that is not compiled."""
        return self._version is not None

    def activity(
        self, key: CallKey, x: torch.Tensor, w_gate: torch.Tensor, b_gate: torch.Tensor | None = None
    ) -> Activity:
        """What `choose` goes by, forward and backward.

        A compiled graph has the choice that stands when it is traced, and is made anew when that changes. A sample
        counts from the first step on that finds it arrived; in deterministic mode the next step waits for it.
        """
        if key.compiled:
            self._note_trace()
        if key.compiled or x.numel() == 0:
            return Activity(chosen=self.sparse)
        if w_gate._version != self._version and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._version = w_gate._version
            self._choose(key, x, w_gate, b_gate)
        return self._known()

    @assume_constant_result  # runs while a graph is traced: a checkpointed block may assign nothing
    def _note_trace(self) -> bool:
        self.traced = True
        return True

    def _choose(self, key, x, w_gate, b_gate):
        waits = torch.are_deterministic_algorithms_enabled()
        if self._sample is not None and (waits or self._sample.arrived()):
            shares, self._sample = self._sample.values(), None
            self.density, self.union = shares if isinstance(shares, list) else (shares, None)
            width = len(w_gate)
            self.capacity = width if columns_pay(key, self._known()) else needed_capacity(self.density, width)
        if self._sample is None and self._steps % limit("kCudaSampleSteps") == 0:
            if x.numel() >= limit("kNeighbours") * x.shape[-1]:
                self._sample = Sample(shares_of_runs(x, w_gate, b_gate))
            else:
                self._sample = Sample(active_share(x, w_gate, b_gate, kind="Cuda"))
        self._steps += 1
        self.sparse = faster(key, self._known())

    def _known(self) -> Activity:
        return Activity(1.0 if self.density is None else self.density, on_kernels=self.sparse, union=self.union)


class Block(NamedTuple):
    """A block of a compiled model: its place among the layers that are counted, F, and its choice."""

    layer: int
    width: int
    choice: TrainingChoice


class ModelChoice:
    """How the blocks of a compiled model train: all in one way, since each change compiles the whole model anew.

    They go to the kernels where the mean of their densities is below the limit, because the kernels' time grows
    linearly with density up to there. In denser blocks it soon stays at about that of plain matmuls (16,384 tokens: 2 %
    above it at a density of 10 %), so that each counts for a few times the limit at most. Capacities only grow, and
    only when one is too small. A way that was gone before is not compiled again. The figures of a step decide at the
    end of the next one, which waits for them in every mode: the device still has that step to do, and all ranks change
    together.

    Where runs of tokens count, the mean of the blocks' unions decides instead, of runs as they count, and capacities
    stay as they are.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._moved = False
        self._seen: tuple[list[Block], float, Sample] | None = None

    def end_step(
        self,
        blocks: list[Block],
        tokens: float,
        density: Callable[[], torch.Tensor],
        union: Callable[[], torch.Tensor | None] = lambda: None,
    ) -> bool:
        """Take in a step that has run; the next one may go another way. Whether it is the first to go to the kernels.

        Args:
            blocks: the compiled ones.
            tokens: of a micro-batch on this rank.
            density: gives that of every layer in this step, (L,), on any device; called in some steps only.
            union: gives that of runs, likewise; None where no runs count.
        """
        moved = False
        if self._seen is not None:
            seen, self._seen = self._seen, None
            moved = _choose_together(*seen) and not self._moved
            self._moved |= moved
        if self._steps % limit("kCudaSampleSteps") == 0:
            shares = [share for share in (density(), union()) if share is not None]
            self._seen = blocks, tokens, Sample(torch.stack(shares))
        self._steps += 1
        return moved


def _choose_together(blocks: list[Block], tokens: float, sample: Sample) -> bool:
    densities, *unions = sample.values()
    seen = [(block.choice, densities[block.layer], block.width) for block in blocks]
    # Sizes make no difference in training on a GPU, nor does the type.
    key = CallKey("cuda", HOPPER, torch.bfloat16, torch.bfloat16, int(tokens), 0, 0, training=True, runs=bool(unions))
    on_kernels = all(choice.sparse for choice, _, _ in seen)
    counted = limit("kCudaTrainingCounts") * max_density(key, on_kernels)
    mean = sum(min(density, counted) for _, density, _ in seen) / len(seen)
    union = sum(unions[0][block.layer] for block in blocks) / len(blocks) if unions else None
    sparse = faster(key, Activity(mean, on_kernels, union=union))
    room = limit("kCudaCapacityTight")
    fit = bool(unions) or all((choice.capacity or 0) >= room * density * width for choice, density, width in seen)
    for choice, density, width in seen:
        choice.density, choice.sparse = density, sparse
        if sparse and not fit:  # the capacities of all blocks, so that rising densities seldom compile anew
            choice.capacity = max(choice.capacity or 0, needed_capacity(density, width))
    return sparse


# How many active neurons per token, on average, forward keeps for backward


def saved_capacity(device: str, intermediate: int) -> int:
    """By default."""
    if device != "cuda":
        return min(intermediate, max(limit("kCpuMinCapacity"), intermediate // limit("kCpuCapacityShare")))
    step = limit("kCudaCapacityStep")
    lists = -(-(intermediate // limit("kCudaCapacityShare")) // step)
    return min(intermediate, max(limit("kCudaMinCapacity"), lists * step))


def needed_capacity(density: float, intermediate: int) -> int:
    """On a GPU, in training at this density: a power of two with some room, or F."""
    needed = max(limit("kCudaMinCapacity"), round(limit("kCudaCapacityRoom") * density * intermediate))
    return min(intermediate, 1 << (needed - 1).bit_length())
