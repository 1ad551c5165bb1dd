"""Where vLLM's layers hold their feed-forward blocks."""

from typing import Any, NamedTuple

from torch import nn
from vllm.model_executor.models.utils import PPMissingLayer


class Place(NamedTuple):
    """What holds a block, under which name, and the index of its layer."""

    owner: nn.Module
    name: str
    layer: int

    @property
    def block(self) -> Any:
        return getattr(self.owner, self.name)

    @property
    def is_shared_expert(self) -> bool:
        return "shared" in self.name


def places_of(decoder: nn.Module) -> dict[int, Place]:
    """By their numbers in the `twell` entry: a block a layer, or the routed experts and then the shared one."""
    places: dict[int, Place] = {}
    number = 0
    for index, layer in enumerate(decoder.layers):
        found = [] if isinstance(layer, PPMissingLayer) else _in_layer(layer, index)
        places |= {number + place: each for place, each in enumerate(found)}
        number += max(1, len(found))  # of another pipeline stage's layer: as if it had one
    return places


def _in_layer(layer: nn.Module, index: int) -> list[Place]:
    name = "mlp" if hasattr(layer, "mlp") else "block_sparse_moe"  # Mixtral's
    block = getattr(layer, name)
    if not hasattr(block, "experts"):
        return [Place(layer, name, index)]
    names = ("experts", "shared_expert")
    return [Place(block, part, index) for part in names if getattr(block, part, None) is not None]
