"""A table of a study's rows: what each run lost against the better of its parent and its dense controls.

    python recipes/study/report.py out/qwen2.5-coder/rows.jsonl

*Excess* is the mean over the texts of loss / (lowest loss of the parent and the controls) - 1. A text that has not as
many tokens as theirs is another one: it is left out. *Kept* is a model's accuracy above chance (mean of the tasks) over
that of the parent or the best control. A control is a run with relu=false that read the recipe's texts. Density and
union (the share of neurons that at least one of 64 neighbouring tokens activates) are of the held-out texts, and means
over layers. Each task's column names its metric.
"""

import statistics
import sys
from pathlib import Path

from study import rows_of

from hf_twell.files.tables import markdown_table, percent

METRICS = {"lambada_openai": "acc", "arc_easy": "acc", "arc_challenge": "acc_norm", "hellaswag": "acc_norm"}
CHANCE = {"lambada_openai": 0.0, "arc_easy": 0.25, "arc_challenge": 0.25, "hellaswag": 0.25}
WRITTEN = {"humaneval_instruct": "pass@1,create_test", "gsm8k_cot": "exact_match,flexible-extract"}


def accuracy(row: dict, task: str) -> float:
    return row["tasks"][task][METRICS[task]]["value"]


def above_chance(row: dict) -> float:
    """Mean of the tasks' accuracies, less that of guessing."""
    return statistics.mean(accuracy(row, task) - CHANCE[task] for task in METRICS)


def is_control(row: dict) -> bool:
    """Trained dense, by the texts of the recipe."""
    changes = row["changes"]
    dense = isinstance(changes, list) and "relu=false" in changes
    return dense and not any(change.startswith("train=") for change in changes)


def bases(rows: list[dict]) -> list[dict]:
    """The parent and the controls, which the others are compared with."""
    return [row for row in rows if row["changes"] is None or is_control(row)]


def texts_alike(row: dict, rows: list[dict]) -> list[str]:
    """The texts that have as many tokens as those of the first base: others of that name are other text."""
    tokens = bases(rows)[0].get("heldout_tokens", {})
    return [text for text in row["losses"] if row.get("heldout_tokens", {}).get(text) == tokens.get(text)]


def excess(row: dict, rows: list[dict]) -> float:
    def lowest(text: str) -> float:
        return min(base["losses"][text] for base in bases(rows) if text in texts_alike(base, rows))

    return statistics.mean(row["losses"][text] / lowest(text) - 1 for text in texts_alike(row, rows))


def kept(row: dict, rows: list[dict]) -> float:
    return above_chance(row) / max(above_chance(base) for base in bases(rows))


def table(rows: list[dict]) -> str:
    """A Markdown table, one line a row."""
    texts = list(rows[0]["losses"])
    head = ["run", "Mtokens", "learning rate", "density", "union of 64", *(f"loss: {text}" for text in texts), "excess"]
    head += [*(f"{task} ({metric})" for task, metric in METRICS.items()), "kept"]
    head += [f"{task} ({metric.partition(',')[0]})" for task, metric in WRITTEN.items()]
    lines = []
    for row in rows:
        trained, written = row.get("training", {}), row.get("written", {})
        alike = texts_alike(row, rows)
        sparse = bool(trained) and "relu=false" not in row["changes"]
        lines.append(
            [
                row["run"] + (f" (first {row['limit']:,} rows)" if row.get("limit") else ""),
                f"{trained['tokens'] / 1e6:.1f}" if trained else None,
                f"{trained['learning_rate']:g}" if trained else None,
                percent(trained["density"]) if sparse else None,
                percent(trained["union"]["64"]) if sparse else None,
                *(f"{row['losses'][text]:.3f}" if text in alike else None for text in texts),
                f"{100 * excess(row, rows):+.1f} %" if alike else None,
                *(f"{100 * accuracy(row, task):.1f}" for task in METRICS),
                f"{100 * kept(row, rows):.0f} %",
                *(
                    f"{100 * written[task][metric]['value']:.1f}" if task in written else None
                    for task, metric in WRITTEN.items()
                ),
            ]
        )
    return markdown_table(head, lines)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(table([row for row in rows_of(Path(sys.argv[1])).values() if "losses" in row]))


if __name__ == "__main__":
    main()
