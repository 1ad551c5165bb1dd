"""vLLM's mixtures of experts, of a `model_type` of our own: ReLU in the experts, by kernels where these are faster.

What is used of vLLM is alike in 0.26 (by its source, on GPUs) and 0.32: a MoE layer with `routed_experts`, whose method
computes them from two parameters of all experts, and may be exchanged.
"""

from typing import Any

import torch
from torch import library, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.models.mixtral import MixtralForCausalLM
from vllm.model_executor.models.olmoe import OlmoeForCausalLM
from vllm.model_executor.models.qwen2_moe import Qwen2MoeForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM
from vllm.model_executor.utils import replace_parameter

from hf_twell.dispatch.activity import UNKNOWN, Activity
from hf_twell.dispatch.choose import choose_experts, takes_experts
from hf_twell.dispatch.key import key_of
from hf_twell.ops import experts
from hf_twell.serving.vllm_plugin.models import SparseBlocks
from hf_twell.serving.vllm_plugin.places import Place


class SparseMixture(SparseBlocks):
    """Mixin put before a stock mixture's class."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **options: Any) -> None:
        parallel = vllm_config.parallel_config
        refused = {
            "data parallelism": parallel.data_parallel_size > 1,
            "--enable-eplb": parallel.enable_eplb,
            "LoRA": vllm_config.lora_config is not None,
        }
        for what in (name for name, is_on in refused.items() if is_on):
            raise ValueError(
                f"the plugin of hf_twell serves no sparse mixture of experts with {what}; leave it out (tensor "
                "parallelism and --enable-expert-parallel work, and an adapter can be merged into its base)"
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix, **options)

    def replace(self, place: Place, activity: Activity | None, asked: bool) -> None:
        if not isinstance(place.block, MoERunner):
            super().replace(place, activity, asked)
            return
        routed = place.block.routed_experts
        if type(routed.quant_method) is not UnquantizedFusedMoEMethod:
            raise ValueError(
                f"{routed.layer_name} is quantized ({type(routed.quant_method).__name__}), and of routed experts the "
                "plugin of hf_twell computes those in 16 and 32 bits alone; serve the model without quantization"
            )
        place.block._replace_quant_method(ReluExperts(routed, activity or UNKNOWN, asked))


class SparseMixtralForCausalLM(SparseMixture, MixtralForCausalLM):
    pass


class SparseOlmoeForCausalLM(SparseMixture, OlmoeForCausalLM):
    pass


class SparseQwen2MoeForCausalLM(SparseMixture, Qwen2MoeForCausalLM):
    pass


class SparseQwen3MoeForCausalLM(SparseMixture, Qwen3MoeForCausalLM):
    pass


class SparseQwen3NextForCausalLM(SparseMixture, Qwen3NextForCausalLM):
    pass


class ReluExperts(UnquantizedFusedMoEMethod):
    """What a layer's routed experts, vLLM's module `routed` whose weights are not loaded yet, are computed by in place
    of vLLM's method, which built their parameters: by kernels where `activity` says so, else on a GPU by vLLM's own
    Triton kernels with ReLU between them, and on a CPU by matmuls. A GPU decides when a CUDA graph is captured, or in
    each call: vLLM's compiler does not look in here. There down_proj is kept by columns, too, as Triton reads rows.
    Each rank of tensor parallelism has a part of every expert, and one of expert parallelism all of its own; vLLM sums
    what they give."""

    def __init__(self, routed: nn.Module, activity: Activity, asked: bool) -> None:
        super().__init__(routed.moe_config)
        self.activity, self.asked, self.on_cpu = activity, asked, routed.w13_weight.device.type == "cpu"
        if not self.on_cpu:
            self.unquantized_backend, self.experts_cls = UnquantizedMoeBackend.TRITON, triton_with_relu()
        for weight in (routed.w13_weight, routed.w2_weight):
            weight.data.zero_()  # vLLM may have made them larger than the checkpoint's, for other kernels
        if self.on_cpu and activity.density is not None:  # by columns, which kernels read
            down = routed.w2_weight
            down.data = torch.zeros_like(down.mT, memory_format=torch.contiguous_format).mT

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if self.on_cpu:  # where vLLM packs the weights
            return
        super().process_weights_after_loading(layer)
        if self.activity.density is not None:
            replace_parameter(layer, "w2_by_column", layer.w2_weight.data.mT.contiguous(), prefer_copy=True)

    def forward_native(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input) -> torch.Tensor:
        if self.on_cpu:
            weights = layer.w13_weight, layer.w2_weight
            known = self.activity.density, self.activity.union, self.asked
            return torch.ops.hf_twell_vllm.experts(x, topk_ids, topk_weights, *weights, layer.expert_map, *known)
        if self.takes_kernels(layer, x, topk_ids.numel()):
            index = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]  # -1 of another rank's
            gate, up = layer.w13_weight.chunk(2, dim=1)
            return torch.ops.hf_twell.experts(x, index, topk_weights, gate, up, layer.w2_by_column.mT)
        options = {"shared_experts": shared_experts, "shared_experts_input": shared_experts_input}
        return super().forward_native(layer, x, topk_weights, topk_ids, **options)

    def takes_kernels(self, layer: nn.Module, x: torch.Tensor, pairs: int) -> bool:
        """Whether a GPU computes a call by kernels, of so many pairs of a token and an expert, of all ranks."""
        if self.activity.density is None:
            return False
        down = layer.w2_weight
        key = key_of(x, layer.w13_weight[0, : down.shape[2]], down[0], asked=self.asked)
        key = key.of_expert(pairs, layer.global_num_experts)
        return takes_experts(key, pairs, len(down)) and choose_experts(key, self.activity) == "kernels"


def triton_with_relu() -> type[modular_kernel.FusedMoEExperts]:
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts  # which a CPU does without

    class ReluTritonExperts(TritonExperts):
        def activation(self, activation, output: torch.Tensor, input: torch.Tensor, **options: Any) -> None:
            torch.ops._C.fatrelu_and_mul(output, input, 0.0)  # vLLM's own: relu(gate) * up

    return ReluTritonExperts


def _experts(
    x: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    here: torch.Tensor | None,
    density: float | None,
    union: float | None,
    asked: bool,
) -> torch.Tensor:
    """Routed experts by kernels where these are faster at the given activity, else by plain matmuls, as at none.

    Shapes: as in `hf_twell.ops.experts`; here (all experts,): this rank's number of each, -1 of another's; None: all.
    """
    if here is not None:
        index = here[index.long()]
        index = index.where(index >= 0, len(down))
    way = "plain"
    if density is not None:
        mine = index[index < len(down)]
        key = key_of(x, gate_up[0, : down.shape[2]], down[0], asked=asked)
        key = key.of_expert(mine.numel(), len(mine.unique()))
        way = choose_experts(key, Activity(density, union=union))
    return experts.by_expert(x, index, weight, gate_up, down, way=way)


library.define(
    "hf_twell_vllm::experts",
    "(Tensor x, Tensor index, Tensor weight, Tensor gate_up, Tensor down, Tensor? here, float? density, float? union, "
    "bool asked) -> Tensor",
)
library.impl("hf_twell_vllm::experts", "CompositeExplicitAutograd", _experts)
library.register_fake("hf_twell_vllm::experts", lambda x, *_: x.new_empty(x.shape))
