"""How far apart two computations of the same figure may end: bounds that hold on any processor."""

import torch


def rounding(terms: int, magnitude: float = 1.0, dtype: torch.dtype = torch.float32) -> float:
    """eps x terms x magnitude: between two orders of a sum of `terms` products whose absolute sum is `magnitude`.

    Each order is within (terms - 1) x eps / 2 of the exact sum, to first order, so two are within (terms - 1) x eps.
    A result of several such sums after each other takes the sum of their terms. (Higham, Accuracy and Stability of
    Numerical Algorithms, section 4.2.)
    """
    return torch.finfo(dtype).eps * terms * magnitude
