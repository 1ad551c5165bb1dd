"""Where the marks of docs/coder.svg lie, read by its axes, is what the rows of Qwen-Coder's page say."""

import statistics
import sys
from xml.etree import ElementTree

import pytest

from tests.paths import ROOT
from tests.quoted_figures import QWEN_CPU, QWEN_OWN_TEXT, QWEN_SPEED, accuracies, qwen
from tests.quoting import rows

SIDES = {("circle", "c"): "parent", ("polyline", "c"): "llama.cpp"}
SIDES |= {("rect", "b"): "kernels off", ("circle", "a"): "kernels on"}
LOADS = {
    "vLLM: decode, 1 sequence": ("decode", 1),
    "vLLM: decode, 16 sequences": ("decode", 16),
    "vLLM: decode, 64 sequences": ("decode", 64),
    "vLLM: prefill of 8 x 2,048": ("prefill", 8),
}
CPU = {"CPU: one sequence, bfloat16": ("bfloat16", 64), "CPU: prompt of 1,024, float32": ("float32", 0)}


@pytest.fixture
def pictures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    yield __import__("pictures")
    sys.modules.pop("pictures")


def height(run: str) -> float:
    return 100 * statistics.mean(accuracies(qwen(run, QWEN_OWN_TEXT)))


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


def scale(ticks: list[tuple[float, float]], place: float) -> float:
    """The value at a place of an axis with ticks (value, place)."""
    (first, start), *_, (last, end) = ticks
    return first + (last - first) * (place - start) / (end - start)


def read(parts: list[ElementTree.Element]) -> list[tuple]:
    """A panel's marks, as `expected` has them."""
    across, up, marks = [], [], []
    for part in parts:
        tag, at = part.tag.rpartition("}")[2], part.attrib
        word = (part.text or "").replace(",", "")
        if tag == "text" and word.isdigit():
            axis, place = (up, float(at["y"]) - 4) if at["text-anchor"] == "end" else (across, float(at["x"]))
            axis.append((float(word), place))
        elif (tag, at["class"][-1]) in SIDES:
            if tag == "polyline":
                xs, ys = zip(*(map(float, point.split(",")) for point in at["points"].split()), strict=True)
                x, y = statistics.median(xs), (min(ys) + max(ys)) / 2
            elif tag == "rect":
                x, y = (float(at[key]) + float(at[size]) / 2 for key, size in (("x", "width"), ("y", "height")))
            else:
                x, y = float(at["cx"]), float(at["cy"])
            marks.append((SIDES[tag, at["class"][-1]], at["class"].startswith("line"), x, y))
    return [(side, alone, scale(across, x), scale(up, y)) for side, alone, x, y in marks]


def test_marks_are_where_the_rows_say(pictures, tmp_path):
    pictures.draw(ROOT, tmp_path)
    drawn = (tmp_path / "coder.svg").read_text()
    assert drawn == (ROOT / "docs" / "coder.svg").read_text(), "run `make figures`"
    parts = list(ElementTree.fromstring(drawn))
    titles = {part.text: index for index, part in enumerate(parts) if part.text in {*LOADS, *CPU}}
    ends = [*titles.values(), len(parts)][1:]
    for (title, begin), end, points in zip(titles.items(), ends, expected().values(), strict=True):
        most = max(point[2] for point in points)
        for mark, point in zip(sorted(read(parts[begin:end])), sorted(points), strict=True):
            assert mark[:2] == point[:2], title
            assert mark[2:] == (pytest.approx(point[2], abs=most / 1000), pytest.approx(point[3], abs=0.05)), title
