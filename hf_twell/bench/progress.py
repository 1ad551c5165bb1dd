"""What a benchmark is doing, shown beside its progress bar: a row can take minutes."""

import time
from collections.abc import Callable

from tqdm import tqdm

SECONDS = 1.0  # between two drawings of one phase, so that short calls are timed without any in between

Report = Callable[..., None]  # called with a phase, and with what changes in it; never inside what is timed


def silent(phase: str, detail: str = "") -> None:
    """A report that nobody reads."""


def shown_on(bar: tqdm) -> Report:
    """A report that a tqdm bar shows: a new phase at once, what changes in it at most once a second."""
    shown, since = None, 0.0

    def report(phase: str, detail: str = "") -> None:
        nonlocal shown, since
        now = time.monotonic()
        if phase != shown or now - since >= SECONDS:
            shown, since = phase, now
            bar.set_postfix_str(f"{phase} {detail}".rstrip())

    return report
