"""What a chat model writes itself, through vLLM: text to train its conversion on.

    python recipes/study/written.py MODEL --code out/texts/code.txt --eval DIR --output out/texts --tokens 4_000_000

Of what is asked for, --documents is the share of documents begun with <|endoftext|>, --functions that of answers to
questions about functions of the Python sources in --code, and the rest are questions of its own with its answers.
OUTPUT gets own-SEED.jsonl and chats-SEED.jsonl, after each --at-once of them: a command that is stopped keeps those.
What shares twelve words in a row with a problem of HumanEval or GSM8K (in DIR, as for study.py) is left out. Several
of these commands at once, each with a --seed and a --cache-gib, fill a GPU better than one.
"""

import argparse
import ast
import json
import random
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_twell.files.text import END_OF_TEXT, read_documents, read_text
from hf_twell.models.loading import load_tokenizer
from hf_twell.sampling.conversations import Turns

GRAM = 12  # words
HELD_OUT = {"humaneval.jsonl": ("prompt", "canonical_solution", "test"), "gsm8k-test.jsonl": ("question", "answer")}
MOST_TOKENS = {"document": 800, "question": 300, "answer": 900}
TEMPERATURE = {"document": 1.0, "question": 1.0, "answer": 0.8}

# What is asked about a function: of its head with the docstring, of the docstring's words, of all of it.
TO_COMPLETE = (
    "Complete the following Python function:\n```python\n{head}\n```",
    "Write the body of this function.\n\n```python\n{head}\n```",
    "Please implement this Python function. Reply with the code in a Markdown block.\n```python\n{head}\n```",
    "Write a solution to the following problem:\n```python\n{head}\n```",
    "Implement `{name}` in Python.\n\n```\n{head}\n```",
    "{head}",
)
TO_WRITE = (
    "Write a Python function `{name}({arguments})` that does this: {says}",
    "I need a Python function named {name}. {says}",
    "How can I do the following in Python? {says}",
    "Write Python code: {says}\nThe function should be called `{name}`.",
    "Write a function and a few tests for it. The task: {says}",
)
TO_READ = (
    "What does this function do?\n```python\n{source}\n```",
    "Explain this code step by step.\n\n{source}",
    "Write a docstring for this function:\n```python\n{source}\n```",
    "Find bugs in this Python code and fix them.\n```python\n{source}\n```",
    "Refactor this:\n```python\n{source}\n```",
    "Write unit tests with pytest for this function.\n```python\n{source}\n```",
    "Add type hints to this code.\n```python\n{source}\n```",
)


def questions_about(source: str, chance: random.Random) -> Iterator[str]:
    """One about each function of a Python file that is neither very short nor long; none where it does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.splitlines()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        told = {"name": function.name, "source": _part(lines, function.lineno, function.end_lineno)}
        if not 80 < len(told["source"]) < 1800:
            continue
        forms, docstring = TO_READ, ast.get_docstring(function)
        if docstring and 25 < len(docstring) < 700:
            arguments = [each.arg for each in function.args.args]
            told["head"] = _part(lines, function.lineno, function.body[0].end_lineno)
            told["says"] = " ".join(docstring.split("\n\n")[0].split())
            told["arguments"] = ", ".join(arguments)
            is_method = arguments[:1] in (["self"], ["cls"])
            forms = chance.choice([TO_READ, TO_WRITE, TO_WRITE if is_method else TO_COMPLETE])
        yield chance.choice(forms).format(**told)


def _part(lines: list[str], first: int, last: int | None) -> str:
    return textwrap.dedent("\n".join(lines[first - 1 : last]))


def grams(text: str) -> set[tuple[str, ...]]:
    """All runs of so many words, without case and punctuation."""
    words = re.findall(r"[a-z0-9_]+", text.lower())
    return {tuple(words[at : at + GRAM]) for at in range(len(words) - GRAM + 1)}


def held_out(folder: Path) -> set[tuple[str, ...]]:
    """Of the problems and answers of both tests."""
    found: set[tuple[str, ...]] = set()
    for name, keys in HELD_OUT.items():
        path = folder / name
        text = read_text(path if path.is_file() else path.with_suffix(".jsonl.xz"))
        for line in text.splitlines():
            row = json.loads(line)
            found.update(*(grams(row[key]) for key in keys))
    return found


class Writer:
    """A model in vLLM, and what it is asked."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, **options: Any) -> None:
        from vllm import LLM, SamplingParams

        self.turns, self.tokenizer = Turns(tokenizer), tokenizer
        self.begin = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        ends = [self.turns.closing[0], self.begin]
        longest = sum(MOST_TOKENS.values())
        self.llm = LLM(model, max_model_len=longest, enable_prefix_caching=False, **options)
        self.how = {
            kind: SamplingParams(temperature=TEMPERATURE[kind], max_tokens=most, stop_token_ids=ends, detokenize=False)
            for kind, most in MOST_TOKENS.items()
        }
        self.room = longest - MOST_TOKENS["answer"]

    def prompt(self, kind: str, question: str) -> list[int]:
        if kind == "document":
            return [self.begin]
        if kind == "question":
            return self.turns.opening
        words = self.tokenizer(question, add_special_tokens=False).input_ids
        return [*self.turns.opening, *words, *self.turns.closing]

    def write(self, asked: list[tuple[str, str]]) -> Iterator[tuple[str, str, str, bool, int]]:
        """(kind, question, text, whether it ended, tokens) of each pair of a kind and a question, "" where there is
        none; without texts that are blank, or hold marks of a chat."""
        prompts = [(kind, question, self.prompt(kind, question)) for kind, question in asked]
        prompts = [each for each in prompts if len(each[2]) < self.room]
        given = [{"prompt_token_ids": ids} for *_, ids in prompts]
        results = self.llm.generate(given, [self.how[kind] for kind, *_ in prompts])
        for (kind, question, ids), result in zip(prompts, results, strict=True):
            output = result.outputs[0]
            words = self.turns.answer(list(output.token_ids))
            ended, text = output.finish_reason == "stop", self.tokenizer.decode(words).strip()
            if text and len(words) >= len(output.token_ids) - ended:
                yield kind, question, text, ended, len(ids) + len(words)


def batches(
    writer: Writer,
    functions: list[str],
    left_out: set,
    at_once: int,
    shares: tuple[float, float],
    chance: random.Random,
) -> Iterator[list[dict]]:
    """Without end: {"text"} of documents and {"messages"} of conversations, with their "tokens". A question of the
    model's own that does not end is dropped; an answer that does not end is cut, and says so ("unfinished").

    Args:
        shares: of documents, and of questions about functions.
    """
    documents, about_functions = shares
    asked_before: set[str] = set()
    to_answer: list[str] = []
    while True:
        asked = [("answer", question) for question in to_answer]
        while len(asked) < at_once:
            drawn = chance.random()
            if drawn < documents:
                asked.append(("document", ""))
            elif drawn < documents + about_functions:
                asked.append(("answer", chance.choice(functions)))
            else:
                asked.append(("question", ""))
        to_answer, rows = [], []
        for kind, question, text, ended, tokens in writer.write(asked):
            if kind == "question":
                if ended and text not in asked_before:
                    to_answer.append(text)
                    asked_before.add(text)
            elif not left_out & grams(f"{question} {text}"):
                rows.append({**_row(question, text, ended), "tokens": tokens})
        yield rows


def _row(question: str, text: str, ended: bool) -> dict:
    if not question:
        return {"text": text}
    answer = {"role": "assistant", "content": text} | ({} if ended else {"unfinished": True})
    return {"messages": [{"role": "user", "content": question}, answer]}


def save(written: Iterable[list[dict]], tokens: int, own: Path, chats: Path) -> None:
    """So many tokens at least, in two files."""
    done = 0
    with own.open("w", encoding="utf-8") as documents, chats.open("w", encoding="utf-8") as conversations:
        for rows in written:
            for row in rows:
                file = conversations if "messages" in row else documents
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            documents.flush()
            conversations.flush()
            done += sum(row["tokens"] for row in rows)
            if done >= tokens:
                return


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a Hub name")
    for name in ("code", "eval", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="to write, of all kinds together")
    parser.add_argument("--seed", type=int, default=0, help="another one writes other text (default: 0)")
    parser.add_argument("--at-once", type=int, default=4096, help="prompts given to vLLM at a time (default: 4096)")
    parser.add_argument("--sequences", type=int, default=640, help="written at the same time (default: 640)")
    parser.add_argument("--documents", type=float, default=0.15, help="share of documents (default: 0.15)")
    parser.add_argument("--functions", type=float, default=0.3, help="share of answers about code (default: 0.3)")
    parser.add_argument("--cache-gib", type=float, help="memory of keys and values (default: what vLLM finds free)")
    parser.add_argument("--eager", action="store_true", help="compile nothing: starts sooner, writes slower")
    args = parser.parse_args(argv)
    if min(args.documents, args.functions) < 0 or args.documents + args.functions > 1:
        parser.error(
            f"--documents {args.documents:g} --functions {args.functions:g}; give shares that add up to 1 at most"
        )
    own, chats = (args.output / f"{name}-{args.seed}.jsonl" for name in ("own", "chats"))
    if own.exists() or chats.exists():
        parser.error(f"{args.output} holds what --seed {args.seed} wrote; give another seed, or another --output")
    chance = random.Random(args.seed)
    functions = [each for source in read_documents(args.code) for each in questions_about(source, chance)]
    if not functions:
        parser.error(f"{args.code} has no Python function of 80 to 1,800 characters; give texts.py's code.txt")
    left_out = held_out(args.eval)
    options: dict[str, Any] = {"seed": args.seed, "max_num_seqs": args.sequences, "enforce_eager": args.eager}
    if args.cache_gib is not None:  # beside which vLLM asks that a share of the GPU's memory be free
        options |= {"kv_cache_memory_bytes": int(args.cache_gib * 2**30), "gpu_memory_utilization": 0.1}
    writer = Writer(args.model, load_tokenizer(args.model), **options)
    args.output.mkdir(parents=True, exist_ok=True)
    shares = args.documents, args.functions
    save(batches(writer, functions, left_out, args.at_once, shares, chance), args.tokens, own, chats)
    print(f"{own} and {chats}: {args.tokens / 1e6:.1f}M tokens")


if __name__ == "__main__":
    main()
