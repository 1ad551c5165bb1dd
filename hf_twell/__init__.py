"""Sparse ReLU feed-forward blocks for Hugging Face language models."""

import importlib

__version__ = "0.1.0"

# Loaded at first use, so that `hf-twell --help` does not wait for PyTorch and Transformers.
_MODULE_OF = {
    "L1Penalty": "penalty",
    "SparsityCallback": "callbacks",
    "TwellLlamaForCausalLM": "custom_models",
    "TwellQwen2ForCausalLM": "custom_models",
    "TwellQwen3ForCausalLM": "custom_models",
    "evaluate": "evaluation",
    "last_checkpoint": "checkpoints",
    "load_adapter": "adapters",
    "measure_sparsity": "measurement",
    "push_to_hub": "hub",
    "save_adapter": "adapters",
    "sparsify": "convert",
    "unpatch": "convert",
    "use_model_card": "trainer_card",
}
__all__ = ["__version__", "ops", *_MODULE_OF]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str):
    if name == "ops":
        return importlib.import_module("hf_twell.ops")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hf_twell' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"hf_twell.{_MODULE_OF[name]}"), name)
