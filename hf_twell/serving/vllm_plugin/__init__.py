"""What makes vLLM serve sparse checkpoints: their models, registered under the names of the stock ones or of our own.

vLLM loads it by the entry point in pyproject.toml, in each of its processes. `models` and `hybrid` put the blocks in,
`plan` decides which way each goes, `blocks` computes them by the operator of `operator`, `quantized` those of 8-bit
checkpoints, and `norms` what lies between them and attention. No model's code is imported before one is loaded.
"""

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Of a `model_type` of this package's own, each "Twell" before the stock one, which vLLM has or has not.
OWN_ARCHITECTURES = ("TwellQwen3_5ForCausalLM", "TwellQwen3_5ForConditionalGeneration")


def register() -> None:
    """Have vLLM load these architectures by classes of ours, which leave a model as it is unless it uses ReLU."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from hf_twell.blocks import modeling_twell

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f"hf_twell.serving.vllm_plugin.models:Sparse{name}")
    modeling_twell.register()
    for name in OWN_ARCHITECTURES:
        stock = name.removeprefix("Twell")
        if stock not in ModelRegistry.get_supported_archs():
            continue  # vLLM then says that it does not know the model
        ModelRegistry.register_model(name, f"hf_twell.serving.vllm_plugin.hybrid:Sparse{stock}")
        if stock in MODELS_CONFIG_MAP:  # what vLLM sets of its own for this architecture
            MODELS_CONFIG_MAP[name] = MODELS_CONFIG_MAP[stock]
