"""What `hf-twell bench prefill` measures, and the models that `generate` and `train` share with it."""

import copy

import torch
from transformers import PreTrainedModel

from hf_twell.bench.check import check_logits, wider_dtype
from hf_twell.bench.environment import DTYPES, environment
from hf_twell.bench.progress import Report, silent
from hf_twell.bench.timing import interleaved_ms, millijoules, peak_mib
from hf_twell.bench.workload_llama import check_layers, layer_statistics, make_llama, make_text
from hf_twell.blocks.architectures import decoder_of
from hf_twell.convert.sparsify import unpatch
from hf_twell.ops import api

CHECKED_SEQUENCES = 4  # so many are also computed in higher precision


@torch.no_grad()
def bench_prefill(
    *,
    l0: float = 30.0,
    batch: int = 64,
    length: int = 2048,
    dtype: str = "bfloat16",
    device: str = "cpu",
    repeats: int = 5,
    compile: bool = True,
    energy: bool = False,
    report: Report = silent,
    **shape: int,
) -> dict:
    """One forward pass over a batch of workload text, logits of the last position alone, no key-value cache kept.

    Compiled variants compile each decoder layer, in torch.compile's default mode: compiled as a whole, Transformers'
    attention mask would be materialized, and slow every variant down.

    Args:
        energy: also millijoules per token of the batch.
        report: told of what is being done.
        shape: of the model, for `make_llama`.

    Raises:
        ValueError: blocks without the workload's statistics, or logits less accurate than twice eager PyTorch's.
    """
    device = torch.device(device)
    model, dense, distinct = make_models(l0, dtype, device, shape, report)
    report("checking")
    text = make_text(model.config.vocab_size, batch, length, seed=2, device=device)
    description = describe(model, dense, telling(text, model), l0, distinct, dtype)
    return {
        "bench": "prefill",
        "batch": batch,
        "length": length,
        **description,
        "kv_cache": False,
        **time_prefill(model, dense, text, repeats=repeats, compile=compile, energy=energy, report=report),
        **environment(device),
    }


def time_prefill(
    model: PreTrainedModel,
    dense: PreTrainedModel,
    text: torch.Tensor,
    *,
    repeats: int,
    compile: bool,
    energy: bool,
    report: Report,
) -> dict:
    """What a sparse model and its dense twin take for a text (batch, length), results checked first."""
    device = text.device
    models = {"eager": dense, "sparse": model}
    outputs = {name: _last_logits(some, text) for name, some in models.items()}
    if compile:
        torch._dynamo.reset()
        models |= {"compiled": _with_compiled_layers(dense), "sparse_compiled": _with_compiled_layers(model)}
        outputs |= {name: _last_logits(models[name], text) for name in ("compiled", "sparse_compiled")}
    truth = _last_logits(wider(dense), text[:CHECKED_SEQUENCES])
    errors = check_logits(outputs, truth)
    del outputs, truth
    calls = {name: lambda turn=0, some=some: _last_logits(some, text) for name, some in models.items()}
    times = interleaved_ms(calls, repeats, device, report=report)
    ours, theirs = best(times)
    row = {
        **errors,
        **{f"{name}_ms": round(value, 3) for name, value in times.items()},
        "speedup": round(theirs / ours, 3),
    }
    for name, call in calls.items():
        if device.type == "cuda":
            report("memory and energy", name)
            row[f"{name}_peak_mib"] = peak_mib(call, device)
        if energy:
            row[f"{name}_mj_per_token"] = millijoules(call, device) / text.numel()
    return row


def make_models(
    l0: float, dtype: str, device: torch.device, shape: dict, report: Report
) -> tuple[PreTrainedModel, PreTrainedModel, float]:
    """The sparse model, the same as stock code with weights of its own, and the workload's distinct neurons in 64."""
    model, distinct = make_llama(l0, dtype=DTYPES[dtype], device=device, report=report, **shape)
    return model, unpatch(copy.deepcopy(model)), distinct


def telling(text: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """Enough of a text to tell a model's L0 by: a short batch's own says little."""
    if text.numel() >= 8192:
        return text[:8]
    return make_text(model.config.vocab_size, 8, 1024, seed=2, device=text.device)


def describe(
    model: PreTrainedModel, dense: PreTrainedModel, text: torch.Tensor, l0: float, distinct: float, dtype: str
) -> dict:
    layers = layer_statistics(dense, text)
    check_layers(layers, l0, distinct)
    config = model.config
    return {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "vocabulary": config.vocab_size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": dtype,
        "backend": api.resolve("auto", text.device.type),
        "l0": l0,
        "layer_l0": [round(layer["l0"], 2) for layer in layers],
        "workload_distinct_64": round(distinct, 1),
        "layer_distinct_64": [round(layer["distinct_64"], 1) for layer in layers],
    }


def best(values: dict[str, float]) -> tuple[float, float]:
    """The least of the sparse variants' values, and of the dense ones'."""
    ours = [value for name, value in values.items() if name.startswith("sparse")]
    return min(ours), min(value for name, value in values.items() if not name.startswith("sparse"))


def _last_logits(model, text):
    return model(text, use_cache=False, logits_to_keep=1).logits


def wider(model: PreTrainedModel) -> PreTrainedModel:
    """A copy in higher precision."""
    return copy.deepcopy(model).to(wider_dtype(model.dtype))


def sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The model's modules anew over the same parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def _with_compiled_layers(model):
    model = sharing_copy(model)
    for layer in decoder_of(model).layers:
        layer.compile(dynamic=False)
    return model
