"""How alike neighbouring tokens of the benchmark's inputs must be, for a wanted share of neurons in their union.

A token's gates are a sum of what all uses of its word have in common, of a topic, which drifts into the next one, and
of its own: gate = sqrt(word) w + sqrt(topic) (cos(a) z_k + sin(a) z_(k+1)) + sqrt(1 - word - topic) e, a = pi / 2 times
how far the token is from topic k to the next. The variance is the same everywhere, and so is what neighbours share: a
run may begin at any token.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from hf_twell.measure.activity import RUNS

SHORTEST_SPAN, LONGEST_SPAN = 16, 4096  # tokens
CLOSE, FAR = 0.003, 0.03  # of F: from which distance on a fit is done, and up to which it counts as one
ROUNDS, GAIN = 8, 0.9  # at most so many, as long as each leaves no more than this of the distance
SAMPLE = 1 << 19  # gates by which a threshold is found
_STEP = 0.25  # of a coordinate, for its derivative


class Sharing(NamedTuple):
    """How a token's variance is made up.

    Attributes:
        topic: the topic's share.
        word: the word's share of the rest.
        span: tokens from one topic to the next.
        uneven: how unequal the neurons' thresholds are, times what they are in most models.
        drifts: whether topics pass into each other; else each is the same for `span` tokens.
    """

    topic: float
    word: float
    span: float
    uneven: float = 1.0
    drifts: bool = True

    def mix(self, words_TD: torch.Tensor, topics_KD: torch.Tensor, own_TD: torch.Tensor) -> torch.Tensor:
        """Inputs or their gates, (T, D), of what each token's word, each topic and each token has."""
        place = torch.arange(len(own_TD), device=own_TD.device) / self.span
        first = place.long()
        topic, rest = math.sqrt(self.topic), 1 - self.topic
        mixed = math.sqrt(rest * self.word) * words_TD
        if self.drifts:
            angle = (place - first).unsqueeze(1) * (math.pi / 2)
            mixed += topic * (angle.cos() * topics_KD[first] + angle.sin() * topics_KD[first + 1])
        else:
            mixed += topic * topics_KD[first]
        mixed += math.sqrt(rest * (1 - self.word)) * own_TD
        return mixed


TOKENWISE = Sharing(topic=0.25, word=0.40 / 0.75, span=256, drifts=False)  # where no union is asked for


def unions_of(active_TF: torch.Tensor, length: int | None = None) -> dict[str, float]:
    """Share of F that is active in at least one of 16, 64 and 128 consecutive tokens: means over the whole runs, none
    of which passes from one sequence of `length` tokens (default: all) into the next."""
    length, width = length or len(active_TF), active_TF.shape[1]
    shares, seen_SRF, size = {}, active_TF.view(-1, length, width), 1
    for run in RUNS:
        if length < run:
            break
        seen_SRF = seen_SRF[:, : length // run * (run // size)].unflatten(1, (-1, run // size)).any(2)
        shares[str(run)] = seen_SRF.sum(2).double().mean().item() / width
        size = run
    return shares


def sliding_union(active_TF: torch.Tensor, run: int) -> torch.Tensor:
    """How many neurons are active in at least one of the `run` (a power of two) tokens from each one on, (T - run +
    1,)."""
    size = 1
    while size < run:
        active_TF = active_TF[:-size] | active_TF[size:]
        size *= 2
    return active_TF.sum(1)


def fit(unions: Mapping[str, float], gates: Callable[[Sharing], torch.Tensor], density: float) -> Sharing:
    """The sharing whose gates have `unions` at this density, by damped Gauss-Newton steps in least squares; a
    ValueError where none comes near. Unions are by "16", "64" and "128", or by "64" alone; then word and span are those
    of converted models. `gates` makes gates (T, F) of a sharing, whose largest ones are active."""
    free = 4 if len(unions) > 1 else 1
    # Logits of the two shares, logarithms of the span and of what makes neurons uneven.
    shared = torch.tensor(
        [1.5, math.log(4), math.log(512), 0], dtype=torch.float64
    )  # models that were pressed to share
    tokenwise = torch.tensor([-0.6, -1.4, math.log(48), 0], dtype=torch.float64)
    low = torch.tensor([-7.0, -5.0, math.log(SHORTEST_SPAN), -3.0], dtype=torch.float64)
    high = torch.tensor([6.0, 5.0, math.log(LONGEST_SPAN), 1.0], dtype=torch.float64)

    def made(place: torch.Tensor) -> Sharing:
        topic, word = place[:2].sigmoid().tolist()
        return Sharing(topic, word, *place[2:].exp().tolist())

    def off(place: torch.Tensor) -> torch.Tensor:
        gate_TF = gates(made(place))
        found = unions_of(gate_TF > _quantile(gate_TF, 1 - density))
        return torch.tensor([found[run] - share for run, share in unions.items()], dtype=torch.float64)

    errors = [(off(start), start) for start in ((shared, tokenwise) if free > 1 else (shared,))]
    error, place = min(errors, key=lambda pair: pair[0].norm().item())
    damping = 1e-4
    for _ in range(ROUNDS):
        if error.abs().max() <= CLOSE:
            break
        columns = []
        for index in range(free):
            near = place.clone()
            near[index] += _STEP if near[index] + _STEP <= high[index] else -_STEP
            columns.append((off(near) - error) / (near[index] - place[index]))
        slope = torch.stack(columns, 1)
        for _ in range(3):
            square = slope.T @ slope + damping * torch.eye(free, dtype=torch.float64)
            step = torch.zeros(4, dtype=torch.float64)
            step[:free] = torch.linalg.solve(square, -slope.T @ error).clamp(-2, 2)
            moved = (place + step).clamp(low, high)
            after = off(moved)
            if after.norm() < GAIN * error.norm():
                place, error, damping = moved, after, damping / 10
                break
            damping *= 30
        else:
            break
    if error.abs().max() > FAR:
        nearest = ", ".join(
            f"{100 * (share + miss):.1f}" for share, miss in zip(unions.values(), error.tolist(), strict=True)
        )
        raise ValueError(
            f"no inputs with {100 * density:.3g} % active neurons have unions of {_told(unions)}; the nearest have "
            f"{nearest} %. Give a union between what each token has and what strangers have together"
        )
    return made(place)


def _told(unions: Mapping[str, float]) -> str:
    return ", ".join(f"{100 * share:.1f} % ({run} tokens)" for run, share in unions.items())


def _quantile(gate_TF: torch.Tensor, q: float) -> torch.Tensor:
    """Of a sample where they are many; the real threshold is found later, and exactly."""
    stride = gate_TF.numel() // SAMPLE | 1
    while math.gcd(stride, gate_TF.shape[1]) > 1:  # it would come to some neurons alone
        stride += 2
    sample = gate_TF.flatten()[::stride]
    return sample.kthvalue(min(len(sample), max(1, round(q * len(sample))))).values
