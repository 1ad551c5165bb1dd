"""How much of a block's output comes from neurons whose gate is negative: what the swap to ReLU would silence."""

import torch
from torch import nn

from hf_twell.blocks.architectures import FfnSite
from hf_twell.files.weights import DTYPES
from hf_twell.ops.reference import long_sum_dtype

PART_TOKENS = 512


def column_norms(site: FfnSite) -> torch.Tensor | None:
    """||Wd_:,j||, how far the down projection carries neuron j: (F,), fp32 or, for fp64 weights, fp64.

    None where the weight cannot be read: quantized, offloaded, or changed by an adapter.
    """
    down = site.linear("down")
    weight_DF = down.weight if isinstance(down, nn.Linear) else None
    if weight_DF is None or type(weight_DF.data) is not torch.Tensor:  # a subclass may be quantized
        return None
    if weight_DF.is_meta or weight_DF.dtype not in DTYPES:
        return None
    wide = torch.promote_types(weight_DF.dtype, torch.float32)
    return torch.linalg.vector_norm(weight_DF.detach(), dim=0, dtype=wide)


class NegativeGates:
    """The share of one block's output energy that neurons with z_j <= 0 carry, z being what the activation gets:

        share = sum over tokens, j with z_j <= 0 of (h_j ||Wd_:,j||)^2  /  sum over tokens, all j of (h_j ||Wd_:,j||)^2

    Tokens count by their energy. Trained models have layers that fire a thousand times as strongly on a single token,
    often the first one; it decides such a layer's share.
    """

    _negative: torch.Tensor

    def __init__(self, site: FfnSite) -> None:
        # ReLU leaves nothing there, and blocks that are fast by it need not compute z apart.
        self.relu, self._site = isinstance(site.activation, nn.ReLU), site
        self._norms: torch.Tensor | None = None
        self._energy: torch.Tensor | None = None

    def hook(self, _module: nn.Module, _args: tuple, z: torch.Tensor) -> None:
        """A forward hook for what makes z (..., F), and may make more: keeps its signs for the `add` that follows."""
        self._negative = self._site.form.split(z)[0] <= 0

    def add(self, h: torch.Tensor, valid: torch.Tensor) -> None:
        """Count h (T, F) in; `valid` (T,) bool is False at padding."""
        if self.relu:
            return
        if self._energy is None:
            self._norms = column_norms(self._site)
            self._energy = torch.zeros(2, dtype=long_sum_dtype(h.device), device=h.device)  # of negative gates, of all
        negative = self._negative.view_as(h)
        del self._negative
        if self._norms is None:
            return
        norms = self._norms.to(h.device)
        # Some tokens at a time: their energies stay in the cache.
        for h_TF, negative_TF, valid_T in zip(*(t.split(PART_TOKENS) for t in (h, negative, valid)), strict=True):
            energy_TF = (h_TF * norms).square_()
            all_T = energy_TF.sum(-1)
            negative_T = energy_TF.mul_(negative_TF).sum(-1)
            # Padding may hold NaN, and 0 * NaN would count it.
            energy_2T = torch.where(valid_T, torch.stack([negative_T, all_T]), 0)
            self._energy += energy_2T.sum(-1, dtype=self._energy.dtype)

    def report(self) -> float | None:
        """The share, 0 of no energy at all; None where the down projection's weight cannot be read."""
        if self.relu:
            return 0.0
        if self._norms is None or self._energy is None:
            return None
        negative, everything = self._energy.tolist()
        return negative / everything if everything else 0.0
