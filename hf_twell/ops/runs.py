"""Which tokens of a call are neighbours, of whom the count term counts what they activate together."""

from typing import Self

import torch


class Runs:
    """Runs of a batch's tokens, T in all, looked at once: each call that takes them trusts what they hold.

    Shapes:
        tokens (R, share) int64: each run's places in the batch seen as (T,), and -1 after the last of a shorter one.
        run (T,) int64: each token's row of `tokens`, 0..R - 1. Padding has the last row, which holds no places.
        size (R,) int64: how many tokens each run has, made of `tokens`.

    `tokens` and `run` tell the same. What they hold is looked at where nothing waits for that, on a CPU and outside of
    graphs: elsewhere a row that is none reads and writes other memory, and where the two differ, backends compute
    different terms, as some go by `tokens` and others by `run`.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, a row or a place that is none, and a token whose
            row does not hold it, or that lies in `tokens` besides.
    """

    def __init__(self, tokens: torch.Tensor, run: torch.Tensor) -> None:
        for name, part, shape, fits in (
            ("tokens", tokens, "(R, share) with both at least 1", tokens.ndim == 2 and tokens.numel() > 0),
            ("run", run, "(T,)", run.ndim == 1),
        ):
            if not fits:
                raise ValueError(f"{name} of runs has shape {tuple(part.shape)}; expected {shape}")
            if part.dtype != torch.int64:
                raise ValueError(f"{name} of runs is {part.dtype}; give torch.int64")
        if tokens.device != run.device:
            raise ValueError(f"tokens of runs is on {tokens.device} and run on {run.device}; move them to one device")
        if run.is_cpu and len(run) > 0 and not torch.compiler.is_compiling():
            least, most = (int(bound) for bound in run.aminmax())
            if least < 0 or most >= len(tokens):
                raise ValueError(
                    f"run holds {least if least < 0 else most}; give each token a row of tokens, of "
                    f"0..{len(tokens) - 1}, and padding the last"
                )
            if (place := int(tokens.max())) >= len(run):
                raise ValueError(f"tokens of runs holds {place}, and run has {len(run)} tokens; give places below that")
            _check_agreement(tokens, run)
        self.tokens, self.run, self.size = tokens, run, (tokens >= 0).sum(1)

    def to(self, device: torch.device) -> Self:
        if self.run.device == device:
            return self
        return type(self)(self.tokens.to(device, non_blocking=True), self.run.to(device, non_blocking=True))


def _check_agreement(tokens: torch.Tensor, run: torch.Tensor) -> None:
    rows, slots = (tokens >= 0).nonzero(as_tuple=True)
    places, padding = tokens[rows, slots], len(tokens) - 1
    row_of = torch.full_like(run, padding)
    row_of[places] = rows
    if len(differing := (row_of != run).nonzero()):
        token = int(differing[0])
        raise ValueError(
            f"token {token} has row {int(run[token])} in run and row {int(row_of[token])} in tokens, where the last, "
            f"{padding}, is padding's; give both the same, or make them by hf_twell.blocks.batches.runs_of"
        )
    if len(places) != (count := int((run != padding).sum())):
        raise ValueError(
            f"tokens of runs holds {len(places)} places, and run has {count} tokens besides padding; give each place "
            f"once, and none in the last row, {padding}"
        )
