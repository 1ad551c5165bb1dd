"""The tables of the study's README are its rows'; what other pages quote of it has test_quoted_figures.py."""

import json
import re
from pathlib import Path

from tests.paths import ROOT
from tests.study_rows import above_control

STUDY = ROOT / "model_cards" / "study"
ROWS = [json.loads(line) for line in (STUDY / "study.jsonl").read_text().splitlines()]
LINES = [  # for each line of the first table: the rows' name and target
    ("swap + L1 early", 0.01),
    ("swap + L1 early", 0.005),
    ("swap + L1 early long", 0.01),
    ("swap", None),
    *(("swap + L1", target) for target in (0.1, 0.02, 0.01)),
    ("swap + L1 long", 0.01),
    ("swap + L1", 0.005),
    *((name, 0.01) for name in ("blend + L1", "logits + L1", "logits + layers + L1", "FFN + LoRA", "FFN only")),
    ("FATReLU on swap", None),
]
METHODS = ["swap + L1", "blend + L1", "logits + L1", "logits + layers + L1", "FFN + LoRA", "FFN only"]


def rows(family: str, name: str, target: float | None) -> list[dict]:
    wanted = {"family": family, "name": name, "target_density": target}
    return [row for row in ROWS if all(row.get(key) == value for key, value in wanted.items())]


def above(row: dict) -> float:
    return above_control(row, ROWS)


def table(path: Path, head: str) -> list[list[str]]:
    lines = path.read_text().split(head)[1].split("\n\n")[0].splitlines()[2:]
    return [line.strip("| ").split(" | ") for line in lines]


def figures(cell: str) -> list[str]:
    return re.findall(r"\d+\.\d+", cell)


def written(value: float, quoted: str) -> str:
    return f"{value:.{len(quoted.partition('.')[2])}f}"


def test_each_method():
    for cells, (name, target) in zip(table(STUDY / "README.md", "| | Llama: density reached |"), LINES, strict=True):
        for family, (density, loss, against) in (("llama", cells[1:4]), ("qwen", cells[4:7])):
            found = rows(family, name, target)
            quoted, losses, shares = figures(density), figures(loss), re.findall(r"\+(\d+\.\d+)", against)
            for of_one in zip(quoted, losses, shares[: len(quoted)], strict=True):
                values = [(100 * row["density"], row["loss"], above(row)) for row in found]
                assert of_one in [tuple(map(written, row, of_one)) for row in values], cells
            assert set(shares) <= {f"{above(row):.2f}" for row in found}, cells
        dead = max(layer["dead"] for f in ("llama", "qwen") for row in rows(f, name, target) for layer in row["layers"])
        assert cells[7] == f"{100 * dead:.1f} %", cells


def test_each_method_at_each_density():
    for cells, method in zip(table(STUDY / "README.md", "| | target 10 % | 2 % |"), METHODS, strict=True):
        for cell, target in zip(cells[1:], (0.1, 0.02, 0.01, 0.005), strict=True):
            pairs = re.findall(r"\+(\d+\.\d+) % \(\+(\d+\.\d+)\)", cell)
            assert len(pairs) == 1 + ("early" in cell)
            for pair, name in zip(pairs, (method, f"{method} early"), strict=False):
                for quoted, family in zip(pair, ("llama", "qwen"), strict=True):
                    assert quoted in [f"{above(row):.2f}" for row in rows(family, name, target)], cells
