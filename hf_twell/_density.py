"""Whether a block on a GPU is too dense for its kernels to pay: known without waiting for the device.

Now and then a sample of the gate's signs is counted on the device and sent to pinned memory, where a later call finds
it. In evaluation the latest that has arrived counts at once, in training from the next optimizer step on. In compiled
training, where no block can sample, all follow together what the L1 term counts.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

EVERY = 64  # calls in evaluation between two samples
STEPS = 8  # optimizer steps between two samples
SAMPLE_TOKENS, SAMPLE_NEURONS = 64, 1024
# (tokens up to, density up to which the kernels win where a matrix has fewer elements than the first of SIZES, than the
# second, and in larger ones): between measured densities, see kernels/twell_cuda/NOTES.md.
SIZES = (12 << 20, 20 << 20)
LIMITS = (
    (2, 1.0, 1.0, 0.55),
    (4, 1.0, 0.3, 0.4),
    (8, 1.0, 0.18, 0.2),
    (16, 1.0, 1.0, 0.09),
    (32, 1.0, 1.0, 0.06),
    (64, 1.0, 1.0, 0.035),
    *((most, limit, limit, limit) for most, limit in ((512, 0.012), (1024, 0.018), (2048, 0.04), (math.inf, 0.06))),
)
# The same of forward and backward; 0: never.
LIMITS_TRAINING = ((1024, 0.0), (2048, 0.008), (8192, 0.018), (math.inf, 0.025))
BACK = 1.1  # times that limit: above it, a block in training goes back to plain matmuls
MOST = 2.0  # times that limit: what a block of a compiled model counts for at most, however dense it is
ROOM = 1.25  # times the active neurons: a compiled model keeps a capacity that holds so many


def max_density(tokens: int, elements: int) -> float:
    """Density up to which the CUDA kernels are faster than plain matmuls in evaluation, as measured.

    Args:
        elements: of one of the block's matrices.
    """
    larger_than = sum(elements >= size for size in SIZES)
    return next(limits[larger_than] for most, *limits in LIMITS if tokens <= most)


def needed_capacity(density: float, intermediate: int) -> int:
    """The power of two from 64 on, or F, that holds one and a half times the active neurons per token."""
    needed = max(64, round(1.5 * density * intermediate))
    return min(intermediate, 1 << (needed - 1).bit_length())


def limit_training(tokens: int, sparse: bool) -> float:
    """Density below which a block trains by the kernels, which is higher where it does so already."""
    limit = next(limit for most, limit in LIMITS_TRAINING if tokens <= most)
    return limit * (BACK if sparse else 1.0)


class Sample:
    """A tensor's values on their way from the device."""

    def __init__(self, values):
        self._values, self._event = values, None
        if values.is_cuda:
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values = pinned.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))

    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def values(self):
        """A number or nested lists of them; waits for them, if they have not arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


@torch.no_grad()
def active_share(x, w_gate, b_gate, tokens: int, neurons: int) -> torch.Tensor:
    """Share of active pairs, (), among at most so many of x's tokens and about so many of the neurons."""
    x_TD = x.reshape(-1, x.shape[-1])
    # Spread by the golden ratio: an even stride can meet one position of every sequence, and first ones are densest.
    total = len(x_TD)
    stride = next(n for n in range(max(1, round(0.618 * total)), 2 * total + 1) if math.gcd(n, total) == 1)
    some = x_TD[torch.arange(1, min(tokens, total) + 1, device=x.device) * stride % total]
    kept = slice(None, None, max(1, len(w_gate) // neurons))
    gate = torch.nn.functional.linear(some, w_gate[kept], None if b_gate is None else b_gate[kept])
    return (gate > 0).float().mean()


def sample_density(x, w_gate, b_gate=None) -> Sample:
    """The share of active pairs among some of x's tokens and of the neurons."""
    return Sample(active_share(x, w_gate, b_gate, SAMPLE_TOKENS, SAMPLE_NEURONS))


class DensityWatch:
    """The density of one block's recent inputs in evaluation. Copies and pickles start anew."""

    def __init__(self):
        self.density = None
        self._calls = 0
        self._sample: Sample | None = None

    def __reduce__(self):
        return type(self), ()

    def too_dense(self, x, w_gate, b_gate=None) -> bool:
        """Whether plain matmuls would be faster for x, by the latest sample that has arrived.

        In deterministic mode always False: what has arrived depends on timing, and the two ways round differently.
        """
        if torch.are_deterministic_algorithms_enabled() or x.numel() == 0:
            return False
        if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            if self._sample is not None and self._sample.arrived():
                self.density, self._sample = self._sample.values(), None
            if self._calls % EVERY == 0 and self._sample is None:
                self._sample = sample_density(x, w_gate, b_gate)
            self._calls += 1
        tokens = x.numel() // x.shape[-1]
        return self.density is not None and self.density > max_density(tokens, w_gate.numel())


class TrainingChoice:
    """How one block trains: by plain matmuls, or by kernels that keep so much. Copies and pickles start anew.

    It changes only between optimizer steps, so that every micro-batch of a step and every recomputation of a checkpoint
    goes the way that the first forward went. A step shows in the version of the gate's weight, which autograd forbids
    to change between forward and backward. Where it does not show (frozen weights; fused optimizers, FSDP2 and
    DeepSpeed write past the version) `begin_step` tells of it, as `L1Penalty` does; else nothing changes.

    Attributes:
        density: by the latest sample; None until one has arrived, and until then training is dense.
        capacity: what the kernels' state is sized for, see `hf_twell.ops.ffn`; None for the default.
        sparse: whether the kernels pay at the size of the step's first micro-batch.
        traced: whether it was read for a compiled graph, which keeps it: there, `ModelChoice` sets it for all blocks.
    """

    def __init__(self):
        self.density: float | None = None
        self.capacity: int | None = None
        self.sparse = False
        self.traced = False
        self._version: int | None = None  # of the step that runs
        self._steps = 0
        self._sample: Sample | None = None

    def __reduce__(self):
        return type(self), ()

    def begin_step(self) -> None:
        """Say that an optimizer step begins: the next forward may choose anew."""
        self._version = None

    @property
    def chose(self) -> bool:
        """Whether a forward of this step chose: one that is not compiled."""
        return self._version is not None

    def too_dense(self, x, w_gate, b_gate=None) -> bool:
        """Whether plain matmuls would be faster for x, forward and backward.

        A compiled graph has the choice that stands when it is traced, and is made anew when that changes. In
        deterministic mode each sample counts from the step after it on, and that step waits for it; else from the first
        step on that finds it arrived.
        """
        if torch.compiler.is_compiling():
            self._note_trace()
            return not self.sparse
        if x.numel() == 0:
            return not self.sparse
        tokens = x.numel() // x.shape[-1]
        if w_gate._version != self._version and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._version = w_gate._version
            self._choose(tokens, x, w_gate, b_gate)
        return self.density is None or self.density >= limit_training(tokens, self.sparse)

    @torch.compiler.assume_constant_result  # runs while a graph is traced: a checkpointed block may assign nothing
    def _note_trace(self) -> bool:
        self.traced = True
        return True

    def _choose(self, tokens, x, w_gate, b_gate):
        waits = torch.are_deterministic_algorithms_enabled()
        if self._sample is not None and (waits or self._sample.arrived()):
            self.density, self._sample = self._sample.values(), None
            self.capacity = needed_capacity(self.density, len(w_gate))
        if self._sample is None and self._steps % STEPS == 0:
            self._sample = sample_density(x, w_gate, b_gate)
        self._steps += 1
        self.sparse = self.density is not None and self.density < limit_training(tokens, self.sparse)


class Block(NamedTuple):
    """A block of a compiled model: its place among the layers that are counted, F, and its choice."""

    layer: int
    width: int
    choice: TrainingChoice


class ModelChoice:
    """How the blocks of a compiled model train: all in one way, since each change compiles the whole model anew.

    They go to the kernels where the mean of their densities is below the limit, because time by kernels is linear up to
    there. Beyond, it is soon that of plain matmuls and no more (16,384 tokens: 2 % more at a density of 10 %), so that
    a very dense block counts little. A capacity stays while it fits, and only grows; ways that were gone before need no
    compiling. The figures of a step decide at the end of the next one, which waits for them in every mode: the device
    still has that step to do, and all ranks change together.
    """

    def __init__(self):
        self._steps = 0
        self._seen: tuple[list[Block], float, Sample] | None = None

    def end_step(self, blocks: list[Block], tokens: float, density: Callable[[], torch.Tensor]) -> None:
        """Take in a step that has run; the next one may go another way.

        Args:
            blocks: the compiled ones.
            tokens: of a micro-batch on this rank.
            density: gives that of every layer in this step, (L,), on any device; called in some steps only.
        """
        if self._seen is not None:
            seen, self._seen = self._seen, None
            _choose_together(*seen)
        if self._steps % STEPS == 0:
            self._seen = blocks, tokens, Sample(density())
        self._steps += 1


def _choose_together(blocks, tokens, sample):
    densities = sample.values()
    seen = [(block.choice, densities[block.layer], block.width) for block in blocks]
    limit = limit_training(tokens, all(choice.sparse for choice, _, _ in seen))
    sparse = sum(min(density, MOST * limit) for _, density, _ in seen) / len(seen) < limit
    fit = all((choice.capacity or 0) >= ROOM * density * width for choice, density, width in seen)
    for choice, density, width in seen:
        choice.density, choice.sparse = density, sparse
        if sparse and not fit:  # all of them, so that rising densities compile seldom
            choice.capacity = max(choice.capacity or 0, needed_capacity(density, width))
