"""Which way each layer of a sparse model goes in vLLM, decided once, before anything is compiled or captured.

A layer whose density is known goes by the operator, which takes kernels at the numbers of tokens where they are faster.
One that nothing can be gained for stays vLLM's own block, with ReLU: it then quantizes, takes adapters and adds biases
as vLLM does.
"""

import math
from dataclasses import dataclass

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

import hf_twell
from hf_twell.ops import api, policy
from hf_twell.serving.vllm_plugin import quantized
from hf_twell.serving.vllm_plugin.density import known_densities, known_settings

# On a CPU a weight lies either as kernels read it or packed for vLLM's matmuls, at all numbers of tokens. Those matmuls
# are faster than PyTorch's, by which the policy's limits were measured: two cores with AVX-512 BF16, D=2048, F=5632,
# bfloat16, 64 to 1,024 tokens, break even between 5 and 10 %. Its int8 is faster still: one core with AVX-512 VNNI, the
# same block, 4 to 256 tokens, breaks even between 2 and 5 % (at 2 %: 0.96 to 1.17 times its speed; one token: 2.2).
MAX_DENSITY_CPU, MAX_DENSITY_CPU_INT8, MANY_TOKENS = 0.05, 0.02, 1 << 20
HOW_TO_CHANGE = (
    "to use kernels, store it with `hf-twell sparsify MODEL OUT --text FILE`, or give it: "
    """--additional-config '{"hf_twell": {"density": 0.01}}'"""
)

# On a GPU vLLM's 8-bit matmuls are faster than its 16-bit ones, by which the policy's limits were measured. One H200,
# for 1, 16, 64 and 128 sequences: of 0.5 % active neurons 1.32, 1.16, 1.04 and 0.97 times its speed in fp8, and 1.36,
# 1.21, 1.07 and 1.00 in int8; of 2.1 %, before `norms`, 1.23, 0.99, 0.95 and 0.96, and 1.27, 1.03, 0.95 and 0.99.
MAX_DENSITY_CUDA_8BIT = 0.01
NOT_TIMED = (
    "and kernels for them have been timed on GPUs of compute capability 9.0 alone; to use them, give "
    """--additional-config '{"hf_twell": {"kernels": true}}'"""
)


@dataclass
class Plan:
    """Attributes:
    densities: of each layer index that was asked about, what its operator gets, or None for the plain way.
    summary: one line that says so.
    """

    densities: dict[int, float | None]
    summary: str

    def key(self) -> list:
        """As JSON, for the key of a cache of compiled code."""
        return [hf_twell.__version__, sorted(self.densities.items())]


def decide(vllm_config, blocks: dict[int, torch.nn.Module], chosen: list[int]) -> Plan:
    """The way of each of these stock blocks, by layer index, their weights not being loaded yet.

    Args:
        chosen: indices of the layers that kernels may compute.

    Raises:
        ValueError: a density in `additional_config` or in the checkpoint's `twell` entry that cannot be one.
    """
    config = vllm_config.model_config.hf_config
    entry = getattr(config, "twell", None) or {}
    known, source = known_densities(vllm_config.additional_config, entry, config.num_hidden_layers)
    off, asked = None, known_settings(vllm_config.additional_config).get("kernels")
    if asked is False:
        off = "additional_config turns the kernels off"
    elif vllm_config.lora_config is not None:
        off = "LoRA is on"
    densities, reasons = {}, []
    for index, block in blocks.items():
        problem = off or _problem(block, asked is True)
        if problem is None and index not in chosen:
            problem = "the checkpoint's twell entry leaves them out"
        if problem is None and known is None:
            problem = f"{source}; {HOW_TO_CHANGE}"
        densities[index] = None
        if problem is None:
            densities[index] = _operator_density(known[index], block.gate_up_proj, asked is True)
            problem = None if densities[index] is not None else "they are too dense for kernels to be faster"
        reasons += [] if problem in (None, *reasons) else [problem]
    return Plan(densities, _summary(densities, known, source, reasons))


def _operator_density(density: float, gate_up: torch.nn.Module, asked: bool) -> float | None:
    """What the operator gets in place of a block's density; None where the block should not use it.

    Args:
        asked: whether `additional_config` asks for kernels.
    """
    block = gate_up.weight.numel() // 2, gate_up.params_dtype, gate_up.weight.device.type
    eight_bits = gate_up.weight.element_size() == 1
    if gate_up.weight.is_cuda and eight_bits and not asked and density > MAX_DENSITY_CUDA_8BIT:
        return None
    most = MAX_DENSITY_CPU_INT8 if gate_up.weight.dtype == torch.int8 else MAX_DENSITY_CPU
    if gate_up.weight.is_cpu and density > min(most, policy.max_density(MANY_TOKENS, *block)):
        return None
    same = policy.same_answers(density, *block)
    return same if same < math.inf else None


def _problem(block, asked: bool) -> str | None:
    """Why the kernels do not compute this block as vLLM has built it, or None; `asked`: whether they are asked for."""
    linears = block.gate_up_proj, block.down_proj
    if any(linear.bias is not None for linear in linears):
        return "they have biases"
    if quantized.is_quantized(block):
        if problem := quantized.problem(block):
            return f"their weights are quantized, and {problem}"
        weight = block.gate_up_proj.weight
        if weight.is_cuda and not asked and torch.cuda.get_device_capability(weight.device) != (9, 0):
            return f"their weights are quantized, {NOT_TIMED}"
    elif not all(type(linear.quant_method) is UnquantizedLinearMethod for linear in linears):
        return "their weights are quantized in a way for which there are no kernels"
    device, dtype = block.gate_up_proj.weight.device.type, block.gate_up_proj.params_dtype
    allowed = (torch.bfloat16, torch.float16, *([torch.float32] if device == "cpu" else []))
    if dtype not in allowed:
        return f"they compute in {dtype} on {device}"
    width, hidden = block.gate_up_proj.weight.shape
    if problem := api.too_large(width // 2, hidden):
        return f"they have {problem}"
    if api.resolve("auto", device) == "reference":  # compiles them now, not in a capture; says why it cannot
        return f"no compiled kernels could be had for {device}"
    return None


def _summary(densities, known, source, reasons) -> str:
    total, sparse = len(densities), sum(density is not None for density in densities.values())
    parts = [f"{sparse} of {total} feed-forward blocks use the sparse kernels where these are faster"]
    if sparse:
        shares = [known[index] for index, density in densities.items() if density is not None]
        parts.append(f"at densities of {min(shares):.2%} to {max(shares):.2%}, from {source}")
    if reasons:
        parts.append(f"{'the others are' if sparse else 'they are'} plain ReLU blocks: {'; '.join(reasons)}")
    return "hf_twell: " + ", ".join(parts)
