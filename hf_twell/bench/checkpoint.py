"""What `hf-twell bench prefill MODEL` and `generate MODEL` measure: a sparse checkpoint on text of the user's.

Its sparse blocks stand beside the same weights in stock code; results are checked first, as those of random models are.
"""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_twell.bench.environment import environment
from hf_twell.bench.generate import PROMPT_TOKENS, time_generate
from hf_twell.bench.models import time_prefill
from hf_twell.bench.progress import Report, silent
from hf_twell.convert.sparsify import unpatch
from hf_twell.measure.inference import blocks_on_kernels, model_context
from hf_twell.measure.sparsity import measure_sparsity
from hf_twell.ops import api


@torch.no_grad()
def bench_checkpoint_prefill(
    model: PreTrainedModel,
    ids: torch.Tensor,
    *,
    batch: int = 1,
    length: int | None = None,
    repeats: int = 5,
    compile: bool = True,
    energy: bool = False,
    report: Report = silent,
) -> dict:
    """One forward pass over `batch` passages of a text, as `bench_prefill`.

    Args:
        model: a sparsified model in evaluation mode, on the device to measure.
        ids: the text's token ids, (tokens,).
        length: of a passage; by default the model's context, at most 2,048.

    Raises:
        ValueError: too little text, or logits less accurate than twice eager PyTorch's.
    """
    length = model_context(model, length)
    text = passages(ids, batch, length).to(model.device)
    report("checking")
    dense = unpatch(copy.deepcopy(model))
    return {
        "bench": "prefill",
        "batch": batch,
        "length": length,
        **_describe(model, dense, text),
        "kv_cache": False,
        **time_prefill(model, dense, text, repeats=repeats, compile=compile, energy=energy, report=report),
        "sparse_layers_on_kernels": blocks_on_kernels(model, text),
        **environment(model.device),
    }


@torch.no_grad()
def bench_checkpoint_generate(
    model: PreTrainedModel,
    ids: torch.Tensor,
    *,
    batch: int = 1,
    new_tokens: int = 128,
    repeats: int = 3,
    compile: bool = True,
    energy: bool = False,
    steps_only: bool = False,
    report: Report = silent,
) -> dict:
    """Greedy decoding after the first tokens of `batch` passages, as `bench_generate`; steps read the passages' own.

    Args, Raises: as `bench_checkpoint_prefill`.
    """
    text = passages(ids, batch, model_context(model, PROMPT_TOKENS + new_tokens)).to(model.device)
    dense = unpatch(copy.deepcopy(model))
    options: dict[str, Any] = {
        "repeats": repeats,
        "compile": compile,
        "energy": energy,
        "steps_only": steps_only,
        "report": report,
    }
    row = {
        "bench": "generate",
        "batch": batch,
        "new_tokens": new_tokens,
        **_describe(model, dense, text),
        **time_generate(model, dense, text, **options),
        "sparse_layers_on_kernels": blocks_on_kernels(model, text[:, -1:]),
        **environment(model.device),
    }
    row.pop("recited", None)  # random models alone have a text to recite
    return row


def passages(ids: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """`batch` passages of `length` tokens, from places spread evenly over a text."""
    if len(ids) < batch * length:
        raise ValueError(
            f"the text has {len(ids):,} tokens, and {batch:,} sequences of {length:,} take {batch * length:,}; give "
            "more --text, or a smaller --batch, --length or --new-tokens"
        )
    starts = torch.arange(batch) * (len(ids) // batch)
    return ids[starts[:, None] + torch.arange(length)]


def _describe(model, dense, text) -> dict:
    sparsity, config = measure_sparsity(dense, text.split(1)), model.config.get_text_config()
    return {
        "model": str(model.config._name_or_path) or type(model).__name__,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "backend": api.resolve("auto", model.device.type),
        "l0": round(sparsity["l0"], 2),
        "density": round(sparsity["density"], 5),
        "unions": {run: share and round(share, 5) for run, share in sparsity["unions"].items()},
        "layer_l0": [round(layer["l0"], 2) for layer in sparsity["layers"]],
    }
