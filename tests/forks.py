"""Processes that need not import PyTorch and Transformers for seconds: forks of one that has."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

FORK = """
import json, os, sys
import peft, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

for line in sys.stdin:
    told = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(told["folder"])
        for name, number in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(told[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        exec(compile(told["code"], "<string>", "exec"), {"__name__": "__main__"})
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextlib.contextmanager
def forks(folder: Path, environment: dict) -> Iterator[Callable[[str, Path], subprocess.CompletedProcess]]:
    """A function that runs code in a working directory, as `python -c` would there.

    Args:
        folder: for what they print. environment: of them all.
    """
    command, pipe = [sys.executable, "-c", FORK], subprocess.PIPE
    process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, cwd=folder)
    output = {name: folder / name for name in ("stdout", "stderr")}

    def run(code: str, folder: Path) -> subprocess.CompletedProcess:
        told = {"code": code, "folder": os.fspath(folder), **{name: str(path) for name, path in output.items()}}
        process.stdin.write(json.dumps(told) + "\n")
        process.stdin.flush()
        status = int(process.stdout.readline())
        return subprocess.CompletedProcess(code, status, **{name: path.read_text() for name, path in output.items()})

    try:
        yield run
    finally:
        process.stdin.close()
        process.wait(60)
