"""Whether a block on a GPU is too dense for its kernels to pay: known without waiting for the device.

Now and then a sample of the gate's signs is counted on the device and sent to pinned memory, where a later call finds
it. Evaluation follows the latest that has arrived at once, training from the next optimizer step on. Blocks of a
compiled model cannot sample: in training, all of them together follow what the L1 term counts.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from hf_twell.ops import policy, policy_cuda
from hf_twell.ops.sampling import active_share

SAMPLE_EVERY_CALLS = 64  # in evaluation
SAMPLE_EVERY_STEPS = 8  # of the optimizer, in training
SAMPLE_TOKENS, SAMPLE_NEURONS = 64, 1024
MOST = 2.0  # times the limit: what a block of a compiled model counts for at most, however dense it is
ROOM = 1.25  # times the active neurons: a compiled model keeps a capacity that holds so many


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


def sample_density(x, w_gate, b_gate=None, s_gate=None) -> Sample:
    """The share of active pairs among some of x's tokens and of the neurons."""
    return Sample(active_share(x, w_gate, b_gate, SAMPLE_TOKENS, SAMPLE_NEURONS, s_gate))


class DensityWatch:
    """Which way one block goes in evaluation, by the density of its recent inputs. Copies and pickles start anew."""

    def __init__(self):
        self.density = None
        self._calls = 0
        self._sample: Sample | None = None

    def __reduce__(self):
        return type(self), ()

    def too_dense(self, x, w_gate, b_gate=None, s_gate=None) -> bool:
        """Whether plain matmuls would be faster for x, by the latest sample that has arrived.

        In deterministic mode always False: what has arrived depends on timing, and the two ways round differently.
        """
        if torch.are_deterministic_algorithms_enabled() or x.numel() == 0:
            return False
        if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            if self._sample is not None and self._sample.arrived():
                self.density, self._sample = self._sample.values(), None
            if self._calls % SAMPLE_EVERY_CALLS == 0 and self._sample is None:
                self._sample = sample_density(x, w_gate, b_gate, s_gate)
            self._calls += 1
        if self.density is None:
            return False
        tokens = x.numel() // x.shape[-1]
        return not policy.takes_kernels(tokens, w_gate.numel(), x.dtype, "cuda", self.density)


class TrainingChoice:
    """How one block trains: by plain matmuls, or by kernels that keep so much. Copies and pickles start anew.

    It changes only between optimizer steps, so that every micro-batch of a step and every recomputation of a checkpoint
    goes the way that the first forward went. A new step is recognized by the version counter of the gate's weight,
    which autograd forbids to change between forward and backward. Where the counter stays (frozen weights; fused
    optimizers, FSDP2 and DeepSpeed write past it) somebody must call `begin_step`, as `L1Penalty` does; else the choice
    never changes.

    Attributes:
        density: by the latest sample; None until one has arrived, and until then training is dense.
        capacity: what the kernels' state is sized for, see `hf_twell.ops.ffn`; None for the default.
        sparse: whether the kernels pay at the size of the step's first micro-batch.
        traced: whether a compiled graph was made by it: from then on `ModelChoice` sets it, for all blocks at once.
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

        A compiled graph has the choice that stands when it is traced, and is made anew when that changes. A sample
        counts from the first step on that finds it arrived; in deterministic mode the next step waits for it.
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
        return not self._pays(tokens, x, w_gate)

    @torch.compiler.assume_constant_result  # runs while a graph is traced: a checkpointed block may assign nothing
    def _note_trace(self) -> bool:
        self.traced = True
        return True

    def _choose(self, tokens, x, w_gate, b_gate):
        waits = torch.are_deterministic_algorithms_enabled()
        if self._sample is not None and (waits or self._sample.arrived()):
            self.density, self._sample = self._sample.values(), None
            self.capacity = policy_cuda.needed_capacity(self.density, len(w_gate))
        if self._sample is None and self._steps % SAMPLE_EVERY_STEPS == 0:
            self._sample = sample_density(x, w_gate, b_gate)
        self._steps += 1
        self.sparse = self._pays(tokens, x, w_gate)

    def _pays(self, tokens, x, w_gate) -> bool:
        if self.density is None:
            return False
        shape = tokens, w_gate.numel(), x.dtype
        return policy.takes_kernels(*shape, "cuda", self.density, training=True, by_kernels=self.sparse)


class Block(NamedTuple):
    """A block of a compiled model: its place among the layers that are counted, F, and its choice."""

    layer: int
    width: int
    choice: TrainingChoice


class ModelChoice:
    """How the blocks of a compiled model train: all in one way, since each change compiles the whole model anew.

    They go to the kernels where the mean of their densities is below the limit, because the kernels' time grows
    linearly with density up to there. In denser blocks it soon stays at about that of plain matmuls (16,384 tokens: 2 %
    above it at a density of 10 %), so that each counts for `MOST` times the limit at most. Capacities only grow, and
    only when one is too small. A way that was gone before is not compiled again. The figures of a step decide at the
    end of the next one, which waits for them in every mode: the device still has that step to do, and all ranks change
    together.
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
        if self._steps % SAMPLE_EVERY_STEPS == 0:
            self._seen = blocks, tokens, Sample(density())
        self._steps += 1


def _choose_together(blocks, tokens, sample):
    densities = sample.values()
    seen = [(block.choice, densities[block.layer], block.width) for block in blocks]
    limit = policy_cuda.max_density_training(tokens, all(choice.sparse for choice, _, _ in seen))
    sparse = sum(min(density, MOST * limit) for _, density, _ in seen) / len(seen) < limit
    fit = all((choice.capacity or 0) >= ROOM * density * width for choice, density, width in seen)
    for choice, density, width in seen:
        choice.density, choice.sparse = density, sparse
        if sparse and not fit:  # the capacities of all blocks, so that rising densities seldom compile anew
            choice.capacity = max(choice.capacity or 0, policy_cuda.needed_capacity(density, width))
