"""Every figure of the rows, drawn from those rows alone, and the drawings of docs/ (`make figures`).

    python docs/figures.py [ROOT]

`bench.jsonl` under kernels/ gives a figure for each kind of bench beside it. `pictures.py` has the drawings.
"""

import json
import sys
from itertools import groupby
from pathlib import Path

import pictures

from hf_twell.bench.plot import AXES, plot

HERE = Path(__file__).resolve().parent.parent


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def kind_of(row: dict) -> tuple[str, str]:
    return row["bench"], row.get("pass") or "forward"


def main(root: Path) -> list[Path]:
    drawn = []
    for path in sorted(root.glob("kernels/*/bench/**/bench.jsonl")):
        for (bench, direction), rows in groupby(sorted(rows_of(path), key=kind_of), key=kind_of):
            rows = list(rows)
            if len({row.get(AXES[bench][0]) for row in rows}) < 2:  # no line
                continue
            name = "bench" if bench == "ffn" and direction == "forward" else bench if bench != "ffn" else "backward"
            drawn.append(path.with_name(f"{name}.png"))
            plot(rows, drawn[-1])
    (root / "docs").mkdir(exist_ok=True)
    return drawn + pictures.draw(root, root / "docs")


if __name__ == "__main__":
    for path in main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE):
        print(path)
