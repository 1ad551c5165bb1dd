"""What is known of a block's activity in evaluation: how many neurons its recent inputs switched on.

A part of the gate's signs is counted now and then. On a CPU the call waits for that. On a GPU it is counted on the
device and sent to pinned memory, where a later call finds it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from hf_twell.dispatch.limits import limit


class Activity(NamedTuple):
    """What `choose` goes by.

    Attributes:
        density: share of (token, neuron) pairs that are active; None: not known.
        on_kernels: whether the block trains by kernels already.
        chosen: what was chosen before, for a graph: whether kernels are faster.
        union: share of neurons that at least one of kNeighbours (128) tokens activates; None: not known.
    """

    density: float | None = None
    on_kernels: bool = False
    chosen: bool | None = None
    union: float | None = None


UNKNOWN = Activity()


def union_of_neighbours(density: float, unions: Mapping[str, float | None]) -> float | None:
    """A layer's union of kNeighbours (128) tokens, by which `choose` goes: as known, or estimated by the longest run's.

    Formula: the odds o(u) = u / (1 - u) are taken to grow as a power of the number of tokens, from the density d of one
    token to the union u_n of n: o(u_128) = o(d) * (o(u_n) / o(d)) ^ (log 128 / log n).

    Over the 220 layers of eight conversions, whose neighbours share or do not (`training` in model_cards/*/rows.jsonl,
    and model_cards/smollm2/shared.jsonl), the error by the union of 64 is 1.0 point (root mean square) and at most 2.8;
    by that of 16 it is 2.9 and at most 8.3. Of routed experts, whose union is a share of those that the tokens come to,
    the estimate is too low, by up to 7.1 points by the union of 64 (model_cards/experts/rows.jsonl).

    Args:
        unions: by the number of neighbouring tokens; None: not known. One of less than 12 tokens says too little: more
            than half of the way to 128, in its logarithm, would be guessed.
    """
    wanted = limit("kNeighbours")
    known = {int(run): union for run, union in unions.items() if union is not None}
    if not known or wanted in known:
        return known.get(wanted)
    run = max(known)
    union = known[run]
    if run**2 < wanted:
        return None
    if not 0 < density < union < 1:  # all tokens alike, all neurons, or none
        return union
    log_odds, end = (math.log(share / (1 - share)) for share in (density, union))
    log_odds += (end - log_odds) * math.log(wanted) / math.log(run)
    return 1 / (1 + math.exp(-log_odds))


def stored_activity(density: Sequence[float], unions: Mapping[str, Sequence[float]] | None) -> list[Activity]:
    """What `choose` gets to know of each block from a config's `twell` entry."""
    of_blocks = [{run: of[block] for run, of in (unions or {}).items()} for block in range(len(density))]
    pairs = zip(density, of_blocks, strict=True)
    return [Activity(share, union=union_of_neighbours(share, of_block)) for share, of_block in pairs]


class Sample:
    """A tensor's values on their way from the device."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._event = values, None
        if values.is_cuda:
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values = pinned.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))

    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def values(self) -> Any:
        """A number or nested lists of them; waits for them, if they have not arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


class RecentInputs:
    """The density of one block's recent inputs, and their union where that decides. Copies and pickles start anew.

    Attributes:
        density: by the latest sample that has arrived; None before the first.
        union: by the latest sample of kNeighbours tokens, on a CPU only of one that asked for it; None before that.
        wants_runs: whether the latest sample was of fewer tokens, so that the next call with so many looks again.
        look_in: how many calls may pass before the next has to look; 0 while a sample is on its way.
    """

    def __init__(self) -> None:
        self.density: float | None = None
        self.union: float | None = None
        self.look_in = 0
        self._sample: Sample | None = None
        self.wants_runs = True

    def __reduce__(self) -> tuple:
        return type(self), ()

    def look(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        calls: int = 1,
        asks_union: Callable[[float], bool] | None = None,
    ) -> bool:
        """Count a call, and sample its activity or read a sample if that is due; whether what is known is new.

        Args:
            weight, bias, scale: of the projection whose sign says which neurons are active; see `active_share`.
            calls: for how many it counts, see `hf_twell.dispatch.choose.sample_weight`.
            asks_union: whether at such a density a CPU's call goes by its union.
        """
        if x.numel() == 0 or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        self.look_in -= calls
        has_runs, kind = x.numel() >= limit("kNeighbours") * x.shape[-1], "Cpu" if x.is_cpu else "Cuda"
        if self.look_in >= 0 and self.density is not None and not (has_runs and self.wants_runs):
            return False
        sample = self._sample  # by this name, as another thread may read it meanwhile
        if sample is None:
            self.wants_runs = not has_runs
            if has_runs and not x.is_cpu:
                shares = shares_of_runs(x, weight, bias, scale)
            else:
                shares = active_share(x, weight, bias, scale, kind)
            sample = self._sample = Sample(shares)
        self.look_in = 0
        if not sample.arrived():
            return False
        shares, self._sample = sample.values(), None
        if isinstance(shares, list):
            self.density, self.union = shares
        elif x.is_cpu and has_runs:
            self.density, self.union = shares, None
            if asks_union is not None and asks_union(shares):
                self.union = shares_of_runs(x, weight, bias, scale, kind)[1].item()
        else:
            self.density = shares
            if self.union is not None and self.union < shares:
                self.union = None  # it was of other inputs
        self.look_in = limit(f"k{kind}SampleCalls") - 1
        return True


class RecentPairs:
    """The density of a layer's routed experts in recent calls. Copies and pickles start anew.

    Attributes:
        density: by the latest sample that has arrived; None before the first.
    """

    def __init__(self) -> None:
        self.density: float | None = None
        self._look_in = 0
        self._sample: Sample | None = None

    def __reduce__(self) -> tuple:
        return type(self), ()

    def look(self, tokens: int, routing: Callable[[], tuple], w_gate_up: torch.Tensor) -> None:
        """Count a call of so many tokens, and sample some of its pairs if that is due.

        Args:
            routing: gives x, index and more as `hf_twell.ops.experts` has them.
        """
        if w_gate_up.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._look_in -= -(-tokens // limit("kCpuSampleCallTokens"))
        if self._look_in >= 0:
            return
        if self._sample is None:
            x, index, *_ = routing()
            if x.ndim > index.ndim:  # each pair has its own
                x, index = x.flatten(0, 1), index.view(-1, 1)
            pairs = _spread(index.numel(), limit("kCpuSampleTokens"), index.device)
            width = w_gate_up.shape[1] // 2
            some = w_gate_up[:, : width : max(1, width // limit("kCpuSampleExpertNeurons"))][index.flatten()[pairs]]
            rows = x[pairs // index.shape[1]].to(some.dtype)
            self._sample = Sample((torch.bmm(some, rows.unsqueeze(2)) > 0).float().mean())
        if self._sample.arrived():
            self.density, self._sample = self._sample.values(), None
            self._look_in = limit("kCpuSampleCalls") - 1


@torch.no_grad()
def active_share(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    b_gate: torch.Tensor | None = None,
    s_gate: torch.Tensor | None = None,
    kind: str = "Cpu",
) -> torch.Tensor:
    """Share of active pairs, (), in a sample, of tokens and neurons as on a "Cpu" or with "Cuda".

    Shapes:
        x (..., D); w_gate (F, D); b_gate (F,) or None; s_gate (F, 1), the scales of an 8-bit w_gate, or None.
    """
    x_TD = x.reshape(-1, x.shape[-1])
    some = x_TD[_spread(len(x_TD), limit(f"k{kind}SampleTokens"), x.device)]
    return _active(some, w_gate, b_gate, s_gate, kind).float().mean()


@torch.no_grad()
def shares_of_runs(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    b_gate: torch.Tensor | None = None,
    s_gate: torch.Tensor | None = None,
    kind: str = "Cuda",
) -> torch.Tensor:
    """Density and union, (2,), of a run of neighbours ("Cpu") or of two ("Cuda"), where kernels have their blocks.

    As many strangers say no more of the density than that: what two neighbours share costs a sample less than tokens
    add to it. Shapes: as `active_share`, x of kNeighbours tokens at least.
    """
    x_TD, run = x.reshape(-1, x.shape[-1]), limit("kNeighbours")
    runs, wanted = len(x_TD) // run, 1 if kind == "Cpu" else limit("kCudaSampleRuns")
    x_RND = x_TD[: runs * run].unflatten(0, (runs, run))[_spread(runs, wanted, x.device)]
    active_RNF = _active(x_RND, w_gate, b_gate, s_gate, kind)
    return torch.stack([active_RNF.float().mean(), active_RNF.any(1).float().mean()])


def _spread(total: int, wanted: int, device: torch.device) -> torch.Tensor:
    """Up to so many of `total` places, spread by the golden ratio.

    An even stride can meet one position of every sequence, and first ones are densest; or one kind of neurons.
    """
    stride = next(n for n in range(max(1, round(0.618 * total)), 2 * total + 1) if math.gcd(n, total) == 1)
    return torch.arange(1, min(wanted, total) + 1, device=device) * stride % total


def _active(
    some: torch.Tensor, w_gate: torch.Tensor, b_gate: torch.Tensor | None, s_gate: torch.Tensor | None, kind: str
) -> torch.Tensor:
    """Which of a sample's neurons, or of all, these tokens activate."""
    neurons = limit(f"k{kind}SampleNeurons")
    kept = _spread(len(w_gate), neurons, w_gate.device) if neurons < len(w_gate) else slice(None)
    weight, bias = w_gate[kept], None if b_gate is None else b_gate[kept]
    if s_gate is not None:
        weight = (weight.float() * s_gate[kept]).to(some.dtype)
    return F.linear(some, weight, bias) > 0
