"""vLLM's Qwen3.5, whose linear attention keeps SiLU: models of a `model_type` of our own.

What is used of vLLM is alike in 0.26 and 0.32, but that 0.26 loads no text model without the part that sees.
"""

from typing import Any

from vllm.model_executor.models.qwen3_5 import (
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5ProcessingInfo,
    Qwen3VLDummyInputsBuilder,
    Qwen3VLMultiModalProcessor,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from hf_twell.serving.vllm_plugin.models import SparseBlocks


class SparseQwen3_5ForCausalLM(SparseBlocks, Qwen3_5ForCausalLM):
    pass


class SeeingInfo(Qwen3_5ProcessingInfo):
    """Reads our config; vLLM 0.26 looks for a class of its own."""

    def get_hf_config(self) -> Any:
        return self.ctx.get_hf_config()


@MULTIMODAL_REGISTRY.register_processor(
    Qwen3VLMultiModalProcessor, info=SeeingInfo, dummy_inputs=Qwen3VLDummyInputsBuilder
)
class SparseQwen3_5ForConditionalGeneration(SparseBlocks, Qwen3_5ForConditionalGeneration):
    pass
