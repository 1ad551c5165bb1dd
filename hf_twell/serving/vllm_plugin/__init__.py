"""What makes vLLM serve sparse checkpoints: their models, registered under the names of the stock ones or of our own.

vLLM loads it by the entry point in pyproject.toml, in each of its processes. `models`, `hybrid` and `experts` put the
blocks in, `places` says where, `plan` decides which way each goes, `blocks` computes them by that of `operator`,
`quantized` those of 8-bit checkpoints, and `norms` what lies between them and attention. No model's code is imported
before one is loaded.
"""

import importlib.util
from pathlib import Path
from typing import Any

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Of a `model_type` of this package's own, each "Twell" before the stock one, which vLLM has or has not.
HYBRIDS = ("TwellQwen3_5ForCausalLM", "TwellQwen3_5ForConditionalGeneration")
MIXTURES = tuple(f"Twell{name}ForCausalLM" for name in ("Mixtral", "Olmoe", "Qwen2Moe", "Qwen3Moe", "Qwen3Next"))
OWN_ARCHITECTURES = (*HYBRIDS, *MIXTURES)


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
        if lacking(name, "", stock in ModelRegistry.get_supported_archs()):
            # vLLM then says that it does not know the model; but of a text model it takes the one that sees, if we
            # have registered that, so what verifies its config says it.
            MODELS_CONFIG_MAP[name] = Refused
            continue
        module = "experts" if name in MIXTURES else "hybrid"
        ModelRegistry.register_model(name, f"hf_twell.serving.vllm_plugin.{module}:Sparse{stock}")
        if stock in MODELS_CONFIG_MAP:  # what vLLM sets of its own for this architecture
            MODELS_CONFIG_MAP[name] = MODELS_CONFIG_MAP[stock]


class Refused:
    """Verifies, for vLLM, the config of a model of our own type that the vLLM here is `lacking`."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        from vllm import ModelRegistry

        name = model_config.architecture
        has_stock = name.removeprefix("Twell") in ModelRegistry.get_supported_archs()
        raise ValueError(lacking(name, model_config.hf_config.model_type, has_stock))


def lacking(name: str, kind: str, has_stock: bool) -> str | None:
    """What the vLLM here lacks for a model of our own, of `OWN_ARCHITECTURES` and its `model_type`, or None.

    `has_stock`: whether it has the stock model.
    """
    stock = name.removeprefix("Twell")
    if not has_stock:
        return f"the vLLM here has no {stock}, from which the plugin of hf_twell makes {kind}; vLLM 0.32 has"
    if name in MIXTURES and not exchanges_experts():
        return f"the vLLM here has no layer of experts in which the plugin of hf_twell could put {kind}; vLLM 0.32 has"
    return None


def exchanges_experts() -> bool:
    """Whether the vLLM here has the layer that `experts` uses, by its files: to import vLLM takes long."""
    spec = importlib.util.find_spec("vllm")
    layers = Path(str(spec.origin)).parent / "model_executor" / "layers" if spec else Path()
    return (layers / "fused_moe" / "routed_experts.py").is_file()
