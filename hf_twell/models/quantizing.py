"""Sparse models in int8 or fp8, by torchao through Transformers: what both load again; kernels read it as it lies."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from hf_twell.blocks.architectures import FfnForm, dense_ffns
from hf_twell.convert.sparsify import sparsify
from hf_twell.models.loading import has_tokenizer, load_model

# torchao's own. "fp8-dynamic" has the values of "fp8", and what they are multiplied with is quantized, too.
CONFIGS = {
    "int8": "Int8WeightOnlyConfig",
    "fp8": "Float8WeightOnlyConfig",
    "fp8-dynamic": "Float8DynamicActivationFloat8WeightConfig",
}


def quantize(path: str | Path, weights: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """(model, tokenizer or None) of a sparse model, with quantized weights in its feed-forward blocks.

    Each row of a weight gets one float32 scale. The other linears stay as they are: no kernel of ours reads them, and
    torchao's own widen such weights in each call on a CPU.

    Args:
        weights: "int8", or "fp8" (e4m3, which no CPU kernel reads: torchao computes the blocks densely there): x stays
            as it is. "fp8-dynamic": e4m3, and x is quantized in each call (`hf_twell.ops.ffn`'s `quantize_x`), but not
            down's h: torchao makes NaN of a token that has no active neurons, and kernels leave h as it is anyway.

    Raises:
        ValueError, OSError: in one line; blocks that do not compute ReLU, weights that are quantized already, for
            "fp8-dynamic" those that torchao does not take, a file or an adapter in place of a model, or what
            `load_model` refuses.
        ImportError: torchao is missing.
    """
    kind = _weight_only(weights)  # which also tells that torchao is missing before anything is loaded
    from transformers import TorchAoConfig

    if not Path(path, "config.json").is_file():  # a GGUF, say, which would be dequantized for nothing, or an adapter
        raise ValueError(f"{path} is not the folder of a whole model; save one with `hf-twell sparsify`")
    model, tokenizer = load_model(path, None if has_tokenizer(path) else False, device="cpu")  # checked as any other
    sites = dense_ffns(model, "quantizing")
    if any(not isinstance(site.activation, nn.ReLU) for site in sites):
        raise ValueError(
            f"{path} does not compute ReLU, and quantized weights are not converted; make it sparse first (hf-twell "
            "sparsify, hf-twell train), and quantize the result"
        )
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(f"{path} is quantized already; give the model that it was made from")
    blocks = [getattr(site.module, name) for site in sites for name in site.form.linears]  # in order, for errors
    if weights == "fp8-dynamic":
        _check_dynamic(path, blocks)
    others = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module not in blocks]
    torchao = TorchAoConfig(kind, modules_to_not_convert=_patterns(others))
    config = model.config  # of one that sees, its text model's, with what is known of the blocks
    del model, sites, blocks
    quantized = AutoModelForCausalLM.from_pretrained(path, config=config, dtype="auto", quantization_config=torchao)
    for site in dense_ffns(quantized, "quantizing"):
        for name in site.form.linears:
            weight = getattr(site.module, name).weight
            assert hasattr(weight, "qdata"), f"{site.name}.{name}"
            _mend_zeros(weight)
            if weights == "fp8-dynamic" and name != site.form.down:
                make_dynamic(weight)
    if weights == "fp8-dynamic":  # each tensor in the file says for itself whether x is quantized for it
        quantized.config.quantization_config.quant_type = torchao_config(weights)
    return sparsify(quantized), tokenizer


def quantize_block(block: nn.Module, form: FfnForm, weights: str) -> None:
    """Give one feed-forward block the weights that `quantize` gives all, in place."""
    from torchao import quantization

    for name in form.linears:
        linear = getattr(block, name)
        quantization.quantize_(linear, _weight_only(weights))
        _mend_zeros(linear.weight)
        if weights == "fp8-dynamic" and name != form.down:
            make_dynamic(linear.weight)


def torchao_config(weights: str) -> Any:
    """torchao's config object for a kind of `CONFIGS`, which leaves Inductor's settings alone."""
    from torchao import quantization

    options = {"granularity": quantization.PerRow()} if weights == "fp8-dynamic" else {}
    return getattr(quantization, CONFIGS[weights])(**options, set_inductor_config=False)


def _weight_only(weights: str):
    return torchao_config("fp8" if weights == "fp8-dynamic" else weights)


def make_dynamic(weight: torch.Tensor) -> None:
    """Make of one that torchao's Float8WeightOnlyConfig made what its dynamic config would have made, in place.

    The values are the same. By that config, torchao quantizes weights only where it finds a GPU that computes them.
    """
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    config = torchao_config("fp8-dynamic")
    weight.mm_config = config.mm_config
    weight.act_quant_kwargs = QuantizeTensorToFloat8Kwargs(
        config.activation_dtype, config.granularity[0], kernel_preference=config.kernel_preference
    )


def _mend_zeros(weight) -> None:
    """Rows of zeros (pruned neurons) are 0 / 0 in torchao's e4m3: NaN, for every token, with a scale of 0."""
    if weight.qdata.dtype == torch.float8_e4m3fn:
        weight.qdata.view(torch.int8).masked_fill_(weight.scale == 0, 0)


def _check_dynamic(path, linears) -> None:
    """torchao asks for this as well, but by an assertion, or passes over the weight; here it is a ValueError."""
    for linear in linears:
        if linear.weight.dtype != torch.bfloat16:
            raise ValueError(
                f"{path} is in {linear.weight.dtype}; torchao's fp8-dynamic takes bfloat16 alone: save the model in it "
                '(model.to(torch.bfloat16)), or take "int8" or "fp8"'
            )
        if any(size % 16 for size in linear.weight.shape):
            raise ValueError(
                f"{path} has feed-forward weights of shape {tuple(linear.weight.shape)}; torchao's fp8-dynamic takes "
                'multiples of 16 alone: take "int8" or "fp8"'
            )


def _patterns(names: list[str]) -> list[str]:
    """What Transformers knows these modules by: the last parts of their dotted names, each once, anywhere."""
    return sorted({f".*{name.rpartition('.')[2]}" for name in names})
