"""`DensityController`: the L1 weights that bring layers to a chosen density and keep them there."""

import math

import torch

SHARES = ("equal", "free")
WEIGHT_RANGE = (1e-3, 1e5)  # of the first weight; L1 falls with the density and with the activations' size
FIRST_TERM = 0.03  # nats: what the L1 term of the first weight comes to
# Nats: what a layer's weight times its L1 may come to. As much as the task's loss; with more, a layer that lags behind
# the path is driven so hard that the model breaks.
LARGEST_TERM = 4.0
PROPORTIONAL = 4.0
INTEGRAL = 24.0  # over the whole run
LARGEST_INTEGRAL = 0.4  # a step, in very short ones
SMOOTHED = 0.02  # share of the run


class DensityController:
    """Raises or lowers L1 weights until densities follow a path from where they start to the target, and hold it.

    Formula: with e = log(density / reference), smoothed over 2 % of the steps and clamped to [-1, 1], each step adds
    4 * (e - e_before) + 24 / steps * e to the logarithm of a layer's weight: a proportional-integral controller. The
    reference goes from the first step's density to the target, evenly in its logarithm, while `progress` goes from 0
    to 1. The first weight is the one that makes the L1 term 0.03 nats, whatever the model's activations measure; no
    layer's weight times its L1 comes to more than 4 nats.

    Args:
        target_density: of every layer (`share="equal"`), or of their mean ("free": one weight for all layers).
        steps: optimizer steps of the run in which the controller works.
        share: "equal" or "free".
        bounds: lowest and highest weight; by default a thousandth and 100,000 times the first one, within 4 nats.

    Raises:
        ValueError: a target outside (0, 1), or bounds that are not two rising positive numbers.
    """

    def __init__(
        self,
        target_density: float,
        *,
        steps: int,
        share: str = "equal",
        bounds: tuple[float, float] | None = None,
    ):
        if not isinstance(target_density, float) or not 0 < target_density < 1:
            raise ValueError(f"target_density={target_density!r}; give a share between 0 and 1, such as 0.005")
        if share not in SHARES:
            raise ValueError(f"layer_shares={share!r}; choose one of {', '.join(map(repr, SHARES))}")
        if bounds is not None and not (len(bounds) == 2 and 0 < bounds[0] < bounds[1]):
            raise ValueError(f"l1_bounds={bounds!r}; give the lowest and the highest weight, both above 0")
        self.target_density = target_density
        self.steps = max(1, steps)
        self.share = share
        self.bounds = bounds
        self._start: torch.Tensor | None = None
        self._density: torch.Tensor | None = None
        self._error: torch.Tensor | None = None
        self._log_weight: torch.Tensor | None = None
        self._log_bounds: torch.Tensor | None = None

    @torch.no_grad()
    def update(self, density: torch.Tensor, l1: torch.Tensor, progress: float) -> torch.Tensor:
        """The weights of the next optimizer step; without host synchronisation.

        Shapes: density and l1 (L,) fp32, of the step that has run; returns (L,) fp32.
        """
        density = density.clamp(min=1e-7)
        if self._density is None:
            self._begin(density, l1)
        else:
            rate = 1 / max(1.0, SMOOTHED * self.steps)
            self._density += rate * (density - self._density)
        error = (self._seen() / self.reference(progress)).log().clamp(-1, 1)
        change = PROPORTIONAL * (error - self._error) + min(INTEGRAL / self.steps, LARGEST_INTEGRAL) * error
        low, high = self._log_bounds
        if self.bounds is None:
            high = torch.minimum(high, (LARGEST_TERM / self._shared(l1).clamp(min=1e-12)).log())
        self._log_weight = torch.minimum(torch.maximum(self._log_weight + change, low), high)
        self._error = error
        return self.weights()

    def weights(self) -> torch.Tensor:
        return self._log_weight.exp()

    @property
    def started(self) -> bool:
        return self._density is not None

    def reference(self, progress: float) -> torch.Tensor:
        """The density that the path has now, (L,)."""
        target = math.log(self.target_density)
        return (self._start.log() * (1 - progress) + target * progress).exp()

    def missed(self, within: float = 0.1) -> dict[int, float]:
        """Densities, as smoothed, of the layers that are further from the target; with "free", of none or of all."""
        if not self.started:
            return {}
        far = ((self._seen() / self.target_density).log().abs() > math.log(1 + within)).tolist()
        return {layer: density for layer, density in enumerate(self._density.tolist()) if far[layer]}

    def state(self) -> dict:
        """What a resumed run needs, as plain data."""
        if not self.started:
            return {}
        names = ("_start", "_density", "_error", "_log_weight", "_log_bounds")
        return {name.lstrip("_"): getattr(self, name).tolist() for name in names}

    def load_state(self, state: dict, device: torch.device) -> None:
        for name, values in state.items():
            setattr(self, f"_{name}", torch.tensor(values, device=device))

    def _begin(self, density, l1) -> None:
        first = FIRST_TERM / l1.mean().clamp(min=1e-12)
        low, high = WEIGHT_RANGE if self.bounds is None else self.bounds
        self._log_bounds = (
            torch.stack([first * low, first * high]) if self.bounds is None else first.new_tensor([low, high])
        )
        self._log_bounds = self._log_bounds.log()
        self._log_weight = first.log().clamp(self._log_bounds[0], self._log_bounds[1]).expand_as(density).clone()
        self._density = density.clone()
        self._start = self._seen()
        self._error = torch.zeros_like(density)

    def _seen(self) -> torch.Tensor:
        return self._shared(self._density)

    def _shared(self, values: torch.Tensor) -> torch.Tensor:
        """Each layer's own, or the mean where layers share the target freely."""
        return values.clone() if self.share == "equal" else values.mean().expand_as(values).clone()
