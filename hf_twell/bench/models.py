"""What `hf-twell bench prefill` measures, and the models that `generate` and `train` share with it."""

import copy
from functools import cached_property
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from hf_twell.bench.check import check_logits, wider_dtype
from hf_twell.bench.environment import DTYPES, environment
from hf_twell.bench.progress import Report, silent
from hf_twell.bench.timing import interleaved_ms, millijoules, peak_mib
from hf_twell.bench.workload_llama import check_layers, layer_statistics, make_llama, make_text, typical_texts
from hf_twell.blocks.architectures import decoder_of
from hf_twell.convert.sparsify import unpatch
from hf_twell.measure.inference import blocks_on_kernels, model_context
from hf_twell.measure.sparsity import measure_sparsity
from hf_twell.ops import api

CHECKED_SEQUENCES = 4  # so many are also computed in higher precision


class How(NamedTuple):
    """How a model is measured: timed turns, whether compiled, too, and with energy per token; and who is told of it."""

    repeats: int = 3
    compile: bool = True
    energy: bool = False
    report: Report = silent


PLAIN = How()


class Subject:
    """A sparse model in evaluation mode, on the device to measure, and the same weights in stock code beside it."""

    recites = False  # whether generated text is known

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @cached_property
    def dense(self) -> PreTrainedModel:
        return unpatch(copy.deepcopy(self.model))

    def prompts(self, batch: int, length: int | None) -> torch.Tensor:
        """Token ids (batch, length)."""
        raise NotImplementedError

    def decoded(self, batch: int, length: int) -> tuple[torch.Tensor, dict]:
        """Texts (batch, length) whose tokens steps read, and what a row says of them."""
        return self.prompts(batch, length), {}

    def describe(self, text: torch.Tensor) -> dict:
        """What a row says of the model: its sizes, and its activity on a text."""
        config = self.model.config.get_text_config()
        return {
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "intermediate": config.intermediate_size,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "backend": api.resolve("auto", self.model.device.type),
        }


class RandomLlama(Subject):
    """A random Llama with the workload's statistics in every block; arguments as `make_llama` has them.

    Its methods raise ValueError where blocks, or texts, have other statistics than the workload.
    """

    recites = True

    def __init__(
        self, l0: float = 30.0, *, dtype: str = "bfloat16", device: str = "cpu", report: Report = silent, **shape: Any
    ) -> None:
        model, self.distinct = make_llama(l0, dtype=DTYPES[dtype], device=device, report=report, **shape)
        super().__init__(model)
        self.l0 = l0

    def prompts(self, batch: int, length: int | None) -> torch.Tensor:
        return make_text(self.model.config.vocab_size, batch, length or 2048, seed=2, device=self.model.device)

    def decoded(self, batch: int, length: int) -> tuple[torch.Tensor, dict]:
        return typical_texts(self.dense, batch, length, self.l0)

    def describe(self, text: torch.Tensor) -> dict:
        layers, config = self.statistics(text), self.model.config
        return {
            **super().describe(text),
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "vocabulary": config.vocab_size,
            "l0": self.l0,
            "layer_l0": [round(layer["l0"], 2) for layer in layers],
            "workload_distinct_64": round(self.distinct, 1),
            "layer_distinct_64": [round(layer["distinct_64"], 1) for layer in layers],
        }

    def statistics(self, text: torch.Tensor) -> list[dict]:
        """Those of each layer, checked; of other text where this is too short to tell L0 by."""
        layers = layer_statistics(self.dense, text[:8] if text.numel() >= 8192 else self.prompts(8, 1024))
        check_layers(layers, self.l0, self.distinct)
        return layers


class Checkpoint(Subject):
    """A sparse checkpoint of the user's on text of the user's, as token ids (tokens,)."""

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor) -> None:
        super().__init__(model)
        self.ids = ids

    def prompts(self, batch: int, length: int | None) -> torch.Tensor:
        return passages(self.ids, batch, model_context(self.model, length)).to(self.model.device)

    def describe(self, text: torch.Tensor) -> dict:
        sparsity = measure_sparsity(self.dense, text.split(1))
        return {
            "model": str(self.model.config._name_or_path) or type(self.model).__name__,
            **super().describe(text),
            "l0": round(sparsity["l0"], 2),
            "density": round(sparsity["density"], 5),
            "unions": {run: share and round(share, 5) for run, share in sparsity["unions"].items()},
            "layer_l0": [round(layer["l0"], 2) for layer in sparsity["layers"]],
        }


def passages(ids: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """`batch` passages of `length` tokens, from places spread evenly over a text."""
    if len(ids) < batch * length:
        raise ValueError(
            f"the text has {len(ids):,} tokens, and {batch:,} sequences of {length:,} take {batch * length:,}; give "
            "more --text, or a smaller --batch, --length or --new-tokens"
        )
    starts = torch.arange(batch) * (len(ids) // batch)
    return ids[starts[:, None] + torch.arange(length)]


@torch.no_grad()
def bench_prefill(subject: Subject, *, batch: int = 1, length: int | None = None, how: How = PLAIN) -> dict:
    """One forward pass over a batch of texts, logits of the last position alone, no key-value cache kept.

    Compiled variants compile each decoder layer, in torch.compile's default mode: compiled as a whole, Transformers'
    attention mask would be materialized, and slow every variant down.

    Raises:
        ValueError: too little text, other statistics than the workload's, or logits less accurate than twice eager
            PyTorch's.
    """
    how.report("checking")
    text = subject.prompts(batch, length)
    description = subject.describe(text)
    model, dense, device = subject.model, subject.dense, text.device
    models = {"eager": dense, "sparse": model}
    outputs = {name: _last_logits(some, text) for name, some in models.items()}
    if how.compile:
        torch._dynamo.reset()
        models |= {"compiled": _with_compiled_layers(dense), "sparse_compiled": _with_compiled_layers(model)}
        outputs |= {name: _last_logits(models[name], text) for name in ("compiled", "sparse_compiled")}
    errors = check_logits(outputs, _last_logits(wider(dense), text[:CHECKED_SEQUENCES]))
    del outputs
    calls = {name: lambda turn=0, some=some: _last_logits(some, text) for name, some in models.items()}
    times = interleaved_ms(calls, how.repeats, device, report=how.report)
    ours, theirs = best(times)
    row = {
        "bench": "prefill",
        "batch": batch,
        "length": text.shape[1],
        **description,
        "kv_cache": False,
        **errors,
        **{f"{name}_ms": round(value, 3) for name, value in times.items()},
        "speedup": round(theirs / ours, 3),
        "sparse_layers_on_kernels": blocks_on_kernels(model, text),
    }
    for name, call in calls.items():
        if device.type == "cuda":
            how.report("memory and energy", name)
            row[f"{name}_peak_mib"] = peak_mib(call, device)
        if how.energy:
            row[f"{name}_mj_per_token"] = millijoules(call, device) / text.numel()
    return row | environment(device)


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
