"""What the kernels' DESIGN.md say of tables and constants is what the sources say."""

import re

import pytest

from tests.paths import ROOT

KERNELS = ROOT / "kernels"
CUDA = KERNELS / "twell_cuda"
DISPATCH = (CUDA / "host" / "dispatch.cpp").read_text()
BACKENDS = ["twell_cpu", "twell_cuda"]
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "%": 0.01}


def constants(backend: str) -> dict[str, set[str]]:
    """The definitions of each constant at a file's top level, of the backend and of what both share."""
    files = [*(KERNELS / backend).rglob("*"), *(KERNELS / "shared").rglob("*")]
    found: dict[str, set[str]] = {}
    for path in files:
        if path.suffix in (".h", ".cuh", ".cu", ".cpp") and "tests" not in path.parts:
            for line in re.findall(r"^constexpr [\w:]+ (k[^;]+);", path.read_text(), re.MULTILINE):
                for name, expression in re.findall(r"(k\w+) = ([^,]+)", line):
                    found.setdefault(name, set()).add(expression)
    return found


def value_of(expression: str, known: dict[str, set[str]]) -> float:
    """Of a C++ constant expression; a name in it must have one definition."""
    expression = re.sub(r"\bint64_t\{(\d+)\}|(?<=\d)f\b|\b\w+::", r"\1", expression.strip())
    for name in re.findall(r"\bk[A-Z]\w+", expression):
        assert len(known[name]) == 1, f"{name} is {known[name]}"
        expression = re.sub(rf"\b{name}\b", repr(value_of(*known[name], known)), expression)
    assert re.fullmatch(r"[\d\s.<+*()-]+", expression), expression
    return eval(expression)  # of numbers alone


@pytest.mark.parametrize("backend", BACKENDS)
def test_constants(backend):
    """`kName` (VALUE), with a unit or none."""
    known = constants(backend)
    named = re.findall(r"`(k[A-Z]\w+)`\s\(([\d,.]+)\s?(KiB|MiB|%|)\)", (KERNELS / backend / "DESIGN.md").read_text())
    assert named
    for name, number, unit in named:
        assert value_of(name, known) == pytest.approx(float(number.replace(",", "")) * UNITS[unit]), name


def table(heading: str) -> list[tuple[str, ...]]:
    """The rows of the table in DESIGN.md whose heading begins so."""
    lines = (CUDA / "DESIGN.md").read_text().partition(heading)[2].partition("\n\n")[0].splitlines()[2:]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


def dispatch_rows() -> list[dict[str, str]]:
    """The rows of kTable, by the names of struct Row's members."""
    members = re.search(r"struct Row \{(.*?)\n\};", DISPATCH, re.DOTALL)[1]
    members = re.sub(r"//.*|\([^()]*\);", ";", re.sub(r"\(\*(\w+)\)", r"\1", members))
    names = re.findall(r"(\w+)(?= = |[,;])", members)
    lines = re.search(r"constexpr Row kTable\[\] = \{(.*?)\n\};", DISPATCH, re.DOTALL)[1]
    rows = [line.split(",") for line in re.findall(r"^\s*\{(.*)\},$", lines, re.MULTILINE)]
    return [dict(zip(names, [cell.strip().strip('"') for cell in row], strict=False)) for row in rows]


def in_words(row: dict[str, str]) -> tuple[str, ...]:
    gpus = {"Gpu::kHopper": "9.0", "Gpu::kAny": "from 8.0"}
    weights = {"Weights::kPlain": "16-bit", "Weights::kScaled": "8-bit", "Weights::kFp8": "e4m3, and x too"}
    known = constants("twell_cuda")
    least = value_of(row["least_tokens"], known)
    most = row["most_tokens"]
    tokens = f"from {least}" if most == "kMany" else f"{least} to {value_of(most, known)}"
    kind = weights[row.get("weights", "Weights::kPlain")]
    return (row["path"], gpus[row["gpu"]], kind, tokens, row["millions"], f"`{row['fits']}`", f"`{row['run']}`")


def test_the_dispatch_table():
    rows = dispatch_rows()
    assert len(rows) > 10
    assert table("| path | GPU |") == [in_words(row) for row in rows]


def test_every_function_that_launches_has_its_files():
    launchers = dict.fromkeys(f"`{row['run']}`" for row in dispatch_rows())
    assert sorted(row[0] for row in table("| run | files |")) == sorted(launchers)
