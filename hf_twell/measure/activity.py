"""What one feed-forward block's neurons do, gathered in one pass over h in memory that does not grow with the text."""

import math
from typing import Any

import torch

from hf_twell.ops.reference import long_sum_dtype

RUNS = (16, 64, 128)  # tokens; each a multiple of the one before
SHARES = (0.01, 0.05, 0.10)  # of a token's |h|: its strongest neurons
HOTTEST = (0.01, 0.05, 0.10, 0.25, 0.50)  # of all firings: the neurons that fire most often
QUANTILES = (0.01, 0.10, 0.50, 0.90, 0.99)
SAMPLE_EVERY = 61  # tokens; sorting every token's |h| would cost as much as the block itself
_LANE_BYTES = 1024  # neurons are padded to this, so that sums of 128 words of 8 byte-wide counters stay below 256


class LayerActivity:
    """Counts for one block of F neurons, on the device where h is. Shapes: h (B, S, F), the input of the down
    projection; valid (B, S) bool, or None for all. Every `sample_every`-th position, the strongest neurons' shares of
    |h| are looked at."""

    def __init__(
        self, intermediate_size: int, device: torch.device | str = "cpu", sample_every: int = SAMPLE_EVERY
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.intermediate_size, self.sample_every = intermediate_size, sample_every
        self.tokens_of_neuron = zeros(intermediate_size)
        self.tokens_of_l0 = zeros(intermediate_size + 1)
        wide = long_sum_dtype(device)
        self.l1, self.effective = zeros(dtype=wide), zeros(dtype=wide)
        self.distinct, self.runs = zeros(len(RUNS)), zeros(len(RUNS))
        self.share, self.sampled = zeros(len(SHARES), dtype=wide), zeros()
        self._positions = 0

    def add(self, h: torch.Tensor, valid: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Count h in; returns L0, int64, and effective neurons (sum |h|)^2 / sum h^2, fp32: (B, S) each, 0 at padding.

        A run is `RUNS[i]` neighbouring positions of a sequence that begin at a multiple of that; only whole runs
        without padding count.
        """
        batch, length, width = h.shape
        if valid is None:
            valid = h.new_ones(batch, length, dtype=torch.bool)
            active_BSF = h
        else:
            active_BSF = h.bool() & valid.unsqueeze(-1)
        bytes_BSF = h.new_zeros(batch, _up(length, RUNS[-1]), _up(width, _LANE_BYTES), dtype=torch.bool)
        bytes_BSF[:, :length, :width] = active_BSF
        # Eight neurons' bytes are added by one 64-bit addition: ten times as fast as any reduction over bools.
        words = bytes_BSF.view(torch.int64)
        l0_BS = _row_counts(words)[:, :length]
        self.tokens_of_l0.index_add_(0, l0_BS.flatten(), valid.flatten().long())
        padded = valid.new_zeros(batch, words.shape[1])
        padded[:, :length] = valid
        size = 1
        for index, run in enumerate(RUNS):
            words = words.unflatten(1, (-1, run // size)).sum(2)
            whole = padded.unflatten(1, (-1, run)).all(2)
            self.distinct[index] += (_row_counts(words.view(torch.uint8).bool().view(torch.int64)) * whole).sum()
            self.runs[index] += whole.sum()
            size = run
        self.tokens_of_neuron += words.view(torch.uint8).flatten(0, 1)[:, :width].sum(0, dtype=torch.int64)
        return l0_BS, self._add_magnitudes(h, valid)

    def _add_magnitudes(self, h: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        l1_BS, l2_BS = (norm.unflatten(0, valid.shape) for norm in _norms(h.flatten(0, 1)))
        # Padding may hold NaN, and 0 * NaN would count it.
        l1_BS = torch.where(valid, l1_BS, 0)
        effective_BS = torch.where(valid & (l2_BS > 0), (l1_BS / l2_BS) ** 2, 0).float()
        self.l1 += l1_BS.sum(dtype=self.l1.dtype)
        self.effective += effective_BS.sum(dtype=self.l1.dtype)
        sample = slice(-self._positions % self.sample_every, None, self.sample_every)
        self._positions += valid.numel()
        total_N, magnitude_NF = l1_BS.flatten()[sample], h.flatten(0, 1)[sample].abs()
        counts = [math.ceil(share * self.intermediate_size) for share in SHARES]
        top_NK = magnitude_NF.topk(counts[-1], dim=-1).values.to(self.l1.dtype).cumsum(-1)
        whole = total_N > 0
        for index, count in enumerate(counts):
            self.share[index] += torch.where(whole, top_NK[:, count - 1] / total_N, 0).sum()
        self.sampled += whole.sum()
        return effective_BS

    def report(self) -> dict[str, Any]:
        """The layer's figures as plain data; `hf_twell.measure_sparsity` says what each is."""
        width, histogram = self.intermediate_size, self.tokens_of_l0.cpu()
        tokens = int(histogram.sum())
        counts = self.tokens_of_neuron.cpu().double()
        firings = counts.sum().item()
        l0, dead = firings / tokens, int((counts == 0).sum())
        distinct = {
            str(run): _distinct(self.distinct[index].item(), int(self.runs[index]), counts / tokens, run)
            for index, run in enumerate(RUNS)
        }
        return {
            "intermediate_size": width,
            "l0": l0,
            "density": l0 / width,
            "unions": {run: _share(each["neurons"], width) for run, each in distinct.items()},
            "l1": self.l1.item() / tokens,
            "dead": dead / width,
            "dead_neurons": dead,
            "always_on_neurons": int((counts == tokens).sum()),
            "l0_quantiles": _quantiles(histogram),
            "effective_neurons": self.effective.item() / tokens,
            "hottest_share": _hottest(counts, firings),
            "distinct": distinct,
            "magnitude_share": {
                _percent(share): (self.share[index] / self.sampled).item() if self.sampled else None
                for index, share in enumerate(SHARES)
            },
            "magnitude_sample": int(self.sampled),
        }


def _quantiles(histogram: torch.Tensor) -> dict[str, int]:
    """The smallest L0 that at least the share q of all tokens do not exceed, and the largest of all."""
    cumulative, tokens = histogram.cumsum(0), int(histogram.sum())
    quantiles = {_name(q): int(torch.searchsorted(cumulative, math.ceil(q * tokens))) for q in QUANTILES}
    return {"min": int(histogram.nonzero()[0]), **quantiles, "max": int(histogram.nonzero()[-1])}


def _hottest(counts: torch.Tensor, firings: float) -> dict[str, float | None]:
    ranked = counts.sort(descending=True).values.cumsum(0)
    return {
        _percent(share): ranked[math.ceil(share * len(counts)) - 1].item() / firings if firings else None
        for share in HOTTEST
    }


def _distinct(total: float, runs: int, rate: torch.Tensor, run: int) -> dict[str, float | int | None]:
    """Mean neurons active in a run, and how many it would be if tokens did not resemble their neighbours."""
    strangers = (1 - (1 - rate) ** run).sum().item()
    return {"neurons": total / runs if runs else None, "if_independent": strangers, "runs": runs}


def _share(neurons: float | None, width: int) -> float | None:
    return None if neurons is None else neurons / width


def _norms(h_TF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """sum |h| and sqrt(sum h^2) of each token, in fp32 or, for an fp64 h, in fp64."""
    wide, parts = torch.promote_types(h_TF.dtype, torch.float32), []
    # A part at a time, in the same memory: a whole copy would cost more in fresh pages than in arithmetic.
    rows = min(len(h_TF), 512) if h_TF.device.type == "cpu" else len(h_TF)
    scratch = torch.empty(rows, h_TF.shape[1], dtype=wide, device=h_TF.device)
    for part in h_TF.split(rows):
        magnitude = scratch[: len(part)].copy_(part).abs_()
        parts.append((magnitude.sum(-1), torch.linalg.vector_norm(magnitude, dim=-1)))
    l1, l2 = zip(*parts, strict=True)
    return torch.cat(l1), torch.cat(l2)


def _row_counts(words: torch.Tensor) -> torch.Tensor:
    """Ones in each row of (..., bytes of 0 or 1, seen as 64-bit words)."""
    partial = words.unflatten(-1, (-1, _LANE_BYTES // 8)).sum(-1)
    return partial.view(torch.uint8).sum(-1, dtype=torch.int64)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _name(quantile: float) -> str:
    return f"p{100 * quantile:g}"


def _percent(share: float) -> str:
    return f"{100 * share:g}%"
