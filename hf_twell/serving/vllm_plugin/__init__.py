"""What makes vLLM serve sparse checkpoints: their models, registered under the names of the stock ones.

vLLM loads it by the entry point in pyproject.toml, in each of its processes. `models` puts the blocks in, `plan`
decides which way each goes, `blocks` computes them by the operator of `operator`, `quantized` those of 8-bit
checkpoints, and `norms` what lies between them and attention. Nothing is imported before a model is loaded.
"""

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def register() -> None:
    """Have vLLM load these architectures by classes of ours, which leave a model as it is unless it uses ReLU."""
    from vllm import ModelRegistry

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f"hf_twell.serving.vllm_plugin.models:Sparse{name}")
