"""Blocks of vLLM's 8-bit linears by the kernels: compressed-tensors with a scale for each row, x quantized as it comes.

fp8: as vLLM's own linears, kernels quantize x by tokens for gate and up, but in calls of more than 64 tokens alone, and
never h for down. int8: they leave x and h as they are. So both are nearer to exact arithmetic than vLLM's own.

What is used of vLLM is alike in 0.26 and 0.32: a linear's `scheme` with `strategy` and `is_static_input_scheme`, and in
it the class that multiplies, `fp8_linear` or, of int8, `kernel` with its `config`; `weight` and `weight_scale`, (N, K)
and (N, 1) as loaded; on a GPU `weight` is the view (K, N) of the same matrix afterwards. A version that differs gets
its case here.
"""

import torch
from torch import library, nn
from vllm.config import get_current_vllm_config
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod
from vllm.utils.torch_utils import LayerNameType, _encode_layer_name, _resolve_layer_name, direct_register_custom_op

from hf_twell.dispatch.activity import Activity
from hf_twell.dispatch.choose import choose
from hf_twell.dispatch.key import key_of
from hf_twell.ops import api, reference
from hf_twell.serving.vllm_plugin.blocks import ReluAndMul

logger = init_logger("vllm.hf_twell")

# Scheme, what its weights are, and the classes by which vLLM multiplies them and leaves the matrix as rows of values.
# Others (Marlin, Humming) pack it for themselves. On a CPU ours multiply in their place, whatever they would have been.
SCHEMES = {
    "CompressedTensorsW8A8Fp8": (torch.float8_e4m3fn, ("Cutlass", "ChannelWiseTorch")),
    "CompressedTensorsW8A8Int8": (torch.int8, ("Cutlass", "Triton")),
}


def is_quantized(block: nn.Module) -> bool:
    """Whether both of a stock block's linears are compressed-tensors' own."""
    return all(type(linear.quant_method) is CompressedTensorsLinearMethod for linear in _linears(block))


def problem(block: nn.Module) -> str | None:
    """Why no kernels read the weights of this quantized block as vLLM has built it, not loaded yet, or None."""
    schemes = [linear.scheme for linear in _linears(block)]
    device = next(block.parameters()).device.type
    names = sorted({type(scheme).__name__ for scheme in schemes})
    dtype, multiply = SCHEMES.get(names[0], (None, ()))
    fp8 = dtype != torch.int8
    if len(names) > 1 or dtype is None or (fp8 and device == "cpu"):
        return f"there are no kernels for {' and '.join(names)} on {device}"
    if any(scheme.strategy != "channel" for scheme in schemes):
        return "their scales are not one for each row"
    if any(scheme.is_static_input_scheme for scheme in schemes):
        return "their activations have scales of their own"
    if not all(fp8 or scheme.input_symmetric for scheme in schemes):
        return "their activations are not quantized symmetrically"
    classes = [type(scheme.fp8_linear if fp8 else scheme.kernel).__name__ for scheme in schemes]
    packed = [name for name in classes if device == "cuda" and not name.startswith(multiply)]
    if packed:
        return f"vLLM's {packed[0]} packs them"
    sizes = sorted({size for linear in _linears(block) for size in linear.weight.shape})
    if fp8 and any(size % 16 for size in sizes):
        return f"vLLM pads them, as not all of their sizes, {sizes}, are multiples of 16"
    return None


def _linears(block: nn.Module) -> tuple[nn.Module, nn.Module]:
    return block.gate_up_proj, block.down_proj


class SparseQuantizedFfn(nn.Module):
    """A block by the kernels where these are faster, else by vLLM's own linears, which keep their names.

    On a GPU kernels read gate and up where vLLM keeps them, but down by columns: `down_proj.weight_by_column`, D x F
    bytes more. On a CPU vLLM would drop the matrices, so there they stay as loaded, down by columns, and PyTorch's
    matmuls on dequantized weights stand in for vLLM's. Each rank of tensor parallelism computes its F / tp neurons,
    and what they give is summed.

    Args:
        stock: vLLM's block in which `problem` found none, whose weights are not loaded yet.
        density, asked: by which the kernels are chosen; see `hf_twell.serving.vllm_plugin.plan`.
    """

    def __init__(self, stock: nn.Module, density: float | None, asked: bool = False) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.density = stock.gate_up_proj, stock.down_proj, density
        self.asked, self.act_fn, weight = asked, ReluAndMul(), self.gate_up_proj.weight
        self.on_cpu, self.fp8 = weight.is_cpu, weight.dtype != torch.int8
        method = AsLoaded if self.on_cpu else WithRows
        for linear in _linears(self):
            linear.quant_method = method(linear.quant_method.quantization_config)
            linear.kernels_read = self.on_cpu  # else not before it is known how it lies after loading
        if self.on_cpu:
            weight = self.down_proj.weight
            weight.data = torch.empty_like(weight.t(), memory_format=torch.contiguous_format).t()
        else:
            self.down_proj.quant_method.keeps_columns = True
        self.name = self.gate_up_proj.prefix.removesuffix(".gate_up_proj")
        get_current_vllm_config().compilation_config.static_forward_context[self.name] = self  # for the operator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.hf_twell_vllm.quantized_ffn(x, _encode_layer_name(self.name))
        if self.down_proj.reduce_results and self.down_proj.tp_size > 1:
            y = tensor_model_parallel_all_reduce(y)
        return y

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's y. Shapes: x (..., D); returns (..., D)."""
        gate_up, down = self.gate_up_proj, self.down_proj
        if all(linear.kernels_read for linear in _linears(self)):
            gate, up = gate_up.quant_method.rows(gate_up).chunk(2)
            w_down = down.weight if self.on_cpu else down.weight_by_column.t()
            key = key_of(x, up, w_down, quantize_x=self.fp8, asked=self.asked, rival="vllm")
            way = choose(key, Activity(self.density))
            if way == "kernels":
                s_gate, s_up = gate_up.weight_scale.chunk(2)
                scales = {"s_up": s_up, "s_down": down.weight_scale, "s_gate": s_gate}
                return api.ffn(x, up, w_down, gate, **scales, quantize_x=self.fp8, key=key, way=way)
        rows = gate_up.quant_method.apply(gate_up, x)
        # On a GPU in one kernel, as vLLM's compiler, which would make one, does not look in here.
        in_one = torch.ops.hf_twell.activation
        h = self.act_fn(rows) if self.on_cpu else in_one(*rows.chunk(2, -1), None, None, None)
        return down.quant_method.apply(down, h)


class AsLoaded(CompressedTensorsLinearMethod):
    """A linear whose weight stays a matrix, and whose x stays as it is: on a CPU vLLM packs it and drops the matrix."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        # Plain parameters, as vLLM's own methods make them: with those that load a block takes 40 us more on the host.
        layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)
        layer.weight_scale = nn.Parameter(layer.weight_scale.data, requires_grad=False)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return reference.linear(x, layer.weight, layer.weight_scale, bias)

    def rows(self, layer: nn.Module) -> torch.Tensor:
        return layer.weight


class WithRows(CompressedTensorsLinearMethod):
    """vLLM's own linear on a GPU, whose matrix kernels read too.

    It may keep it by columns as well, as a parameter: new weights (`reload_weights`) and sleep then treat it as they do
    the others.
    """

    keeps_columns = False

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        (rows, columns), dtype = layer.weight.shape, layer.weight.dtype
        if self.keeps_columns:
            layer.weight_by_column = nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)
        super().process_weights_after_loading(layer)
        expected = ((columns, rows), (1, columns), dtype), ((rows, 1), (1, 1), torch.float32)
        kept = tuple(map(_layout, (layer.weight, layer.weight_scale)))
        layer.kernels_read = kept == expected
        if not layer.kernels_read:
            logger.warning(
                "hf_twell: the block of %s stays plain: vLLM keeps its weight and scale as %s, and kernels read %s",
                *(layer.prefix, kept, expected),
            )

    def rows(self, layer: nn.Module) -> torch.Tensor:
        return layer.weight.t()


def _layout(tensor: torch.Tensor | None) -> tuple:
    return () if tensor is None else (tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _quantized_ffn(x: torch.Tensor, name: LayerNameType) -> torch.Tensor:
    return get_forward_context().no_compile_layers[_resolve_layer_name(name)].compute(x)


def _quantized_ffn_fake(x: torch.Tensor, name: LayerNameType) -> torch.Tensor:
    return x.new_empty(x.shape)


# As vLLM's attention: the operator finds its block by name, and all layers share their compiled code.
_operators = library.Library("hf_twell_vllm", "FRAGMENT")
direct_register_custom_op("quantized_ffn", _quantized_ffn, fake_impl=_quantized_ffn_fake, target_lib=_operators)
