"""Trainer as recipes use it."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer


class PackedTrainer(Trainer):
    """Trainer of sequences of one length, which need not be looked into for each step's figures."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._operations: dict[int, int] = {}  # by a batch's tokens

    def floating_point_ops(self, inputs: Mapping[str, torch.Tensor]) -> int:
        tokens = inputs["input_ids"].numel()
        if tokens not in self._operations:  # it goes through all parameters, by their names
            self._operations[tokens] = super().floating_point_ops(inputs)
        return self._operations[tokens]
