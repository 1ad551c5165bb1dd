"""What `hf-twell bench serve` measures of one server at a time: its answers first, then its speed under load."""

import bisect
import json
import os
import random
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp

from hf_twell.bench.progress import Report, silent
from hf_twell.bench.serve_client import Answer, ask_at_once
from hf_twell.bench.serve_process import Server
from hf_twell.bench.serve_summary import summary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORDS = 4096  # of a vocabulary, for prompts of random words
CHECKED_PROMPTS, CHECKED_TOKENS = 4, 32
WARM_UP_TOKENS = 8
COUNTS = ("prompt_tokens_read", "new_tokens_written", "pieces")  # of an answer, given as means over the turns
COMPUTES = {  # where a server says what computes its blocks
    "transformers": r"is sparse: (its \d+ blocks decode by .*)",
    "vllm": r"hf_twell: (\d+ of \d+ feed-forward blocks use the sparse kernels.*)",
}
ALL_PLAIN = r"^0 of |decode by plain matmuls"  # found in that where no block uses kernels
DTYPE = {"transformers": r"\(\w+, (\w+), [\w:]+\) is sparse", "vllm": r"dtype=torch\.(\w+)"}
PLATFORM = r"detected platform (\w+)"  # in vLLM's log


@dataclass(frozen=True)
class Load:
    """Requests that are sent together; `measured` is "decode", or "prefill", whose answers are one token long."""

    measured: str
    concurrency: int
    prompt_tokens: int
    new_tokens: int


@dataclass
class Side:
    """One server's way, "sparse" or "dense", to compute the checkpoint by "transformers" or "vllm"; `texts` are its
    greedy answers to the prompts that are checked."""

    name: str
    engine: str
    server: Server
    texts: list[str] = field(default_factory=list)

    def ask(self, prompts: Sequence[str], new_tokens: int) -> list[Answer]:
        """The answers to all of them at once, greedy, and not ended before `new_tokens`; a ValueError where the server
        refused them, or is no more."""
        endless = {"eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": new_tokens}
        body = {"model": self.server.model, "max_tokens": new_tokens, "temperature": 0}
        body |= {"ignore_eos": True} if self.engine == "vllm" else {"generation_config": json.dumps(endless)}
        try:
            return ask_at_once(self.server.port, [body | {"prompt": prompt} for prompt in prompts])
        except aiohttp.ClientError as error:
            raise self.server.failure("while it answered") from error

    def describe(self) -> dict:
        """Of a row: what the server itself says that it does, and whether any block uses kernels (None: unsaid); a
        ValueError where the dense one does, and would be no baseline."""
        says = self.server.says(COMPUTES[self.engine])
        kernels = None if says is None else not re.search(ALL_PLAIN, says)
        if self.name == "dense" and kernels:
            raise ValueError(f"the dense server says that {says}; please report it")
        return {"computes": says, "kernels": kernels}

    def dtype(self) -> str | None:
        return self.server.says(DTYPE[self.engine])


class Prompts:
    """Prompts of a given number of tokens, another for every request: an engine may keep what it has read before. They
    are passages of `text`, or without one random words of the vocabulary, whose activity is no real text's."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", text: str | None = None) -> None:
        self.tokenizer, self.from_text = tokenizer, text is not None
        self.words = text.split() if text is not None else _vocabulary(tokenizer)
        if not self.words:
            raise ValueError("the text has no words; give another --text")

    def make(self, count: int, tokens: int, seed: str) -> list[str]:
        """`count` prompts of `tokens` tokens each, or of one less, the same ones for the same seed."""
        chance = random.Random(seed)
        return [self._prompt(tokens, chance) for _ in range(count)]

    def _prompt(self, tokens: int, chance: random.Random) -> str:
        words = chance.choices(self.words, k=tokens)
        if self.from_text:
            start = chance.randrange(len(self.words))
            words = [self.words[(start + index) % len(self.words)] for index in range(tokens)]
        fit = bisect.bisect_right(range(1, tokens + 1), tokens, key=lambda count: self._tokens(words[:count]))
        words = words[: max(fit, 1)]
        while self._tokens([*words, "a"]) <= tokens:
            words.append("a")
        return " ".join(words)

    def _tokens(self, words: list[str]) -> int:
        """As a server counts them, with what its tokenizer adds."""
        return len(self.tokenizer(" ".join(words))["input_ids"])


def check_load(load: Load, context: int | None) -> None:
    """Refuse, by a ValueError, a load that takes more tokens than the model, or its server, does."""
    if context and load.prompt_tokens + load.new_tokens > context:
        option = "--prefill-tokens" if load.measured == "prefill" else "--prompt-tokens"
        raise ValueError(
            f"{option} {load.prompt_tokens:,} and {load.new_tokens:,} new tokens are more than the context of "
            f"{context:,} tokens; give fewer"
        )


def write_texts(side: Side, prompts: Prompts, load: Load, report: Report = silent) -> None:
    """Have it answer a few prompts, one by one, which also warms it up."""
    texts = prompts.make(CHECKED_PROMPTS, load.prompt_tokens, "checked")
    for index, text in enumerate(texts):
        report("checking", f"{side.name}, prompt {index + 1} of {len(texts)}")
        (answer,) = side.ask([text], min(load.new_tokens, CHECKED_TOKENS))
        side.texts.append(answer.text)


def compare_texts(
    texts: list[str], baseline: list[str], tokenizer: "PreTrainedTokenizerBase", dtype: str | None
) -> dict:
    """How many tokens of greedy answers are those of the first server, up to each answer's first difference. In float32
    a ValueError where these are not all; in fewer digits two tokens may be as likely as each other."""
    total = same = 0
    for ours, theirs in zip(texts, baseline, strict=True):
        ids, others = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (ours, theirs))
        total += max(len(ids), len(others))
        differ = (index for index, pair in enumerate(zip(ids, others, strict=False)) if pair[0] != pair[1])
        same += next(differ, min(len(ids), len(others)))
    if dtype == "float32" and texts != baseline:
        raise ValueError(
            f"the server's greedy answers agree with those of the first, dense one in {same} of {total} tokens, and in "
            "float32 they must in all. A wrong result has no speed; please report it."
        )
    return {"checked_tokens": total, "same_tokens": same}


def measure(
    side: Side,
    loads: Sequence[Load],
    prompts: Prompts,
    repeats: int,
    number: int,
    report: Report = silent,
) -> Iterator[dict]:
    """A row of figures for each load, of the round of this number."""
    for load in loads:
        where = f"{side.name}, {load.measured}, {load.concurrency} at once"
        report("warming up", where)
        few = prompts.make(load.concurrency, load.prompt_tokens, f"warm-up {number} {load}")
        side.ask(few, min(load.new_tokens, WARM_UP_TOKENS))
        turns = []
        for turn in range(repeats):
            texts = prompts.make(load.concurrency, load.prompt_tokens, f"{number} {turn} {load}")
            report("timing", f"{where}, turn {turn + 1} of {repeats}")
            turns.append(_figures(load, side.ask(texts, load.new_tokens)))
        yield {
            "measured": load.measured,
            "concurrency": load.concurrency,
            "prompt_tokens": load.prompt_tokens,
            "new_tokens": load.new_tokens,
            **{name: statistics.mean(turn[name] for turn in turns) for name in COUNTS},
            **{name: summary(turn[name] for turn in turns) for name in turns[0] if name not in COUNTS},
        }


def in_bursts(row: dict) -> bool:
    """Whether text came in so few pieces that times to and between tokens say little; tokens per second still do."""
    return row["new_tokens_written"] > 1 and row["pieces"] < row["new_tokens_written"] / 2


def _figures(load: Load, answers: list[Answer]) -> dict:
    """Of one turn; times of requests are medians over them."""
    first, last = min(answer.started for answer in answers), max(answer.last for answer in answers)
    read = sum(answer.prompt_tokens for answer in answers)
    written = sum(answer.new_tokens for answer in answers)
    figures = {
        "prompt_tokens_read": read / len(answers),
        "new_tokens_written": written / len(answers),
        "pieces": statistics.median(answer.pieces for answer in answers),
        "tokens_per_s": (read if load.measured == "prefill" else written) / (last - first),
        "ttft_ms": 1e3 * statistics.median(answer.first - answer.started for answer in answers),
        "request_ms": 1e3 * statistics.median(answer.last - answer.started for answer in answers),
    }
    steps = [(answer.last - answer.first) / (answer.new_tokens - 1) for answer in answers if answer.new_tokens > 1]
    if steps:
        figures["tpot_ms"] = 1e3 * statistics.median(steps)
    return figures


def server_environment(engine: str, server: Server, device: str | None) -> dict:
    """Processor, versions and commit; the device is the one that the server computes on."""
    import torch

    from hf_twell.bench.environment import environment

    kind = server.says(PLATFORM) if engine == "vllm" else None
    kind = kind or device or ("cuda" if torch.cuda.is_available() else "cpu")
    found = environment(torch.device(kind))
    if engine == "vllm":  # which chooses its own number of threads
        del found["threads"]
    variable = os.environ.get("OMP_NUM_THREADS")
    return found | ({"omp_num_threads": variable} if variable else {})


def _vocabulary(tokenizer) -> list[str]:
    """Pieces of letters alone."""
    ids = random.Random(0).sample(range(len(tokenizer)), min(WORDS, len(tokenizer)))
    words = (tokenizer.decode([index]).strip() for index in ids)
    return [word for word in words if word.isalpha()] or ["a"]
