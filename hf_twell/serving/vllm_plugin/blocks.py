"""What stands in vLLM's layers in place of their feed-forward blocks, and in these in place of SiLU."""

import torch
from torch import nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from hf_twell.dispatch.activity import Activity
from hf_twell.serving.vllm_plugin import operator  # noqa: F401  defines torch.ops.hf_twell_vllm.ffn


class ReluAndMul(nn.Module):
    """Formula: h = relu(gate) * up. Shapes: (..., 2F), gate before up; returns (..., F)."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.relu(gate) * up


class SparseFfn(nn.Module):
    """A block by the kernels, chosen by its `activity`, on the linears of vLLM's own block, `stock`, before weights are
    loaded, so that these load under their names as before. Each rank of tensor parallelism computes its F / tp neurons,
    and what they give is summed."""

    def __init__(self, stock: nn.Module, activity: Activity, asked: bool) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = stock.gate_up_proj, stock.down_proj
        self.density, self.union, self.asked = activity.density, activity.union, asked
        for linear in (self.gate_up_proj, self.down_proj):
            linear.quant_method = WeightAsLoaded()
        # By columns, which kernels read: the same shape, so weights are copied into it as into the stock one.
        weight = self.down_proj.weight
        weight.data = torch.empty_like(weight.t(), memory_format=torch.contiguous_format).t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate_up_proj.weight, self.down_proj.weight
        y = torch.ops.hf_twell_vllm.ffn(x, *weights, self.density, self.union, self.asked)
        if self.down_proj.reduce_results and self.down_proj.tp_size > 1:
            y = tensor_model_parallel_all_reduce(y)
        return y


class WeightAsLoaded(UnquantizedLinearMethod):
    """A linear whose weight stays a matrix: on a CPU vLLM packs it anew after loading, and drops the matrix."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return nn.functional.linear(x, layer.weight, bias)
