"""Programs that a model wrote, each run in a process that can compute and do nothing else.

The bound is the Linux kernel's: a filter of system calls (seccomp), which holds for root and for ordinary users, within
containers too. A confined program opens no socket, starts no process or thread, sends no signal, and changes, makes and
removes no file anywhere. It may read files that its user may read; nothing that it writes is kept.
"""

import functools
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CPU_SECONDS = 10
WALL_SECONDS = 60  # for programs that wait; those that compute end by CPU_SECONDS on a busy machine as on an idle one
MEMORY_BYTES = 2**30
MOST_NAME = 100  # characters of the exception that ended a program
_CONFINED = Path(__file__).with_name("confined.py")


def run_programs(
    programs: Sequence[str],
    *,
    cpu_seconds: int = CPU_SECONDS,
    wall_seconds: float = WALL_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
) -> list[str]:
    """How each Python program, which reads no standard input, ends, run as many at a time as there are processors:
    "passed" where it came to its end, the name of the exception that ended it, "time" or "died" (it left by `os._exit`,
    or crashed). Time and address space, the interpreter's own included, are of each. An OSError where programs cannot
    be confined."""
    run = functools.partial(_run, cpu_seconds=cpu_seconds, wall_seconds=wall_seconds, memory_bytes=memory_bytes)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(run, programs))


def check_sandbox() -> None:
    """Refuse, by a ValueError that says why, a machine that cannot confine programs."""
    how: str | OSError
    try:
        how = _run("") if sys.platform == "linux" else f"{sys.platform} is not Linux"
    except OSError as error:
        how = error
    if how != "passed":
        raise ValueError(
            f"programs that a model writes cannot be confined here ({how}); run this on Linux, x86_64 or aarch64, with "
            "seccomp, or leave these tasks out"
        )


def _run(
    program: str,
    cpu_seconds: int = CPU_SECONDS,
    wall_seconds: float = WALL_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
) -> str:
    # A program that ends its process early does not say it by accident. One that looks for it in this Python finds it.
    secret = secrets.token_hex(16)
    # Neither tokens nor settings of this process; numerical libraries get no threads, which the bound refuses.
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    env = kept | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-I", "-B", str(_CONFINED), str(memory_bytes), str(cpu_seconds)]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{secret}\n{program}".encode(errors="replace"))
            process.stdin.close()
            # Not read before the end: what floods the pipe waits until its time is over.
            process.wait(wall_seconds)
        except BrokenPipeError:
            return "died"
        except subprocess.TimeoutExpired:
            return "time"
        finally:
            process.kill()
        said = process.stdout.read().decode(errors="replace")
    word, _, rest = said.removeprefix(f"{secret} ").partition(" ") if said.startswith(f"{secret} ") else ("", "", "")
    if word == "unconfined":
        raise OSError(f"unconfined: {rest}")
    if word == "passed" and not rest:
        return word
    if word == "raised" and rest.isidentifier() and len(rest) <= MOST_NAME:  # of what a program writes, nothing else
        return rest if rest != "passed" else "died"
    return "time" if process.returncode == -signal.SIGXCPU else "died"
