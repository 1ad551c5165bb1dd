"""vLLM's models with ReLU blocks. A model with another activation is left as it is.

What is used of vLLM is alike in 0.26 and 0.32: the models' classes, `mlp` with `gate_up_proj`, `act_fn` and `down_proj`
in their layers, and `UnquantizedLinearMethod`. A version that differs gets its case here.
"""

import contextlib
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import PPMissingLayer

from hf_twell.convert.sparsify import check_entry, chosen_layers
from hf_twell.serving.vllm_plugin import plan, quantized
from hf_twell.serving.vllm_plugin.blocks import ReluAndMul, SparseFfn
from hf_twell.serving.vllm_plugin.norms import replace_norms

if TYPE_CHECKING:  # what the mixin is put before
    from vllm.model_executor.models.llama import LlamaForCausalLM as Stock
else:
    Stock = object

logger = init_logger("vllm.hf_twell")  # a child of the logger that has a handler


class SparseBlocks(Stock):
    """Mixin put before a stock model's class."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **options: Any) -> None:
        config = vllm_config.model_config.hf_config
        check_entry(config)
        if getattr(config, "hidden_act", None) != "relu":
            super().__init__(vllm_config=vllm_config, prefix=prefix, **options)
            return
        with _called_silu(config):
            super().__init__(vllm_config=vllm_config, prefix=prefix, **options)
        blocks = {
            index: layer.mlp for index, layer in enumerate(self.model.layers) if not isinstance(layer, PPMissingLayer)
        }
        decided = plan.decide(vllm_config, blocks, chosen_layers(config, None, config.num_hidden_layers))
        for index, block in blocks.items():
            activity = decided.activities[index]
            if activity is None:
                block.act_fn = ReluAndMul()
            elif quantized.is_quantized(block):
                self.model.layers[index].mlp = quantized.SparseQuantizedFfn(block, activity.density, decided.asked)
            else:
                self.model.layers[index].mlp = SparseFfn(block, activity)
        norms = replace_norms(self.model, [index for index in blocks if decided.activities[index] is not None])
        # The key of vLLM's compile cache reads this, but neither the environment nor what a package decides.
        if isinstance(vllm_config.additional_config, dict):  # an object of a platform's plugin has a key of its own
            vllm_config.additional_config = {**vllm_config.additional_config, "hf_twell_plan": [decided.key(), norms]}
        logger.info("%s", decided.summary)


class SparseLlamaForCausalLM(SparseBlocks, LlamaForCausalLM):
    pass


class SparseMistralForCausalLM(SparseBlocks, MistralForCausalLM):
    pass


class SparseQwen2ForCausalLM(SparseBlocks, Qwen2ForCausalLM):
    pass


class SparseQwen3ForCausalLM(SparseBlocks, Qwen3ForCausalLM):
    pass


@contextlib.contextmanager
def _called_silu(config):
    """Stock blocks are built with no other activation than SiLU; theirs is replaced right after."""
    config.hidden_act = "silu"
    try:
        yield
    finally:
        config.hidden_act = "relu"
