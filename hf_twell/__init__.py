"""Sparse ReLU feed-forward blocks for Hugging Face language models."""

import importlib

__version__ = "0.1.0"

# Loaded at first use, so that `hf-twell --help` does not wait for PyTorch and Transformers.
_MODULE_OF = {
    "L1Penalty": "train.penalty",
    "SparsityCallback": "train.callbacks",
    "TwellLlamaForCausalLM": "models.custom",
    "TwellQwen2ForCausalLM": "models.custom",
    "TwellQwen3ForCausalLM": "models.custom",
    "TwellQwen3_5ForCausalLM": "models.custom",
    "TwellQwen3_5ForConditionalGeneration": "models.custom",
    "evaluate": "evaluation.harness",
    "last_checkpoint": "files.checkpoints",
    "load_adapter": "models.adapters",
    "measure_sparsity": "measure.sparsity",
    "push_to_hub": "models.hub",
    "save_adapter": "models.adapters",
    "sparsify": "convert.sparsify",
    "unpatch": "convert.sparsify",
    "use_model_card": "train.trainer_card",
}
__all__ = ["__version__", "ops", *_MODULE_OF]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name):  # without hints, as typing would be imported for them
    if name == "ops":
        return importlib.import_module("hf_twell.ops")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hf_twell' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"hf_twell.{_MODULE_OF[name]}"), name)
