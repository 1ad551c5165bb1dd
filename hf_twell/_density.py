"""Whether a block on a GPU is too dense for its kernels to pay: known without ever waiting for the device.

Now and then a sample of the gate's signs is counted on the device and sent to pinned memory, where a later call finds
it.
"""

import torch

EVERY = 64  # calls between two samples
SAMPLE_TOKENS, SAMPLE_NEURONS = 64, 1024
# (tokens up to, density up to which the kernels win); measured, see kernels/twell_cuda/NOTES.md.
LIMITS = ((2, 1.0), (16, 0.12), (64, 0.01), (384, 0.0), (1024, 0.02), (2048, 0.04), (float("inf"), 0.06))


def max_density(tokens: int) -> float:
    """Density up to which the CUDA kernels are faster in evaluation than plain matmuls, as measured."""
    return next(limit for most, limit in LIMITS if tokens <= most)


class DensityWatch:
    """The density of one block's recent inputs in evaluation. Copies and pickles start anew."""

    def __init__(self):
        self.density = None
        self._calls = 0
        self._sent = None  # (pinned tensor, event) while a sample is under way

    def __reduce__(self):
        return DensityWatch, ()

    def too_dense(self, x, w_gate, b_gate=None) -> bool:
        """Whether plain matmuls would be faster for x, by the latest sample that has arrived.

        In deterministic mode always False: what has arrived depends on timing, and the two ways round differently.
        """
        if torch.are_deterministic_algorithms_enabled() or x.numel() == 0:
            return False
        if not torch.cuda.is_current_stream_capturing():
            self._receive()
            if self._calls % EVERY == 0 and self._sent is None:
                self._send(x, w_gate, b_gate)
            self._calls += 1
        tokens = x.numel() // x.shape[-1]
        return self.density is not None and self.density > max_density(tokens)

    def _receive(self):
        if self._sent is not None and self._sent[1].query():
            self.density = self._sent[0].item()
            self._sent = None

    @torch.no_grad()
    def _send(self, x, w_gate, b_gate):
        x_TD = x.reshape(-1, x.shape[-1])
        tokens = x_TD[:: max(1, len(x_TD) // SAMPLE_TOKENS)][:SAMPLE_TOKENS]
        neurons = slice(None, None, max(1, len(w_gate) // SAMPLE_NEURONS))
        gate = torch.nn.functional.linear(tokens, w_gate[neurons], None if b_gate is None else b_gate[neurons])
        arrived = torch.empty((), dtype=torch.float32, pin_memory=True)
        arrived.copy_((gate > 0).float().mean(), non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(x.device))
        self._sent = (arrived, event)
