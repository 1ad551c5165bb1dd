"""Sparse models in int8 or fp8, by torchao through Transformers: what both load again; kernels read it as it lies."""

from pathlib import Path

from torch import nn
from transformers import AutoModelForCausalLM

from hf_twell.blocks.architectures import find_ffns, loading_class
from hf_twell.convert.sparsify import sparsify
from hf_twell.files.configs import read_config
from hf_twell.models.loading import has_tokenizer, load_model

CONFIGS = {"int8": "Int8WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}  # torchao's


def quantize(path: str | Path, weights: str):
    """(model, tokenizer or None) of a sparse model, with quantized weights in its feed-forward blocks.

    Each row of a weight gets one float32 scale, and x stays as it is. The other linears stay as they are: no kernel of
    ours reads them, and torchao's own widen such weights in each call on a CPU.

    Args:
        weights: "int8", or "fp8" (e4m3, which no CPU kernel reads: torchao computes the blocks densely there).

    Raises:
        ValueError, OSError: in one line; blocks that do not compute ReLU, weights that are quantized already, a file
            or an adapter in place of a model, or what `load_model` refuses.
        ImportError: torchao is missing.
    """
    from torchao import quantization  # also tells that it is missing before anything is loaded
    from transformers import TorchAoConfig

    model, tokenizer = load_model(path, None if has_tokenizer(path) else False, device="cpu")  # checked as any other
    sites = find_ffns(model)
    if not Path(path).is_dir() or loading_class(read_config(path)) is not AutoModelForCausalLM:
        raise ValueError(f"{path} is not the folder of a model in stock form; save one with `hf-twell sparsify`")
    if any(not isinstance(site.activation, nn.ReLU) for site in sites):
        raise ValueError(
            f"{path} does not compute ReLU, and quantized weights are not converted; make it sparse first (hf-twell "
            "sparsify, hf-twell train), and quantize the result"
        )
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(f"{path} is quantized already; give the model that it was made from")
    blocks = {getattr(site.module, name) for site in sites for name in site.form.linears}
    others = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module not in blocks]
    kind = getattr(quantization, CONFIGS[weights])(set_inductor_config=False)
    config = TorchAoConfig(kind, modules_to_not_convert=_patterns(others))
    del model, sites, blocks
    quantized = AutoModelForCausalLM.from_pretrained(path, dtype="auto", quantization_config=config)
    for site in find_ffns(quantized):
        for name in site.form.linears:
            assert hasattr(getattr(site.module, name).weight, "qdata"), f"{site.name}.{name}"
    return sparsify(quantized), tokenizer


def _patterns(names: list[str]) -> list[str]:
    """What Transformers knows these modules by: the last parts of their dotted names, each once, anywhere."""
    return sorted({f".*{name.rpartition('.')[2]}" for name in names})
