"""The two sparse layouts of activations, as plain data: what kernels write and keep, made readable and testable.

`Twell` is what the gate matmul's epilogue writes: for each token and each tile of consecutive neurons a count and up to
`slots` (index, value) pairs. `Hybrid` is what is kept between forward and backward: compressed rows for most tokens,
whole rows for the few that would overflow. Both are lossless at any density: what does not fit is held densely.
The CPU backend's own state (kernels/twell_cpu/common/pairs.h) is `Hybrid` with one pool of slots for all tokens, and
marks where a row is computed again instead of held.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Twell:
    """Tile-wise ELLPACK: N = ceil(F / tile) tiles a token, S slots a tile.

    Shapes: count (T, N) int32; index (T, N, S) uint16, within the tile; value (T, N, S); overflow (T,) bool;
    dense (number of overflowing tokens, F): their rows, in order, of which count is right and the slots are unused.
    A NaN is a value like any other; only exact zeros are left out.

    Source: arXiv 2603.23198, section 3 (the overflow rows are ours).
    """

    count: torch.Tensor
    index: torch.Tensor
    value: torch.Tensor
    overflow: torch.Tensor
    dense: torch.Tensor
    width: int
    tile: int

    @classmethod
    def from_dense(cls, h_TF: torch.Tensor, *, tile: int = 256, slots: int = 32) -> "Twell":
        """Pack the non-zeros of a (T, F) tensor.

        Raises:
            ValueError: h_TF is not a matrix, or tile or slots is out of range.
        """
        _check_matrix(h_TF)
        if not (1 <= tile <= 65536 and 1 <= slots <= tile):
            raise ValueError(f"tile={tile}, slots={slots}; expected 1 <= slots <= tile <= 65536")
        tokens, width = h_TF.shape
        tiles = (width + tile - 1) // tile
        padded = torch.nn.functional.pad(h_TF, (0, tiles * tile - width)).view(tokens, tiles, tile)
        active = padded != 0
        count = active.sum(-1, dtype=torch.int32)
        # Active neurons first, in ascending order: a stable sort of "is inactive".
        order = (~active).to(torch.uint8).argsort(dim=-1, stable=True)[..., :slots]
        filled = torch.arange(slots, device=h_TF.device) < count.unsqueeze(-1)
        value = torch.where(filled, padded.gather(-1, order), padded.new_zeros(()))
        index = torch.where(filled, order, 0).to(torch.uint16)
        overflow = (count > slots).any(-1)
        return cls(count, index, value, overflow, h_TF[overflow], width, tile)

    def to_dense(self) -> torch.Tensor:
        """The (T, F) tensor that was packed, bit for bit where it was not zero."""
        tokens, tiles, slots = self.value.shape
        filled = torch.arange(slots, device=self.value.device) < self.count.unsqueeze(-1)
        padded = self.value.new_zeros(tokens, tiles, self.tile)
        token, tile, slot = filled.nonzero(as_tuple=True)
        padded[token, tile, self.index[token, tile, slot].long()] = self.value[token, tile, slot]
        dense = padded.view(tokens, tiles * self.tile)[:, : self.width].contiguous()
        dense[self.overflow] = self.dense
        return dense

    @property
    def nbytes(self) -> int:
        return _nbytes(self.count, self.index, self.value, self.overflow, self.dense)


@dataclass(frozen=True)
class Hybrid:
    """Compressed rows of at most `capacity` pairs, and dense rows for the tokens with more.

    Shapes: row (T,) int32, the token's row in `dense`, or -1; count (T,) int32; index (T, capacity) uint16 (int32 for
    F > 65,536); value (T, capacity); dense (tokens with more than `capacity` non-zeros, F).

    Source: arXiv 2603.23198, section 3.
    """

    row: torch.Tensor
    count: torch.Tensor
    index: torch.Tensor
    value: torch.Tensor
    dense: torch.Tensor
    width: int

    @classmethod
    def from_dense(cls, h_TF: torch.Tensor, *, capacity: int) -> "Hybrid":
        """Pack the non-zeros of a (T, F) tensor.

        Raises:
            ValueError: h_TF is not a matrix, or capacity is out of range.
        """
        _check_matrix(h_TF)
        width = h_TF.shape[1]
        if not 1 <= capacity <= max(width, 1):
            raise ValueError(f"capacity={capacity}; expected 1 <= capacity <= {width}, the neurons of a token")
        active = h_TF != 0
        count = active.sum(1, dtype=torch.int32)
        overflow = count > capacity
        row = torch.where(overflow, overflow.cumsum(0) - 1, -1).to(torch.int32)
        order = (~active).to(torch.uint8).argsort(dim=1, stable=True)[:, :capacity]
        filled = (torch.arange(order.shape[1], device=h_TF.device) < count.unsqueeze(1)) & ~overflow.unsqueeze(1)
        value = torch.where(filled, h_TF.gather(1, order), h_TF.new_zeros(()))
        index = torch.where(filled, order, 0).to(torch.uint16 if width <= 65536 else torch.int32)
        return cls(row, count, index, value, h_TF[overflow], width)

    def to_dense(self) -> torch.Tensor:
        """The (T, F) tensor that was packed, bit for bit where it was not zero."""
        tokens, capacity = self.value.shape
        dense = self.value.new_zeros(tokens, self.width)
        sparse = self.row < 0
        filled = (torch.arange(capacity, device=dense.device) < self.count.unsqueeze(1)) & sparse.unsqueeze(1)
        token, slot = filled.nonzero(as_tuple=True)
        dense[token, self.index[token, slot].long()] = self.value[token, slot]
        dense[~sparse] = self.dense
        return dense

    @property
    def nbytes(self) -> int:
        return _nbytes(self.row, self.count, self.index, self.value, self.dense)


def _check_matrix(h_TF):
    if h_TF.ndim != 2:
        raise ValueError(f"h has shape {tuple(h_TF.shape)}; expected (tokens, neurons)")


def _nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
