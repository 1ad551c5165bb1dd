"""`DensityController`: the L1 weights that bring layers to a chosen density and keep them there."""

import math
from collections.abc import Sequence

import torch

from hf_twell.train.schedule import check_target

WEIGHT_RANGE = (1e-3, 1e5)  # of the first weight; L1 falls with the density and with the activations' size
FIRST_TERM = 0.03  # nats: what the L1 term of the first weight comes to
# Nats: what a layer's weight times its L1 may come to. As much as the task's loss; with more, a layer that lags behind
# the path is driven so hard that the model breaks.
LARGEST_TERM = 4.0
PROPORTIONAL = 4.0
INTEGRAL = 24.0  # over the whole run
LARGEST_INTEGRAL = 0.4  # a step, in very short ones
LARGEST_UNION = 1 - 1e-6  # above, all neurons count as active
SMOOTHED = 0.02  # share of the run
FAR = math.log(1.1)  # a tenth


def smoothed(before: torch.Tensor, density: torch.Tensor, steps: int, *, valid: torch.Tensor) -> torch.Tensor:
    """Densities smoothed over 2 % of a run's steps, after one more step; as before, if that is not `valid`, (): where
    its L1 is not finite, it overflowed, broke off, or was all padding."""
    return torch.where(valid, before + (density - before) / max(1.0, SMOOTHED * steps), before)


class DensityController:
    """Raises or lowers L1 weights until densities follow a path from where they start to the target, and hold it.

    Formula: with e = log(density / setpoint), smoothed over 2 % of the steps and clamped to [-1, 1], each step adds
    4 * (e - e_before) + 24 / steps * e to the logarithm of a layer's weight: a proportional-integral controller. The
    setpoint goes from the first step's density to the target, evenly in its logarithm, while `progress` goes from 0
    to 1. The first weight is the one that makes the L1 term 0.03 nats, whatever the model's activations measure; no
    layer's weight times its L1 comes to more than 4 nats, unless `l1_bounds` are given.

    With `is_union` the target is a union, the share u of neurons that is active in at least one of several tokens, and
    -log(1 - u) takes the density's place in the formula: the two are in proportion where tokens choose their neurons
    independently. Near 1 the union itself hardly moves while the density halves.

    Args:
        target_density: of every layer (`layer_shares="equal"`), or of their mean ("free": one weight for all layers).
        steps: optimizer steps of the run in which the controller works.
        layer_shares: "equal" or "free".
        is_union: whether the target is a union, which `update` then gets in place of the density.
        l1_bounds: lowest and highest weight; by default a thousandth and 100,000 times the first one, within 4 nats.

    Raises:
        ValueError: a target outside (0, 1), unknown `layer_shares`, or bounds that are not two rising positive numbers.
    """

    _start: torch.Tensor
    _density: torch.Tensor
    _error: torch.Tensor
    _log_weight: torch.Tensor
    _log_first: torch.Tensor

    def __init__(
        self,
        target_density: float,
        *,
        steps: int,
        layer_shares: str = "equal",
        is_union: bool = False,
        l1_bounds: Sequence[float] | None = None,
    ) -> None:
        check_target(target_density, layer_shares=layer_shares, l1_bounds=l1_bounds)
        self.target_density = target_density
        self.is_union = is_union
        self.steps = steps
        self.layer_shares = layer_shares
        self.l1_bounds = l1_bounds
        self.started = False  # by the first step that has tokens, from which on the tensors above exist
        self._limits: tuple[torch.Tensor, torch.Tensor] | None = None

    @torch.no_grad()
    def update(self, density: torch.Tensor, l1: torch.Tensor, progress: float) -> torch.Tensor:
        """The weights of the next optimizer step; without host synchronisation after the first one.

        A step whose L1 is not finite changes nothing: its forward overflowed (in float16, the loss scaler passes over
        it too), or all of it was padding.

        Shapes: density and l1 (L,) fp32, of the step that has run (with the count term, what it counts in place of
        L1); returns (L,) fp32.
        """
        density, valid = density.clamp(min=1e-7), l1.isfinite().all()
        if not self.started:
            if not valid:
                return torch.zeros_like(l1)
            self._begin(density, l1)
        else:
            self._density = smoothed(self._density, density, self.steps, valid=valid)
        off_path = self._log_of(self._seen()) - self._log_setpoint(progress)
        error = torch.where(valid, off_path.clamp(-1, 1), self._error)
        change = PROPORTIONAL * (error - self._error) + min(INTEGRAL / self.steps, LARGEST_INTEGRAL) * error
        self._limits = self._log_bounds(l1)
        self._log_weight = torch.where(valid, (self._log_weight + change).clamp(*self._limits), self._log_weight)
        self._error = error
        return self.weights()

    @property
    def density(self) -> torch.Tensor | None:
        """What it steers by, smoothed, (L,); None before it has started."""
        return self._density if self.started else None

    def weights(self) -> torch.Tensor:
        return self._log_weight.exp()

    def setpoint(self, progress: float) -> torch.Tensor:
        """The density or union that the path has now, (L,)."""
        log = self._log_setpoint(progress)
        return -(-log.exp()).expm1() if self.is_union else log.exp()

    def held(self) -> dict[str, list[int]]:
        """Layers whose weight is at its "upper" or "lower" bound, while they are more than a tenth off the path."""
        if self._limits is None:
            return {}
        low, high = self._limits
        sides = {
            "upper": (self._log_weight >= high) & (self._error > FAR),
            "lower": (self._log_weight <= low) & (self._error < -FAR),
        }
        return {side: [layer for layer, is_held in enumerate(held.tolist()) if is_held] for side, held in sides.items()}

    def missed(self) -> dict[int, float]:
        """Densities, as smoothed, of the layers more than a tenth off the target; with "free", of none or of all."""
        if not self.started:
            return {}
        far = ((self._seen() / self.target_density).log().abs() > FAR).tolist()
        return {layer: density for layer, density in enumerate(self._density.tolist()) if far[layer]}

    def state(self) -> dict:
        """What a resumed run needs, as plain data."""
        if not self.started:
            return {}
        names = ("_start", "_density", "_error", "_log_weight", "_log_first")
        return {name.lstrip("_"): getattr(self, name).tolist() for name in names}

    def load_state(self, state: dict, device: torch.device) -> None:
        for name, values in state.items():
            setattr(self, f"_{name}", torch.tensor(values, device=device))
        self.started = bool(state)

    def _begin(self, density: torch.Tensor, l1: torch.Tensor) -> None:
        self.started = True
        self._log_first = (FIRST_TERM / l1.mean().clamp(min=1e-12)).log()
        self._log_weight = self._log_first.expand_as(density).clamp(*self._log_bounds(l1))
        self._density = density.clone()
        self._start = self._seen()
        self._error = torch.zeros_like(density)

    def _log_bounds(self, l1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the logarithm of each layer's weight, (L,) each."""
        if self.l1_bounds is not None:
            low, high = (torch.full_like(l1, math.log(bound)) for bound in self.l1_bounds)
            return low, high
        low, high = (self._log_first.expand_as(l1) + math.log(factor) for factor in WEIGHT_RANGE)
        return low, torch.minimum(high, (LARGEST_TERM / self._shared(l1).clamp(min=1e-12)).log())

    def _log_setpoint(self, progress: float) -> torch.Tensor:
        target = torch.full_like(self._start, self.target_density)
        return self._log_of(self._start) * (1 - progress) + self._log_of(target) * progress

    def _log_of(self, share: torch.Tensor) -> torch.Tensor:
        """Of a density its logarithm; of a union that of -log(1 - u)."""
        return (-(-share.clamp(max=LARGEST_UNION)).log1p()).log() if self.is_union else share.log()

    def _seen(self) -> torch.Tensor:
        return self._shared(self._density)

    def _shared(self, values: torch.Tensor) -> torch.Tensor:
        """Each layer's own, or the mean where layers share the target freely."""
        return values.clone() if self.layer_shares == "equal" else values.mean().expand_as(values).clone()
