"""How processes that share the study's folder divide its runs: by file locks, which end with the process."""

import contextlib
import fcntl
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

WAIT_S = 2.0


class Turn:
    """One run to be made: its id, and that of the run which must be done before; held while it is entered."""

    def __init__(self, id: str, needs: str | None):
        self.id, self.needs, self._file = id, needs, None

    def take(self, folder: Path) -> bool:
        """Whether this process has it now; False where another one has."""
        folder.mkdir(exist_ok=True)
        file = (folder / re.sub(r"[^A-Za-z0-9.]+", "_", self.id)).open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return False
        self._file = file
        return True

    def leave(self) -> None:
        self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.leave()


def next_turn(
    turns: list[Turn], done: Callable[[], set[str]], folder: Path, is_made: Callable[[str], bool]
) -> Turn | None:
    """The first run that is not done, not under way and has what it needs; waits for one; None once all are done.

    Args:
        done: ids of runs of which nothing is left to do, by now.
        is_made: whether the model of the run with that id is there already, though its row may not be.

    Raises:
        SystemExit: a run needs another one that is neither done nor among `turns`.
    """
    while True:
        finished = done()
        left = [turn for turn in turns if turn.id not in finished]
        for turn in left:
            if turn.needs is not None and turn.needs not in finished and not is_made(turn.needs):
                if all(turn.needs != other.id for other in left):
                    raise SystemExit(f"{turn.id} begins with the model of {turn.needs}; run that first")
            elif turn.take(folder):
                if turn.id not in done():
                    return turn
                turn.leave()  # done since
        if not left:
            return None
        time.sleep(WAIT_S)


@contextlib.contextmanager
def alone(path: Path):
    """What only one process at a time may do."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().split("\n") if line] if path.is_file() else []
