"""What the L1 term of a run works towards, and in how many steps: the values that `SparsityCallback` takes."""

import math
from collections.abc import Sequence
from typing import Any

LAYER_SHARES = ("equal", "free")
TERMS = ("l1", "count")
WARMUPS = {
    "linear": lambda progress: progress,
    "sine": lambda progress: math.sin(progress * math.pi / 2) ** 2,
}
# Arguments and keys that are no more, and what takes their place.
REMOVED = dict.fromkeys(
    ("blend", "blend_steps"),
    "blending is gone; leave it out, and the activation becomes ReLU at once; what keeps more of the parent is the "
    "parent as a teacher (in a recipe distill: {logits: 1.0}; docs/converting.md)",
)


def check_schedule(
    *,
    l1_weight: float | None,
    target_density: float | None,
    target_union: float | None = None,
    term: str,
    share: int | None = None,
    warmup_steps: int | float,
    warmup: str,
    layer_shares: str,
    l1_bounds: Sequence[float] | None,
) -> None:
    """Refuse, by a ValueError that names the argument, what no run can follow."""
    if target_union is not None:
        if target_density is not None:
            raise ValueError(
                f"target_density={target_density!r} and target_union={target_union!r}; give one of them: the share of "
                "neurons that are active for a token, or in a run of tokens"
            )
        if share is None:
            raise ValueError(
                f"target_union={target_union!r} is that of a run of tokens; say of how many: share=64, term='count'"
            )
    name, target = ("target_density", target_density) if target_union is None else ("target_union", target_union)
    if (l1_weight is None) == (target is None):
        both = f"l1_weight={l1_weight!r} and {name}={target!r}"
        given = "no l1_weight, target_density or target_union" if target is None else both
        raise ValueError(
            f"{given}; give one of them: the coefficient (0 measures only), or the share of active neurons that it "
            "shall lead to"
        )
    if term not in TERMS:
        raise ValueError(f"term={term!r}; choose one of {', '.join(map(repr, TERMS))}")
    check_share(share, term)
    if term != "l1" and target is None:
        raise ValueError(f"term={term!r} goes with target_density or target_union alone; leave it out")
    if l1_bounds is not None and target is None:
        raise ValueError(f"l1_bounds={l1_bounds!r} goes with target_density or target_union alone; leave it out")
    if warmup not in WARMUPS:
        raise ValueError(f"warmup={warmup!r}; choose one of {', '.join(map(repr, WARMUPS))}")
    check_steps("warmup_steps", warmup_steps)
    if target is not None:
        check_target(target, layer_shares=layer_shares, l1_bounds=l1_bounds, name=name)


def check_share(share: int | None, term: str) -> None:
    """Refuse, by a ValueError, what is no length of a run, or goes with another term than a count."""
    if share is None:
        return
    if isinstance(share, bool) or not isinstance(share, int) or share < 2:
        raise ValueError(f"share={share!r}; give a whole number of tokens of at least 2, such as 64")
    if term != "count":
        raise ValueError(f"share={share!r} goes with term='count' alone; leave it out, or choose that")


def check_target(
    target: float, *, layer_shares: str, l1_bounds: Sequence[float] | None, name: str = "target_density"
) -> None:
    """Refuse, by a ValueError that names the argument, what a `DensityController` cannot steer to."""
    if not isinstance(target, float) or not 0 < target < 1:
        raise ValueError(f"{name}={target!r}; give a share between 0 and 1, such as 0.005")
    if layer_shares not in LAYER_SHARES:
        raise ValueError(f"layer_shares={layer_shares!r}; choose one of {', '.join(map(repr, LAYER_SHARES))}")
    if l1_bounds is not None and not _are_bounds(l1_bounds):
        raise ValueError(f"l1_bounds={l1_bounds!r}; give the lowest and the highest weight, two rising numbers above 0")


def check_steps(name: str, value: int | float) -> None:
    """Refuse, by a ValueError, what is neither a number of optimizer steps nor a share of them."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0 or (value >= 1 and value % 1):
        raise ValueError(f"{name}={value!r}; give a whole number of steps, or a share between 0 and 1")


def whole_steps(value: int | float, max_steps: int) -> int:
    """The optimizer steps that a number or a share of all of them comes to."""
    return math.ceil(value * max_steps) if value < 1 else int(value)


def _are_bounds(bounds: Any) -> bool:
    if not isinstance(bounds, list | tuple) or not all(isinstance(bound, int | float) for bound in bounds):
        return False
    return len(bounds) == 2 and 0 < bounds[0] < bounds[1] < math.inf
