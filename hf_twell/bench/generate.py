"""What `hf-twell bench generate` measures: decoding of the same model, dense and sparse, results checked first."""

import statistics
import time

import torch
from transformers import StaticCache

from hf_twell.bench.check import check_logits
from hf_twell.bench.environment import environment
from hf_twell.bench.models import CHECKED_SEQUENCES, PLAIN, How, Subject, wider
from hf_twell.bench.timing import Captured, mean_ms, millijoules
from hf_twell.bench.workload_llama import PROMPT_TOKENS
from hf_twell.measure.inference import blocks_on_kernels


@torch.no_grad()
def bench_generate(
    subject: Subject, *, batch: int = 1, new_tokens: int = 128, steps_only: bool = False, how: How = PLAIN
) -> dict:
    """Greedy decoding after a prompt, dense and sparse in turns: tokens per second, and one step's own time.

    `generate` has a static cache on CUDA, and compiles as Transformers does for one (mode reduce-overhead); it goes on
    by itself from the prompt. A step is one forward of `batch` tokens, the text's own, over a static cache, averaged
    over the positions after the prompt; on CUDA it is a captured graph of the model compiled in the default mode. On a
    CPU nothing is compiled.

    Args:
        steps_only: leave `generate` out, whose compilation takes as long again.

    Raises:
        ValueError: as `bench_prefill`.
    """
    report = how.report
    report("choosing texts")
    text, decoded = subject.decoded(batch, PROMPT_TOKENS + new_tokens)
    description = subject.describe(text)
    model, dense, device = subject.model, subject.dense, text.device
    compile = how.compile and device.type == "cuda"
    report("checking")
    models = {"eager": dense, "sparse": model}
    # Eager calls come first: they settle the memory order of down_proj, which compiled graphs take as it is.
    outputs = {name: _decoded_logits(some, text) for name, some in models.items()}
    truth = _decoded_logits(wider(dense), text[:CHECKED_SEQUENCES])
    torch._dynamo.reset()
    steps = {
        "dense_step": _Step(dense, torch.compile(dense, dynamic=False) if compile else dense, text),
        "sparse_step": _Step(model, torch.compile(model, dynamic=False) if compile else model, text),
    }
    outputs |= {name: step.logits() for name, step in steps.items()}
    errors = check_logits(outputs, truth)
    del outputs, truth
    turns: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(how.repeats + 1):
        for name, step in steps.items():
            report("timing", f"{name}, turn {turn + 1} of {how.repeats + 1}")
            turns[name].append(step.milliseconds())
    times = {name: statistics.median(values[1:]) for name, values in turns.items()}
    joules = {f"{name}_mj_per_token": step.millijoules() / batch for name, step in steps.items() if how.energy}
    steps.clear()
    torch._dynamo.reset()
    whole = {}
    if not steps_only:
        per_second, tokens = _generate(models, text, compile, how.repeats, report)
        whole = {
            "dense_tokens_per_s": round(per_second["eager"], 3),
            "sparse_tokens_per_s": round(per_second["sparse"], 3),
            "speedup": round(per_second["sparse"] / per_second["eager"], 3),
            "same_tokens": torch.equal(tokens["eager"], tokens["sparse"]),
        }
        if subject.recites:
            whole["recited"] = round((tokens["sparse"] == text).double().mean().item(), 4)
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
        **whole,
        **joules,
        "sparse_layers_on_kernels": blocks_on_kernels(model, text[:, -1:]),
        **environment(device),
    }


class _Step:
    """One decoding step over a static cache, fed with the tokens of a text one position after the other."""

    def __init__(self, model, function, text) -> None:
        self.model, self.text, self.device = model, text, text.device
        # Warming up before the capture goes a few positions further than the text.
        self.cache = StaticCache(config=model.config, max_cache_len=text.shape[1] + 4)
        self._read_prompt()
        self.token = text[:, :1].clone()
        self.call = Captured(
            lambda: function(self.token, past_key_values=self.cache, use_cache=True).logits, self.device
        )

    def _positions(self):
        """Make the next call one for each position after the prompt, in order."""
        self.cache.reset()  # in place, as graphs hold its memory
        self._read_prompt()
        for position in range(PROMPT_TOKENS, self.text.shape[1]):
            self.token.copy_(self.text[:, position : position + 1])
            yield

    def _read_prompt(self) -> None:
        self.model(self.text[:, :PROMPT_TOKENS], past_key_values=self.cache, use_cache=True)

    def logits(self):
        return torch.cat([self.call().clone() for _ in self._positions()], 1)

    def milliseconds(self) -> float:
        return mean_ms(self.call, self._positions(), self.device)

    def millijoules(self) -> float:
        def all_positions(turn):
            for _ in self._positions():
                self.call()

        return millijoules(all_positions, self.device) / (self.text.shape[1] - PROMPT_TOKENS)


def _generate(models, text, compile, repeats, report) -> tuple[dict, dict]:
    """Tokens per second of each model's `generate` (median, all in turn; on a GPU after two to warm up), and tokens."""
    prompt, new_tokens = text[:, :PROMPT_TOKENS], text.shape[1] - PROMPT_TOKENS
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    options |= {"attention_mask": torch.ones_like(prompt)}
    warm_up = 0
    if text.device.type == "cuda":
        options |= {"cache_implementation": "static", "disable_compile": not compile}
        warm_up = 2
    seconds: dict[str, list[float]] = {name: [] for name in models}
    tokens = {}
    for turn in range(repeats + warm_up):
        for name, model in models.items():
            report("timing generate,", f"{name}, turn {turn + 1} of {repeats + warm_up}")
            start = time.perf_counter()
            # Copied, because a compiled step's graph writes its tensors again.
            tokens[name] = model.generate(prompt, **options).clone()
            if text.device.type == "cuda":
                torch.cuda.synchronize(text.device)
            seconds[name].append(time.perf_counter() - start)
    per_run = len(text) * new_tokens
    return {name: per_run / statistics.median(values[warm_up:]) for name, values in seconds.items()}, tokens


def _decoded_logits(model, text):
    return model(text, use_cache=False).logits[:, PROMPT_TOKENS:]
