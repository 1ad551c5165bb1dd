"""The drawings of pages, as SVG that reads on light and dark ones (`make figures`).

`front`, `coder` and `larger_coder` have figures, which come from rows; the others have none.
"""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# A card of its own colours lies under each drawing, so a page of either kind may hold it.
STYLE = """<style>
text { font: 14px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.title { font-weight: 600; font-size: 15px } .soft { fill: #59636e } .small { font-size: 12px }
.card { fill: #ffffff; stroke: #d0d7de } .rule { stroke: #d0d7de; fill: none } .off { fill: #eaeef2; stroke: #d0d7de }
.a { fill: #0969da } .b { fill: #bf3989 } .c { fill: #57606a }
.la { stroke: #0969da } .lb { stroke: #bf3989 } .lc { stroke: #57606a } .line { fill: none; stroke-width: 2 }
.ring { fill: #ffffff; stroke: #0969da; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .soft { fill: #9198a1 }
  .card { fill: #0d1117; stroke: #3d444d } .rule { stroke: #3d444d } .off { fill: #212830; stroke: #3d444d }
  .a { fill: #58a6ff } .b { fill: #f778ba } .c { fill: #9198a1 }
  .la { stroke: #58a6ff } .lb { stroke: #f778ba } .lc { stroke: #9198a1 }
  .ring { fill: #0d1117; stroke: #58a6ff }
}
</style>"""
QWEN = "model_cards/qwen2.5-coder-0.5b/rows.jsonl"
OWN_TEXT, WHOLE, WHOLE_CPU = (
    f"model_cards/qwen2.5-coder-0.5b/{name}.jsonl" for name in ("rows_own_text", "speed", "speed_cpu")
)
LARGER, LARGER_WHOLE, LARGER_CPU = (
    f"model_cards/qwen2.5-coder-1.5b/{name}.jsonl" for name in ("rows", "speed", "speed_cpu")
)
WHOLE_RUN = "union25-half"  # which was timed as a whole model
GUESSING = statistics.mean((0.0, 0.25, 0.25, 0.25))  # what it scores in the four tasks
METRICS = {"lambada_openai": "acc", "arc_easy": "acc", "arc_challenge": "acc_norm", "hellaswag": "acc_norm"}


class Drawing:
    def __init__(self, width: int, height: int, told: str) -> None:
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{told}">'
        )
        self.parts = [f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>']

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{words}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>')

    def dot(self, x: float, y: float, radius: float, kind: str) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{kind}"/>')

    def line(self, points: list[tuple[float, float]], kind: str) -> None:
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{joined}" class="{kind}"/>')

    def __str__(self) -> str:
        return "\n".join([self.head, STYLE, *self.parts, "</svg>"]) + "\n"


def front(root: Path) -> Drawing:
    """Left a dense and a sparse block; right what conversions keep against how fast they run."""
    drawing = Drawing(960, 404, "A dense beside a sparse block, and quality against speed")
    _block(drawing, 24, "Dense block", set(range(20)), "every neuron's weights are read")
    _block(drawing, 258, "Sparse block, one token", {3, 13}, "the gate tells which few are needed")
    drawing.line([(492, 24), (492, 380)], "rule")
    _chart(drawing, conversions(root))
    return drawing


def _block(drawing: Drawing, left: float, title: str, active: set[int], told: str) -> None:
    drawing.text(left, 40, title, "title")
    for top, name in ((62, "gate"), (160, "up"), (244, "down")):
        drawing.text(left, top + 37, name, "soft small")
        for neuron in range(20):
            kind = "a" if name == "gate" or neuron in active else "off"
            drawing.box(left + 44 + 8.6 * neuron, top, 7, 62, kind)
    for neuron in range(20):
        drawing.dot(left + 47.5 + 8.6 * neuron, 141, 3.2, "b" if neuron in active else "off")
    drawing.text(left, 145, "active", "soft small")
    drawing.text(left, 338, told, "soft small")


class Conversion(NamedTuple):
    told: str
    kept: float  # of its parent's tasks, as recipes/study/report.py has it
    gains: list[float]  # times the parent's steps, by the GPU's time, of each of LOADS that was timed


LOADS = ("decode", 1), ("decode", 16), ("prefill", 8)


def conversions(root: Path) -> list[Conversion]:
    """Those whose steps in vLLM were timed."""
    found = []
    for size, path, run, control, speeds, sides in (
        ("1.5B", LARGER, "ten", None, LARGER_WHOLE, ("parent beside ten", "ten, kernels on")),
        ("0.5B", OWN_TEXT, WHOLE_RUN, "dense-29M", WHOLE, ("parent", "kernels on")),
        ("1.5B", LARGER, "union25-2e-4", None, LARGER_WHOLE, ("parent", "kernels on")),
    ):
        (training,) = (row["training"] for row in _read(root, path) if row["run"] == run and "training" in row)
        steps = {(row.get("engine"), row.get("measured"), row.get("batch")): row for row in _read(root, speeds)}
        dense, sparse = ([steps.get((side, *load)) for load in LOADS] for side in sides)
        gains = [a["step_us"] / b["step_us"] for a, b in zip(dense, sparse, strict=True) if a and b]
        told = f"{size}, {100 * training['density']:.0f} % active"
        found.append(Conversion(told, _kept(root, path, control)[run], gains))
    return found


def _read(root: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (root / name).read_text().splitlines()]


def _kept(root: Path, path: str, control: str | None) -> dict[str, float]:
    """Of the better of the parent and the dense control, if there is one."""
    above = {row["run"]: _mean_of_tasks(row) - GUESSING for row in _read(root, path) if "tasks" in row}
    best = max(above[name] for name in ("parent", control) if name)
    return {run: value / best for run, value in above.items()}


def _mean_of_tasks(row: dict) -> float:
    return statistics.mean(row["tasks"][task][metric]["value"] for task, metric in METRICS.items())


def _chart(drawing: Drawing, found: list[Conversion]) -> None:
    left, right, top, bottom = 556, 930, 84, 300
    drawing.text(512, 40, "Qwen-Coder, converted: tasks kept, and speed", "title")
    drawing.text(512, 58, "Whole models in vLLM on an H200, by the GPU's time.", "soft small")

    def place(speed: float, kept: float) -> tuple[float, float]:
        return left + (speed - 0.9) / 0.7 * (right - left), bottom - (kept - 0.5) / 0.5 * (bottom - top)

    for kept in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        y = place(1, kept)[1]
        drawing.line([(left, y), (right, y)], "rule")
        drawing.text(left - 8, y + 4, f"{100 * kept:.0f} %", "soft small", "end")
    for speed in (1, 1.2, 1.4, 1.6):
        drawing.text(place(speed, 1)[0], bottom + 18, f"{speed:g}x", "soft small", "middle")
    drawing.text((left + right) / 2, bottom + 36, "times the parent", "soft small", "middle")
    drawing.dot(*place(1, 1), 5, "ring")
    drawing.text(place(1, 1)[0] + 10, place(1, 1)[1] + 16, "the parent", "small")
    for (told, kept, gains), aside in zip(found, (-9, 18, 18), strict=True):
        places = [place(speed, kept) for speed in gains]
        drawing.line([min(places), max(places)], "rule")
        for kind, (x, y) in zip("abc", places, strict=False):
            drawing.dot(x, y, 5, kind)
        drawing.text(min(places)[0], places[0][1] + aside, told, "small")
    for kind, x, told in zip("abc", (512, 638, 764), ("one sequence", "16 sequences", "prefill"), strict=True):
        drawing.dot(x + 4, 352, 4, kind)
        drawing.text(x + 14, 356, told, "small")
    drawing.text(512, 378, "Most code is lost, which these tasks do not ask for.", "soft small")


class Point(NamedTuple):
    """What runs (`side`) which model (`run`), and how fast."""

    side: str
    run: str
    tokens_per_s: float
    gpu_alone: bool = False  # by the GPU's time, without what surrounds it


# Of each panel: its title, what was measured, and the step of its axis. Sequences, or tokens of a prompt.
ON_GPU = (
    ("vLLM: decode, 1 sequence", ("decode", 1), 500),
    ("vLLM: decode, 16 sequences", ("decode", 16), 5000),
    ("vLLM: decode, 64 sequences", ("decode", 64), 20_000),
    ("vLLM: prefill of 8 x 2,048", ("prefill", 8), 400_000),
)
ON_CPU = (("CPU: one sequence, {}", "generate", 10), ("CPU: prompt of 1,024, {}", "prefill", 100))
LARGER_STEPS = 400, 5000, 20_000, 200_000, 5, 500  # of the axes of six panels, which are in the order of those above
# What runs, by its name in the rows: the side that is drawn, and the run whose tasks are its height.
LARGER_SIDES = {
    "parent": ("parent", "parent"),
    "parent, fp8": ("fp8", "parent"),
    "0.5B": ("0.5B", "0.5B"),
    "kernels off": ("kernels off", "union25-2e-4"),
    "kernels on": ("kernels on", "union25-2e-4"),
    "ten, kernels on": ("ten", "ten"),
}
MARKS = {
    "parent": ("c", "dot"),
    "llama.cpp": ("c", "peak"),
    "fp8": ("c", "box"),
    "0.5B": ("c", "peak"),
    "kernels off": ("b", "box"),
    "kernels on": ("a", "dot"),
    "ten, kernels off": ("b", "peak"),
    "ten": ("a", "peak"),
}  # of each side: its colour and its shape. The last lie above


def coder_points(root: Path) -> dict[str, tuple[int, list[Point]]]:
    """By the title of its panel: the axis's step, and the points. On the CPU each load has the faster data type."""
    found = {}
    for title, load, step in ON_GPU:
        points = []
        for row in _read(root, WHOLE):
            if (row.get("measured"), row.get("batch")) == load:
                run = "parent" if row["engine"] == "parent" else WHOLE_RUN
                points.append(Point(row["engine"], run, 1e6 * _tokens_of(row) / row["step_us"], gpu_alone=True))
                points.append(Point(row["engine"], run, statistics.median(row["tokens_per_s"])))
        found[title] = step, points
    rows = _read(root, WHOLE_CPU)
    for title, bench, step in ON_CPU:
        points = [
            Point("llama.cpp", "parent", row["tokens_per_s"])
            for row in rows
            if row["bench"] == "llama-bench" and bool(row["new_tokens"]) == (bench == "generate")
        ]
        fastest = max((row for row in rows if row["bench"] == bench), key=_rates)
        sides = zip(("kernels on", "kernels off"), _rates(fastest), strict=True)
        points += [Point(side, fastest["model"], rate) for side, rate in sides]
        found[title.format(fastest["dtype"])] = step, points
    return found


def _rates(row: dict) -> tuple[float, float]:
    """Tokens a second on the CPU, with kernels and without."""
    if row["bench"] == "generate":
        return row["sparse_tokens_per_s"], row["dense_tokens_per_s"]
    return 1000 * row["length"] / row["sparse_ms"], 1000 * row["length"] / row["eager_ms"]


def larger_coder_points(root: Path) -> dict[str, tuple[int, list[Point]]]:
    """As `coder_points`; on the GPU by its time alone, and on the CPU the faster run of each load."""
    found, steps = {}, iter(LARGER_STEPS)
    rows = [row for row in _read(root, LARGER_WHOLE) if row["engine"] in LARGER_SIDES]
    for title, load, _ in ON_GPU:
        points = [
            Point(*LARGER_SIDES[row["engine"]], 1e6 * _tokens_of(row) / row["step_us"], gpu_alone=True)
            for row in rows
            if (row["measured"], row["batch"]) == load
        ]
        found[title] = next(steps), points
    rows = [row for row in _read(root, LARGER_CPU) if row["model"] == "ten"]
    for title, bench in (("CPU: one sequence", "generate"), ("CPU: prompt of 512", "prefill")):
        rates = _rates(max((row for row in rows if row["bench"] == bench), key=_rates))
        sides = zip(("ten", "ten, kernels off"), rates, strict=True)
        found[title] = next(steps), [Point(side, "ten", rate) for side, rate in sides]
    return found


def _tokens_of(row: dict) -> int:
    return row["prompt_tokens"] if row["measured"] == "prefill" else row["batch"]


def coder(root: Path) -> Drawing:
    """Qwen-Coder's conversions beside their parent: tasks against tokens a second, a panel for each load."""
    drawing = Drawing(960, 472, "Qwen-Coder's conversions beside their parent: tasks against tokens a second")
    scores = _scores(root, QWEN, OWN_TEXT)
    legend = {
        "parent": "the parent, stock code",
        "llama.cpp": "the parent in 4 bits, llama.cpp (two runs); the same weights",
        "kernels off": "a conversion, kernels off",
        "kernels on": "a conversion, kernels on",
    }
    notes = (
        f"GPU: H200, bfloat16, {WHOLE_RUN}; end to end is the median of three.",
        "CPU: two cores of an EPYC; union40-half-57M, in its faster data type.",
    )
    _legend(drawing, legend, 284, notes)
    for y, hollow, told in (
        (328, False, "filled: end to end, by the clock"),
        (350, True, "hollow: by the GPU's time alone"),
    ):
        _mark(drawing, 734, y, "kernels on", hollow)
        drawing.text(748, y + 4, told, "small")
    for index, (title, (step, points)) in enumerate(coder_points(root).items()):
        left, top = 52 + 232 * (index % 4), 80 + 208 * (index // 4)
        place = _panel(drawing, left, top, title, step, points, scores, (0.2, 0.3, 0.4))
        for run in dict.fromkeys(point.run for point in points):
            name = "parent" if run == "parent" else f"{100 * scores[run]['training']['density']:.0f} % active"
            y = place(0, _mean_of_tasks(scores[run]))[1] + (-10 if run == "parent" else 35)
            drawing.text(left + 5, y, f"{name}: HumanEval {_solved(scores[run])}", "small")
    return drawing


def larger_coder(root: Path) -> Drawing:
    """The same of the 1.5B, beside what one would take instead: its parent in fp8, and the parent of 0.5B."""
    drawing = Drawing(
        960, 500, "Qwen-Coder-1.5B's conversions, its parent and a smaller one: tasks against tokens a second"
    )
    scores = _scores(root, LARGER)
    scores["0.5B"] = _scores(root, QWEN, OWN_TEXT)["parent"]
    solved = {run: f"HumanEval {_solved(scores[run])}" for run in ("parent", "0.5B", "union25-2e-4", "ten")}
    legend = {
        "parent": f"the parent, stock code: {solved['parent']}",
        "fp8": "the parent in fp8 (tasks not measured: drawn as high)",
        "0.5B": f"the parent of 0.5B: {solved['0.5B']}; random weights' time",
        "kernels off": "union25-2e-4, 4 % active, kernels off",
        "kernels on": f"the same, kernels on: {solved['union25-2e-4']}",
        "ten, kernels off": "ten, 10 % active, kernels off",
        "ten": f"the same, kernels on: {solved['ten']}",
    }
    notes = (
        "GPU: H200, bfloat16, by the GPU's time alone (hollow).",
        "CPU: eight cores of a Xeon with AMX, bfloat16, by the clock (filled).",
    )
    _legend(drawing, legend, 260, notes)
    for index, (title, (step, points)) in enumerate(larger_coder_points(root).items()):
        left, top = 52 + 232 * (index % 4), 80 + 208 * (index // 4)
        _panel(drawing, left, top, title, step, points, scores, (0.2, 0.3, 0.4, 0.5, 0.6))
    return drawing


def _scores(root: Path, *paths: str) -> dict[str, dict]:
    """What the rows of each run say together."""
    found: dict[str, dict] = {}
    for path in paths:
        for row in _read(root, path):
            found.setdefault(row["run"], {}).update(row)
    return found


def _solved(score: dict) -> str:
    return f"{100 * score['written']['humaneval_instruct']['pass@1,create_test']['value']:.0f} %"


def _legend(drawing: Drawing, sides: dict[str, str], top: int, notes: tuple[str, ...]) -> None:
    drawing.text(24, 34, "Mean of four tasks (%, upwards), against tokens a second (to the right)", "title")
    for index, (side, told) in enumerate(sides.items()):
        _mark(drawing, 524, top + 22 * index, side)
        drawing.text(538, top + 4 + 22 * index, told, "small")
    tasks = "Tasks: LAMBADA, ARC-easy (acc), ARC-challenge, HellaSwag (acc_norm)."
    begins = f"The axis begins at what guessing scores, {100 * GUESSING:.2f} %."
    for index, told in enumerate((*notes, tasks, begins)):
        drawing.text(516, top + 12 + 22 * len(sides) + 19 * index, told, "soft small")


def _panel(
    drawing: Drawing,
    left: float,
    top: float,
    title: str,
    step: int,
    points: list[Point],
    scores: dict[str, dict],
    means: tuple[float, ...],
) -> Callable[[float, float], tuple[float, float]]:
    """Returns where (tokens a second, mean of the tasks) lies."""
    width, height, most = 196, 130, 1.06 * max(point.tokens_per_s for point in points)

    def place(tokens_per_s: float, mean: float) -> tuple[float, float]:
        return left + width * tokens_per_s / most, top + height * (
            1 - (mean - GUESSING) / (means[-1] + 0.05 - GUESSING)
        )

    drawing.text(left, top - 12, title, "small")
    for mean in means:
        y = place(0, mean)[1]
        drawing.line([(left, y), (left + width, y)], "rule")
        drawing.text(left - 6, y + 4, f"{100 * mean:.0f}", "soft small", "end")
    drawing.line([(left, top), (left, top + height), (left + width, top + height)], "rule")
    for tokens_per_s in range(0, int(most) + 1, step):
        drawing.text(place(tokens_per_s, 0)[0], top + height + 16, f"{tokens_per_s:,}", "soft small", "middle")
    drawing.text(left + width / 2, top + height + 33, "tokens a second", "soft small", "middle")
    for point in sorted(points, key=lambda point: list(MARKS).index(point.side)):
        x, y = place(point.tokens_per_s, _mean_of_tasks(scores[point.run]))
        _mark(drawing, x, y, point.side, point.gpu_alone)
    return place


def _mark(drawing: Drawing, x: float, y: float, side: str, hollow: bool = False) -> None:
    colour, shape = MARKS[side]
    kind = f"line l{colour}" if hollow else colour
    if shape == "box":
        drawing.box(x - 5, y - 5, 10, 10, kind)
    elif shape == "peak":
        drawing.line([(x - 6, y + 6), (x, y - 6), (x + 6, y + 6)], kind)
    else:
        drawing.dot(x, y, 4, kind)


def twell() -> Drawing:
    """A token's activations, and what TwELL makes of them."""
    drawing = Drawing(760, 236, "A token's activations in tiles, and the same packed as TwELL")
    values = {2: "0.4", 9: "1.1", 12: "0.2", 13: "0.7", 22: "0.9"}
    drawing.text(24, 36, "One token: 24 neurons in 3 tiles, as the gate's matmul computes them", "title")
    for neuron in range(24):
        x = 24 + 29 * neuron + 8 * (neuron // 8)
        drawing.box(x, 56, 27, 30, "a" if neuron in values else "off")
        drawing.text(x + 13, 102, str(neuron), "soft small", "middle")
    drawing.text(24, 140, "Packed: for each tile a count, then (neuron: value) in a fixed number of slots", "title")
    for tile in range(3):
        x = 24 + tile * 240
        mine = [(neuron, value) for neuron, value in values.items() if neuron // 8 == tile]
        drawing.box(x, 160, 28, 34, "off")
        drawing.text(x + 14, 182, str(len(mine)), "", "middle")
        for slot in range(3):
            drawing.box(x + 34 + 64 * slot, 160, 60, 34, "rule")
            if slot < len(mine):
                neuron, value = mine[slot]
                drawing.text(x + 64 + 64 * slot, 182, f"{neuron}: {value}", "small", "middle")
    drawing.text(
        24,
        220,
        "Fixed places need no second pass; a tile with more active neurons than slots has no room.",
        "soft small",
    )
    return drawing


STRANGERS = [{1, 14}, {5, 20}, {8, 2}, {11, 17}, {3, 14}, {19, 6}, {22, 9}, {12, 16}]
NEIGHBOURS = [{1, 14}, {1, 5}, {14, 5}, {5, 17}, {1, 14}, {17, 5}, {14, 22}, {1, 17}]


def union() -> Drawing:
    """The same number of active neurons a token, spread and shared."""
    drawing = Drawing(760, 300, "Eight tokens that use many neurons together, and eight that share them")
    for left, title, tokens in (
        (24, "Each token its own neurons", STRANGERS),
        (396, "Neighbours share neurons", NEIGHBOURS),
    ):
        drawing.text(left, 36, title, "title")
        for row, active in enumerate(tokens):
            for neuron in range(24):
                drawing.box(left + 14 * neuron, 54 + 20 * row, 12, 17, "a" if neuron in active else "off")
        together = set().union(*tokens)
        for neuron in range(24):
            drawing.box(left + 14 * neuron, 226, 12, 17, "b" if neuron in together else "off")
        drawing.text(left, 266, "Active: 2 of 24 neurons for each token.", "small")
        drawing.text(left, 284, f"Union: {len(together)} of 24. A block of tokens reads these weights.", "small")
    return drawing


def hybrid() -> Drawing:
    """Rows of few entries for ordinary tokens, whole rows for the few that overflow."""
    drawing = Drawing(760, 268, "Ordinary tokens in short rows, a heavy token in a whole row")
    drawing.text(24, 36, "What forward keeps for backward", "title")
    for row, count in enumerate((2, 1, 3, 4, 2)):
        drawing.text(24, 75 + 26 * row, f"token {row}", "soft small")
        for slot in range(4):
            kind = "b" if row == 3 else "a"
            drawing.box(86 + 34 * slot, 60 + 26 * row, 32, 21, kind if slot < count else "off")
    drawing.text(86, 214, "short rows: a few entries a token", "small")
    drawing.text(300, 153, "did not fit: kept whole, beside the others", "small")
    drawing.line([(226, 148), (292, 148)], "line lb")
    for neuron in range(24):
        drawing.box(300 + 18 * neuron, 168, 16, 21, "b" if neuron in {0, 3, 4, 8, 9, 13, 17, 20, 21} else "off")
    drawing.text(300, 214, "a whole row: as many places as there are neurons", "small")
    drawing.text(
        24, 246, "Memory follows the neurons that are active, and one heavy token costs one long row.", "soft small"
    )
    return drawing


def draw(root: Path, folder: Path) -> list[Path]:
    """Every drawing, from the rows under `root`, into `folder`."""
    drawings = {"front": front(root), "coder": coder(root), "larger-coder": larger_coder(root)}
    drawings |= {"twell": twell(), "union": union(), "hybrid": hybrid()}
    for name, drawing in drawings.items():
        (folder / f"{name}.svg").write_text(str(drawing))
    return [folder / f"{name}.svg" for name in drawings]
