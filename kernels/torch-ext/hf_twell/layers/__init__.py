"""Layers that `kernels` and Transformers put in the place of a model's own."""

import torch
from torch import nn

from .._ops import ops

__all__ = ["ReLUMLP", "ReLUMLPLayout"]


class ReLUMLP(nn.Module):
    """The feed-forward block of Llama, Qwen2, Qwen3 and Mistral, where its activation is ReLU.

    Every other block computes as before: one with another activation, with projections that are no plain linears (LoRA,
    quantized), on a GPU in float32, under autocast, or where gradients may be wanted.
    """

    can_torch_compile = True
    has_backward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        if (
            torch.is_grad_enabled()
            or torch.is_autocast_enabled(x.device.type)
            or type(self.act_fn) is not nn.ReLU
            or not type(gate) is type(up) is type(down) is nn.Linear
            or x.dtype != down.weight.dtype
            or (x.dtype == torch.float32 and x.device.type != "cpu")
        ):
            return down(self.act_fn(gate(x)) * up(x))
        if down.weight.stride(0) != 1 and not torch.compiler.is_compiling():
            down.weight.data = down.weight.t().contiguous().t()  # by columns, as the kernels read it: the same values
        return ops.infer(x, up.weight, down.weight, gate.weight, up.bias, down.bias, gate.bias)


class ReLUMLPLayout(nn.Module):
    """What Transformers' KernelConfig makes in the place of such a block before it loads weights: the block itself."""

    def __init__(self, config, intermediate_size=None):
        super().__init__()
        from transformers.activations import ACT2FN

        hidden, bias = config.hidden_size, getattr(config, "mlp_bias", False)
        intermediate = intermediate_size or config.intermediate_size
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
