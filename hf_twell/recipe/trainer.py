"""Trainer as recipes use it."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import TrainOutput

# Of a layer: the teacher's, plain matmuls', and one for each capacity of the kernels' buffers, a power of two up to F;
# again for the first layer where nothing learns before it. Past PyTorch's own limit, 8, layers would run eager.
MOST_GRAPHS = 32


class PackedTrainer(Trainer):
    """Trainer of sequences of one length, which need not be looked into for each step's figures.

    With `torch_compile` it compiles one layer, whose graphs all layers share, and the loss. With `torch_compile_mode`,
    which may ask for CUDA graphs, it compiles the model as a whole, as Trainer does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._operations: dict[int, int] = {}  # by a batch's tokens
        self._by_layer = self.args.torch_compile and self.args.torch_compile_mode is None
        if self._by_layer:
            self.accelerator.state.dynamo_plugin.use_regional_compilation = True

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        if not self._by_layer:
            return super().train(*args, **kwargs)
        # accelerate leaves the loss out, which would make float32 copies of all logits.
        loss_function, options = self.model.loss_function, self.accelerator.state.dynamo_plugin.to_kwargs()
        self.model.loss_function = torch.compile(loss_function, **options)
        try:
            with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
                return super().train(*args, **kwargs)
        finally:
            self.model.loss_function = loss_function

    def floating_point_ops(self, inputs: Mapping[str, torch.Tensor]) -> int:
        tokens = inputs["input_ids"].numel()
        if tokens not in self._operations:  # it goes through all parameters, by their names
            self._operations[tokens] = super().floating_point_ops(inputs)
        return self._operations[tokens]
