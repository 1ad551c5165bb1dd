"""Whether a block on a GPU is too dense for its kernels to pay: known without waiting for the device.

Now and then a sample of the gate's signs is counted on the device and sent to pinned memory, where a later call finds
it. In evaluation the latest that has arrived counts at once, in training from the next optimizer step on.
"""

import torch

from hf_twell import ops

EVERY = 64  # calls in evaluation between two samples
STEPS = 8  # optimizer steps between two samples
SAMPLE_TOKENS, SAMPLE_NEURONS = 64, 1024
# (tokens up to, density up to which the kernels win): between measured densities, see kernels/twell_cuda/NOTES.md.
LIMITS = (
    *((2, 1.0), (16, 0.12), (32, 0.08), (64, 0.035), (256, 0.012), (512, 0.0)),
    *((1024, 0.015), (2048, 0.04), (float("inf"), 0.06)),
)
# The same of forward and backward; 0: never.
LIMITS_TRAINING = ((1024, 0.0), (2048, 0.008), (8192, 0.013), (float("inf"), 0.017))
BACK = 1.25  # times that limit: above it, a block in training goes back to plain matmuls


def max_density(tokens: int, limits=None) -> float:
    """Density up to which the CUDA kernels are faster than plain matmuls, as measured; by default in evaluation."""
    return next(limit for most, limit in limits or LIMITS if tokens <= most)


def needed_capacity(density: float, intermediate: int) -> int:
    """The power of two from 64 on, or F, that holds twice the active neurons per token."""
    twice = max(64, round(2 * density * intermediate))
    return min(intermediate, 1 << (twice - 1).bit_length())


class Sample:
    """The share of active pairs among some of x's tokens and of the neurons, on its way from the device."""

    def __init__(self, x, w_gate, b_gate=None):
        self._share, self._event = ops.active_share(x, w_gate, b_gate, SAMPLE_TOKENS, SAMPLE_NEURONS), None
        if x.is_cuda:
            self._share = torch.empty((), dtype=torch.float32, pin_memory=True).copy_(self._share, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(x.device))

    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def density(self) -> float:
        """Waits for it, if it has not arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._share.item()


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
        if not torch.cuda.is_current_stream_capturing():
            if self._sample is not None and self._sample.arrived():
                self.density, self._sample = self._sample.density(), None
            if self._calls % EVERY == 0 and self._sample is None:
                self._sample = Sample(x, w_gate, b_gate)
            self._calls += 1
        tokens = x.numel() // x.shape[-1]
        return self.density is not None and self.density > max_density(tokens)


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
    """

    def __init__(self):
        self.density: float | None = None
        self.capacity: int | None = None
        self.sparse = False
        self._version: int | None = None  # of the step that runs
        self._steps = 0
        self._sample: Sample | None = None

    def __reduce__(self):
        return type(self), ()

    def begin_step(self) -> None:
        """Say that an optimizer step begins: the next forward may choose anew."""
        self._version = None

    def too_dense(self, x, w_gate, b_gate=None) -> bool:
        """Whether plain matmuls would be faster for x, forward and backward.

        A compiled graph keeps the choice that stood when it was traced. In deterministic mode each sample counts from
        the step after it on, and that step waits for it; else from the first step on that finds it arrived.
        """
        if torch.compiler.is_compiling() or x.numel() == 0:
            return not self.sparse
        tokens = x.numel() // x.shape[-1]
        if w_gate._version != self._version and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._version = w_gate._version
            self._choose(tokens, x, w_gate, b_gate)
        return self.density is None or self.density >= self._limit(tokens)

    def _choose(self, tokens, x, w_gate, b_gate):
        waits = torch.are_deterministic_algorithms_enabled()
        if self._sample is not None and (waits or self._sample.arrived()):
            self.density, self._sample = self._sample.density(), None
            self.capacity = needed_capacity(self.density, len(w_gate))
        if self._sample is None and self._steps % STEPS == 0:
            self._sample = Sample(x, w_gate, b_gate)
        self._steps += 1
        self.sparse = self.density is not None and self.density < self._limit(tokens)

    def _limit(self, tokens: int) -> float:
        return max_density(tokens, LIMITS_TRAINING) * (BACK if self.sparse else 1.0)
