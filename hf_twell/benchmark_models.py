"""What `hf-twell bench prefill` and `generate` measure: random Llamas, dense and sparse, results checked first."""

import copy
import statistics
import time

import torch
from transformers import StaticCache

import hf_twell
from hf_twell import ops
from hf_twell.benchmark import DTYPES, environment, relative_error
from hf_twell.timing import Captured, interleaved_ms, mean_ms, millijoules, peak_mib
from hf_twell.workload_llama import TOLERANCE, check_layers, layer_statistics, make_llama, make_text

CHECKED_SEQUENCES = 4  # so many are also computed in higher precision
PROMPT_TOKENS = 16
CANDIDATES = 32  # texts among which those with typical L0 are decoded


@torch.no_grad()
def bench_prefill(
    *,
    l0=30.0,
    batch=64,
    length=2048,
    dtype="bfloat16",
    device="cpu",
    repeats=None,
    compile=True,
    energy=False,
    **shape,
) -> dict:
    """One forward pass over a batch of workload text, logits of the last position alone, no key-value cache kept.

    Compiled variants compile each decoder layer, in torch.compile's default mode: compiled as a whole, Transformers'
    attention mask would be materialized, and slow every variant down.

    Args:
        energy: also millijoules per token of the batch.
        shape: of the model, for `make_llama`.

    Raises:
        ValueError: blocks without the workload's statistics, or logits less accurate than twice eager PyTorch's.
    """
    device = torch.device(device)
    model, dense, distinct = _models(l0, dtype, device, shape)
    text = make_text(model.config.vocab_size, batch, length, seed=2, device=device)
    description = _describe(model, dense, text[:8], l0, distinct, dtype)
    models = {"eager": dense, "sparse": model}
    outputs = {name: _last_logits(some, text) for name, some in models.items()}
    if compile:
        torch._dynamo.reset()
        models |= {"compiled": _with_compiled_layers(dense), "sparse_compiled": _with_compiled_layers(model)}
        outputs |= {name: _last_logits(models[name], text) for name in ("compiled", "sparse_compiled")}
    truth = _last_logits(_wider(dense, dtype), text[:CHECKED_SEQUENCES])
    errors = _check_logits(outputs, truth)
    del outputs, truth
    calls = {name: lambda turn=0, some=some: _last_logits(some, text) for name, some in models.items()}
    times = interleaved_ms(calls, repeats or 5, device)
    ours, theirs = (min(times[n] for n in names if n in times) for names in (_OURS, _THEIRS))
    row = {
        "bench": "prefill",
        "batch": batch,
        "length": length,
        **description,
        "kv_cache": False,
        **errors,
        **{f"{name}_ms": round(value, 3) for name, value in times.items()},
        "speedup": round(theirs / ours, 3),
    }
    for name, call in calls.items():
        if device.type == "cuda":
            row[f"{name}_peak_mib"] = peak_mib(call, device)
        if energy:
            row[f"{name}_mj_per_token"] = millijoules(call, device) / text.numel()
    return {**row, **environment(device)}


_OURS, _THEIRS = ("sparse", "sparse_compiled"), ("eager", "compiled")


@torch.no_grad()
def bench_generate(
    *,
    l0=30.0,
    batch=1,
    new_tokens=128,
    dtype="bfloat16",
    device="cpu",
    repeats=None,
    compile=True,
    energy=False,
    **shape,
) -> dict:
    """Greedy decoding of workload text, dense and sparse in turns: tokens per second, and one step's own time.

    `generate` has a static cache on CUDA, and compiles as Transformers does for one (mode reduce-overhead). A step is
    one forward of `batch` tokens over a static cache, averaged over the positions after the prompt; on CUDA it is a
    captured graph of the model compiled in the default mode. On a CPU nothing is compiled.

    Args:
        energy: also millijoules per token of the steps.
        shape: of the model, for `make_llama`.

    Raises:
        ValueError: blocks without the workload's statistics, or logits less accurate than twice eager PyTorch's.
    """
    device = torch.device(device)
    compile, repeats = compile and device.type == "cuda", repeats or 3
    model, dense, distinct = _models(l0, dtype, device, shape)
    held_out = make_text(model.config.vocab_size, 8 if device.type == "cuda" else 4, 1024, seed=2, device=device)
    description = _describe(model, dense, held_out, l0, distinct, dtype)
    text, decoded = _typical_texts(dense, batch, PROMPT_TOKENS + new_tokens, l0, device)
    models = {"eager": dense, "sparse": model}
    # Eager calls come first: they settle the memory order of down_proj, which compiled graphs take as it is.
    outputs = {name: _decoded_logits(some, text) for name, some in models.items()}
    truth = _decoded_logits(_wider(dense, dtype), text[:CHECKED_SEQUENCES])
    torch._dynamo.reset()
    steps = {
        "dense_step": _Step(dense, torch.compile(dense, dynamic=False) if compile else dense, text),
        "sparse_step": _Step(model, torch.compile(model, dynamic=False) if compile else model, text),
    }
    outputs |= {name: step.logits() for name, step in steps.items()}
    errors = _check_logits(outputs, truth)
    del outputs, truth
    times = {name: [] for name in steps}
    for _ in range(repeats + 1):
        for name, step in steps.items():
            times[name].append(step.milliseconds())
    times = {name: statistics.median(values[1:]) for name, values in times.items()}
    joules = {f"{name}_mj_per_token": step.millijoules() / batch for name, step in steps.items() if energy}
    steps.clear()
    torch._dynamo.reset()
    per_second, tokens = _generate(models, text, compile, repeats)
    return {
        "bench": "generate",
        "batch": batch,
        "new_tokens": new_tokens,
        **description,
        **decoded,
        "compiled": compile,
        **errors,
        **{f"{name}_ms": round(value, 4) for name, value in times.items()},
        "step_speedup": round(times["dense_step"] / times["sparse_step"], 3),
        "dense_tokens_per_s": round(per_second["eager"], 3),
        "sparse_tokens_per_s": round(per_second["sparse"], 3),
        "speedup": round(per_second["sparse"] / per_second["eager"], 3),
        "same_tokens": torch.equal(tokens["eager"], tokens["sparse"]),
        "recited": round((tokens["sparse"] == text).double().mean().item(), 4),
        **joules,
        **environment(device),
    }


class _Step:
    """One decoding step over a static cache, fed with the tokens of a text one position after the other."""

    def __init__(self, model, function, text):
        self.text, self.device = text, text.device
        # Warming up before the capture goes a few positions further than the text.
        self.cache = StaticCache(config=model.config, max_cache_len=text.shape[1] + 4)
        model(text[:, :PROMPT_TOKENS], past_key_values=self.cache, use_cache=True)
        self.token = text[:, :1].clone()
        self.call = Captured(
            lambda: function(self.token, past_key_values=self.cache, use_cache=True).logits, self.device
        )

    def _positions(self):
        """Make the next call one for each position after the prompt, in order."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(PROMPT_TOKENS)
        for position in range(PROMPT_TOKENS, self.text.shape[1]):
            self.token.copy_(self.text[:, position : position + 1])
            yield

    def logits(self):
        return torch.cat([self.call().clone() for _ in self._positions()], 1)

    def milliseconds(self) -> float:
        return mean_ms(self.call, self._positions(), self.device)

    def millijoules(self) -> float:
        def all_positions(turn):
            for _ in self._positions():
                self.call()

        return millijoules(all_positions, self.device) / (self.text.shape[1] - PROMPT_TOKENS)


def _generate(models, text, compile, repeats) -> tuple[dict, dict]:
    """Tokens per second of each model's `generate` (median, all taking turns after two of warming up), and tokens."""
    prompt, new_tokens = text[:, :PROMPT_TOKENS], text.shape[1] - PROMPT_TOKENS
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    options |= {"attention_mask": torch.ones_like(prompt)}
    warm_up = 0
    if text.device.type == "cuda":
        options |= {"cache_implementation": "static", "disable_compile": not compile}
        warm_up = 2
    seconds, tokens = {name: [] for name in models}, {}
    for _ in range(repeats + warm_up):
        for name, model in models.items():
            start = time.perf_counter()
            # Copied, because a compiled step's graph writes its tensors again.
            tokens[name] = model.generate(prompt, **options).clone()
            if text.device.type == "cuda":
                torch.cuda.synchronize(text.device)
            seconds[name].append(time.perf_counter() - start)
    per_run = len(text) * new_tokens
    return {name: per_run / statistics.median(values[warm_up:]) for name, values in seconds.items()}, tokens


def _models(l0, dtype, device, shape):
    """The sparse model, the same as stock code with weights of its own, and the workload's distinct neurons in 64."""
    model, distinct = make_llama(l0, dtype=DTYPES[dtype], device=device, **shape)
    return model, hf_twell.unpatch(copy.deepcopy(model)), distinct


def _describe(model, dense, text, l0, distinct, dtype) -> dict:
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
        "backend": ops.resolve("auto", text.device.type),
        "l0": l0,
        "layer_l0": [round(layer["l0"], 2) for layer in layers],
        "workload_distinct_64": round(distinct, 1),
        "layer_distinct_64": [round(layer["distinct_64"], 1) for layer in layers],
    }


def _typical_texts(model, batch, length, l0, device) -> tuple[torch.Tensor, dict]:
    """Texts from anywhere in the workload whose mean L0 after the prompt is as near to `l0` as chance allows.

    Raises:
        ValueError: it is over 10 % away.
    """
    texts = make_text(
        model.config.vocab_size, max(CANDIDATES, batch), length, seed=3, device=device, starts_of_sequences=False
    )
    each = torch.stack([s["sequence_l0"] for s in layer_statistics(model, texts, slice(PROMPT_TOKENS, None))]).mean(0)
    order = each.argsort()
    means = each[order].unfold(0, batch, 1).mean(1)
    start = (means - l0).abs().argmin().item()
    text = texts[order[start : start + batch]]
    layers = layer_statistics(model, text, slice(PROMPT_TOKENS, None))
    mean = {key: statistics.mean(layer[key] for layer in layers) for key in ("l0", "distinct_step")}
    if not abs(mean["l0"] - l0) <= TOLERANCE * l0:
        raise ValueError(
            f"the decoded tokens have {mean['l0']:.4g} active neurons where {l0:g} were asked for; decode more tokens "
            "(--new-tokens) or a larger batch."
        )
    return text, {"decoded_l0": round(mean["l0"], 2), "decoded_distinct_in_batch": round(mean["distinct_step"], 1)}


def _last_logits(model, text):
    return model(text, use_cache=False, logits_to_keep=1).logits


def _decoded_logits(model, text):
    return model(text, use_cache=False).logits[:, PROMPT_TOKENS:]


def _wider(model, dtype):
    return copy.deepcopy(model).to(torch.float64 if dtype == "float32" else torch.float32)


def _with_compiled_layers(model):
    """The model's modules anew over the same parameters, each decoder layer compiled."""
    model = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    return model


def _check_logits(outputs, truth) -> dict:
    """Errors against higher precision of the first sequences, and differences from eager PyTorch of all of them.

    Raises:
        ValueError: a sparse variant's error is over twice the eager one's, or its difference from it over three times.
    """
    errors = {name: relative_error(value[: len(truth)], truth) for name, value in outputs.items()}
    far = {name: relative_error(outputs[name], outputs["eager"]) for name in outputs if name.startswith("sparse")}
    allowed = errors["eager"]
    for name, difference in far.items():
        if not (errors[name] <= 2 * allowed and difference <= 3 * allowed):
            raise ValueError(
                f"logits of {name} are off by {errors[name]:.3g} (relative RMS), and differ from eager's by "
                f"{difference:.3g}; allowed are {2 * allowed:.3g} and {3 * allowed:.3g}, eager's own error being "
                f"{allowed:.3g}. A wrong result has no speed; please report it."
            )
    return {**{f"error_{name}": value for name, value in errors.items()}, "logits_difference": max(far.values())}
