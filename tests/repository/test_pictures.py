"""Where the marks of docs/coder.svg and larger-coder.svg lie, read by their axes, is what the rows say."""

import statistics
import sys
from xml.etree import ElementTree

import pytest

from tests.paths import ROOT
from tests.quoted_figures import (
    LARGER_CPU,
    LARGER_SPEED,
    QWEN_CPU,
    QWEN_LARGER,
    QWEN_OWN_TEXT,
    QWEN_SPEED,
    accuracies,
    qwen,
)
from tests.quoting import rows

SIDES = {("circle", "c"): "parent", ("polyline", "c"): "llama.cpp"}
SIDES |= {("rect", "b"): "kernels off", ("circle", "a"): "kernels on"}
LOADS = {
    "vLLM: decode, 1 sequence": ("decode", 1),
    "vLLM: decode, 16 sequences": ("decode", 16),
    "vLLM: decode, 64 sequences": ("decode", 64),
    "vLLM: prefill of 8 x 2,048": ("prefill", 8),
}
LARGER_SIDES = {
    ("circle", "c"): "parent",
    ("rect", "c"): "parent, fp8",
    ("polyline", "c"): "0.5B",
    ("rect", "b"): "kernels off",
    ("circle", "a"): "kernels on",
    ("polyline", "b"): "ten, kernels off",
    ("polyline", "a"): "ten, kernels on",
}
LARGER_RUNS = {"parent, fp8": "parent", "ten, kernels on": "ten"}
LARGER_RUNS |= dict.fromkeys(("kernels off", "kernels on"), "union25-2e-4")
CPU = {"CPU: one sequence, bfloat16": ("bfloat16", 64), "CPU: prompt of 1,024, float32": ("float32", 0)}


@pytest.fixture
def pictures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    yield __import__("pictures")
    sys.modules.pop("pictures")


def height(run: str) -> float:
    return 100 * statistics.mean(accuracies(qwen(run, QWEN_OWN_TEXT)))


def height_of_larger(run: str) -> float:
    return 100 * statistics.mean(accuracies(qwen(run, QWEN_LARGER)))


def expected() -> dict[str, list[tuple]]:
    """By panel: (side, is it of the GPU's time alone, tokens a second, mean of the tasks in percent)."""
    found = {}
    for title, (measured, batch) in LOADS.items():
        found[title] = []
        for one in rows(QWEN_SPEED, measured=measured, batch=batch):
            mean = height("parent" if one["engine"] == "parent" else "union25-half")
            tokens = batch * 2048 if measured == "prefill" else batch
            found[title].append((one["engine"], True, tokens / one["step_us"] * 1e6, mean))
            found[title].append((one["engine"], False, sorted(one["tokens_per_s"])[1], mean))
    for title, (dtype, new_tokens) in CPU.items():
        fours = rows(QWEN_CPU, bench="llama-bench", new_tokens=new_tokens)
        found[title] = [("llama.cpp", False, one["tokens_per_s"], height("parent")) for one in fours]
        (one,) = rows(QWEN_CPU, bench="generate" if new_tokens else "prefill", dtype=dtype)
        if not new_tokens:
            one |= {"dense_tokens_per_s": 1024e3 / one["eager_ms"], "sparse_tokens_per_s": 1024e3 / one["sparse_ms"]}
        for side, key in (("kernels off", "dense"), ("kernels on", "sparse")):
            found[title].append((side, False, one[f"{key}_tokens_per_s"], height(one["model"])))
    return found


def expected_of_larger() -> dict[str, list[tuple]]:
    found = {}
    for title, (measured, batch) in LOADS.items():
        found[title] = []
        for one in rows(LARGER_SPEED, measured=measured, batch=batch):
            if (engine := one["engine"]) in LARGER_SIDES.values():
                mean = height("parent") if engine == "0.5B" else height_of_larger(LARGER_RUNS.get(engine, engine))
                tokens = batch * 2048 if measured == "prefill" else batch
                found[title].append((engine, True, tokens / one["step_us"] * 1e6, mean))
    ten = height_of_larger("ten")
    generated = rows(LARGER_CPU, bench="generate", model="ten")
    found["CPU: one sequence"] = [
        (side, False, max(one[f"{key}_tokens_per_s"] for one in generated), ten)
        for side, key in (("ten, kernels off", "dense"), ("ten, kernels on", "sparse"))
    ]
    (one,) = rows(LARGER_CPU, bench="prefill", model="ten")
    found["CPU: prompt of 512"] = [
        (side, False, 512e3 / one[f"{key}_ms"], ten)
        for side, key in (("ten, kernels off", "eager"), ("ten, kernels on", "sparse"))
    ]
    return found


def scale(ticks: list[tuple[float, float]], place: float) -> float:
    """The value at a place of an axis with ticks (value, place)."""
    (first, start), *_, (last, end) = ticks
    return first + (last - first) * (place - start) / (end - start)


def read(parts: list[ElementTree.Element], sides: dict[tuple[str, str], str]) -> list[tuple]:
    """A panel's marks, as `expected` has them."""
    across, up, marks = [], [], []
    for part in parts:
        tag, at = part.tag.rpartition("}")[2], part.attrib
        word = (part.text or "").replace(",", "")
        if tag == "text" and word.isdigit():
            axis, place = (up, float(at["y"]) - 4) if at["text-anchor"] == "end" else (across, float(at["x"]))
            axis.append((float(word), place))
        elif (tag, at["class"][-1]) in sides:
            if tag == "polyline":
                xs, ys = zip(*(map(float, point.split(",")) for point in at["points"].split()), strict=True)
                x, y = statistics.median(xs), (min(ys) + max(ys)) / 2
            elif tag == "rect":
                x, y = (float(at[key]) + float(at[size]) / 2 for key, size in (("x", "width"), ("y", "height")))
            else:
                x, y = float(at["cx"]), float(at["cy"])
            marks.append((sides[tag, at["class"][-1]], at["class"].startswith("line"), x, y))
    return [(side, alone, scale(across, x), scale(up, y)) for side, alone, x, y in marks]


def test_the_pages_have_what_the_rows_draw(pictures, tmp_path):
    for path in pictures.draw(ROOT, tmp_path):
        assert path.read_text() == (ROOT / "docs" / path.name).read_text(), "run `make figures`"


@pytest.mark.parametrize(
    ("name", "sides", "expected"),
    [("coder", SIDES, expected), ("larger-coder", LARGER_SIDES, expected_of_larger)],
    ids=["coder", "larger-coder"],
)
def test_marks_are_where_the_rows_say(pictures, tmp_path, name, sides, expected):
    pictures.draw(ROOT, tmp_path)
    drawn = (tmp_path / f"{name}.svg").read_text()
    parts, panels = list(ElementTree.fromstring(drawn)), expected()
    titles = {part.text: index for index, part in enumerate(parts) if part.text in panels}
    ends = [*titles.values(), len(parts)][1:]
    for (title, begin), end, points in zip(titles.items(), ends, panels.values(), strict=True):
        most = max(point[2] for point in points)
        for mark, point in zip(sorted(read(parts[begin:end], sides)), sorted(points), strict=True):
            assert mark[:2] == point[:2], title
            assert mark[2:] == (pytest.approx(point[2], abs=most / 1000), pytest.approx(point[3], abs=0.05)), title
