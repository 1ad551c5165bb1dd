"""The server that `hf-twell bench serve` measures: a process of its own, started, waited for and stopped."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hf_twell.bench.progress import Report, silent
from hf_twell.bench.serve_client import HOST

POLL_SECONDS = 0.2
STOP_SECONDS = 30  # to end in, before it is killed
LAST_LINES = 40  # shown of a server that ended by itself


def free_port() -> int:
    with socket.create_server((HOST, 0)) as taken:
        return taken.getsockname()[1]


class Server:
    """One that is ready; `model` is its name in requests, `context` how many tokens it takes, where it says so."""

    def __init__(self, name: str, process: subprocess.Popen, port: int, log: Path, tell: Callable[[str], None]) -> None:
        self.name, self.process, self.port, self.log, self.tell = name, process, port, log, tell

    def wait_until_ready(self, report: Report = silent) -> None:
        """A ValueError where it ended instead."""
        begun = time.monotonic()
        while self.get("/health") is None:
            if self.process.poll() is not None:
                raise self.failure("while it started")
            report("starting", f"{self.name}, {time.monotonic() - begun:.0f} s")
            time.sleep(POLL_SECONDS)
        if (models := self.get("/v1/models")) is None:
            raise self.failure("while it started")
        (model, *_) = json.loads(models)["data"]
        self.model, self.context = model["id"], model.get("max_model_len")

    def get(self, route: str) -> bytes | None:
        """The answer, or None where there is none (yet)."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=10)
        try:
            connection.request("GET", route)
            answer = connection.getresponse()
            return answer.read() if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def says(self, pattern: str) -> str | None:
        """The first group of the first place in its output that fits."""
        found = re.search(pattern, self.log.read_text(errors="replace"))
        return found and found[1]

    def failure(self, when: str) -> ValueError:
        """The error to raise for a server that ended by itself; its last lines are told, unless one says it all."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)  # its connections end before it does
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        if lines and lines[-1].startswith("hf-twell: error: "):
            return ValueError(f"the {self.name} server: {lines[-1].removeprefix('hf-twell: error: ')}")
        for line in lines[-LAST_LINES:]:
            self.tell(f"  {line}")
        code = self.process.poll()
        how = "broke off" if code is None else f"ended (exit code {code})"
        return ValueError(
            f"the {self.name} server {how} {when}; above are its last lines. `hf-twell serve` with the same MODEL and "
            "options shows all of them"
        )


@contextlib.contextmanager
def serving(
    name: str,
    command: list[str],
    port: int,
    log: Path,
    report: Report = silent,
    tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> Iterator[Server]:
    """A server that is ready, in a process group of its own, so that Ctrl-C in the terminal is not its; a ValueError
    where it ended before. `command` serves at `port`, `log` gets what it prints, and `tell` lines that stay."""
    with log.open("wb") as output, _exit_at_sigterm():
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            server = Server(name, process, port, log, tell)
            server.wait_until_ready(report)
            yield server
        finally:
            report("stopping", name)
            _stop(process)


def _stop(process: subprocess.Popen) -> None:
    """It, and after it all that it has started. SIGTERM: a shell in the background has its children ignore Ctrl-C."""
    try:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _exit_at_sigterm() -> Iterator[None]:
    """Else the server would outlive us."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
