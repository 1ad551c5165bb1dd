"""What the studies' commands share: their arguments, and runs one after another whose rows are kept as they come."""

import argparse
import json
import math
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from study_sharing import Turn, alone, next_turn, read_rows


def study_arguments(description: str) -> argparse.ArgumentParser:
    """The parser of what every study's command takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="a YAML file such as recipes/study.yaml")
    parser.add_argument("--text", type=Path, help="folder with the text sources")
    parser.add_argument("--eval", type=Path, help="folder with the tasks' rows; without it only losses are measured")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[""], help="only runs whose id contains one of these")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run later than this")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the demo's text, on a CPU")
    parser.add_argument("--list", action="store_true", help="say which rows are missing, and stop")
    return parser


def merged(study: dict, changes: dict) -> dict:
    """A study with other values for some keys, at any depth."""
    return {
        key: merged(value, changes[key]) if isinstance(value, dict) and key in changes else changes.get(key, value)
        for key, value in {**changes, **study}.items()
    }


def missing_runs(runs: list[dict], rows: list[dict], only: list[str]) -> list[dict]:
    """Those without a row whose id contains one of `only`."""
    done = {row["id"] for row in rows}
    return [run for run in runs if run["id"] not in done and any(part in run["id"] for part in only)]


def list_runs(rows: list[dict], missing: list[dict]) -> None:
    print("\n".join([f"done    {row['id']}" for row in rows] + [f"missing {run['id']}" for run in missing]))


def make_rows(
    runs: list[dict],
    path: Path,
    *,
    needs: Callable[[dict], str | None],
    make: Callable[[dict], dict],
    report: Callable[[list[dict], Path], None],
    minutes: float,
    started: float,
    is_made: Callable[[str], bool] = lambda id: False,
) -> None:
    """Make the row of each run that no other process makes, append it to `path`, and draw the report beside that.

    Of the arguments, and of a run that fails, see `in_turns`. As soon as a run's model is there (`is_made`), others
    begin with it, while it is scored.
    """
    output = path.parent

    def make_row(run: dict) -> None:
        row = make(run)
        with alone(output / "rows.lock"), path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        with alone(output / "report.lock"):
            report(read_rows(path), output)

    def done() -> set[str]:
        return {row["id"] for row in read_rows(path)}

    in_turns(runs, output, make_row, done=done, needs=needs, is_made=is_made, minutes=minutes, started=started)


def in_turns(
    runs: list[dict],
    output: Path,
    make: Callable[[dict], object],
    *,
    done: Callable[[], set[str]],
    needs: Callable[[dict], str | None],
    is_made: Callable[[str], bool],
    minutes: float,
    started: float,
) -> None:
    """Make each run that is not done and that no other process makes; wait for what others make.

    A run that fails says why and leaves those that need it out; the others go on.

    Args:
        done: ids of runs of which nothing is left to make, by now.
        needs: the id of the run whose model one begins with.
        is_made: whether the model of the run with that id is there.
        minutes: after which no run begins, counted from `started` (of `time.monotonic()`).

    Raises:
        SystemExit: at the end, naming the runs that failed.
    """
    failed = []
    turns = [Turn(run["id"], needs(run)) for run in runs]
    while (taken := next_turn(turns, done, output / "turns", is_made)) is not None:
        with taken:
            if time.monotonic() - started > 60 * minutes:
                print(f"{minutes:g} minutes are over; the same command goes on with {taken.id}")
                break
            print(f"--- {taken.id}", flush=True)
            try:
                make(next(run for run in runs if run["id"] == taken.id))
            except Exception:
                traceback.print_exc()
                failed.append(taken.id)
                turns = _without(taken.id, turns)
    if failed:
        raise SystemExit(f"failed, for what stands above: {', '.join(failed)}; the same command tries again")


def _without(id: str, turns: list[Turn]) -> list[Turn]:
    """The turns but that of a run, and of those that begin with its model or with that of one of these."""
    gone = {id}
    while more := {turn.id for turn in turns if turn.needs in gone} - gone:
        gone |= more
    return [turn for turn in turns if turn.id not in gone]
