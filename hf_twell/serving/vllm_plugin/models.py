"""vLLM's models with ReLU blocks. A model with another activation is left as it is.

What is used of vLLM is alike in 0.26 and 0.32: the models' classes, `mlp` with `gate_up_proj`, `act_fn` and `down_proj`
in their layers, and `UnquantizedLinearMethod`. A version that differs gets its case here.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from hf_twell.blocks.architectures import has_own_type, other_activations
from hf_twell.blocks.modeling_twell import PREFIX
from hf_twell.convert.sparsify import check_entry, chosen_layers
from hf_twell.dispatch.activity import Activity
from hf_twell.serving.vllm_plugin import plan, quantized
from hf_twell.serving.vllm_plugin.blocks import ReluAndMul, SparseFfn
from hf_twell.serving.vllm_plugin.norms import replace_norms
from hf_twell.serving.vllm_plugin.places import Place, places_of

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
        if other_activations(config):
            super().__init__(vllm_config=vllm_config, prefix=prefix, **options)
            return
        with _called_stock(config):
            super().__init__(vllm_config=vllm_config, prefix=prefix, **options)
        text_model: Any = getattr(self, "language_model", self)  # which a model that sees holds
        decoder = text_model.model
        places = places_of(decoder)
        chosen = chosen_layers(config, None, config.get_text_config().num_hidden_layers)
        decided = plan.decide(vllm_config, places, chosen)
        for number, place in places.items():
            self.replace(place, decided.activities[number], decided.asked)
        by_kernels = [place.layer for number, place in places.items() if decided.activities[number] is not None]
        norms = replace_norms(decoder, by_kernels)
        # The key of vLLM's compile cache reads this, but neither the environment nor what a package decides.
        if isinstance(vllm_config.additional_config, dict):  # an object of a platform's plugin has a key of its own
            vllm_config.additional_config = {**vllm_config.additional_config, "hf_twell_plan": [decided.key(), norms]}
        logger.info("%s", decided.summary)

    def replace(self, place: Place, activity: Activity | None, asked: bool) -> None:
        """Have the block there compute ReLU, by kernels where its activity is given."""
        block = place.block
        if activity is None:
            block.act_fn = ReluAndMul()
        elif quantized.is_quantized(block):
            setattr(place.owner, place.name, quantized.SparseQuantizedFfn(block, activity.density, asked))
        else:
            setattr(place.owner, place.name, SparseFfn(block, activity, asked))


class SparseLlamaForCausalLM(SparseBlocks, LlamaForCausalLM):
    pass


class SparseMistralForCausalLM(SparseBlocks, MistralForCausalLM):
    pass


class SparseQwen2ForCausalLM(SparseBlocks, Qwen2ForCausalLM):
    pass


class SparseQwen3ForCausalLM(SparseBlocks, Qwen3ForCausalLM):
    pass


@contextlib.contextmanager
def _called_stock(config: PreTrainedConfig) -> Iterator[None]:
    """Stock blocks are built with no other activation than SiLU, which is replaced right after; and layers of a model
    of our own type by the name of the stock one."""
    own = has_own_type(config)
    parts = {id(part): part for part in (config, config.get_text_config())}.values()
    for part in parts:
        if own:
            part.model_type = part.model_type.removeprefix(PREFIX)
        else:
            part.hidden_act = "silu"
    try:
        yield
    finally:
        for part in parts:
            if own:
                del part.model_type  # its class has our own
            else:
                part.hidden_act = "relu"
