"""`hf-twell serve` as a user runs it: a process of its own, asked over HTTP, stopped by Ctrl-C."""

import contextlib
import json
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.conftest import started


class Server(NamedTuple):
    process: subprocess.Popen
    url: str
    lines: list[str]  # what it printed until it was ready

    def ask(self, route: str, body: dict | None = None):
        """The JSON of an answer; of a refusal, its message."""
        try:
            with self.open(route, body) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return json.load(error)["error"]["message"]

    def open(self, route: str, body: dict | None = None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + route, data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=120)

    def stop(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)


@contextlib.contextmanager
def serving(folder: Path, *arguments: str | Path, **environment: str) -> Iterator[Server]:
    """A server that is ready; afterwards it ends at Ctrl-C, without an error."""
    errors = folder / "stderr"
    with errors.open("w") as stderr:
        process = started("serve", *arguments, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
    try:
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if "curl" in line:
                break
        else:
            raise AssertionError(errors.read_text())
        yield Server(process, re.search(r"ready at (\S+)/v1", "\n".join(lines))[1], lines)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, errors.read_text()
    assert "Traceback" not in errors.read_text()
    assert errors.read_text().splitlines()[-1] == "hf-twell: stopped"
