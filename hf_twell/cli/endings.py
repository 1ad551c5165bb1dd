"""How a command ends: an exit code, and of whatever is raised one line on stderr."""

import os
import select
import sys
import tempfile
import traceback
from collections.abc import Callable


def ending_in_one_line(name: str, run: Callable[[], int]) -> int:
    """The exit code of `run`: 1 after an error, 130 after Ctrl-C, each told in one line that begins with `name`.

    A user's mistake and what the system refuses come as a ValueError, OSError or ImportError, whose message says what
    to do. Of any other error the line names the kind, and the file that keeps its traceback: it may have taken hours to
    come, and nobody can mend it without.
    """
    _open_closed_streams()
    try:
        code = run()
        sys.stdout.flush()  # a full disk, or a reader that went away, shows here at the latest
        return code
    except SystemExit:
        raise
    except KeyboardInterrupt as error:
        print("; ".join([f"\n{name}: interrupted", *map(str, error.args)]), file=sys.stderr)
        return 130
    except BrokenPipeError as error:
        if _is_read_by_nobody():  # as of `| head`: nothing is wrong, and nobody is left to tell
            _finish_output()
            return 0
        print(f"{name}: error: {_one_line(error)}", file=sys.stderr)  # another pipe's, such as a worker's
    except (ValueError, OSError, ImportError) as error:
        print(f"{name}: error: {_one_line(error)}", file=sys.stderr)
    except BaseException as error:  # as which a panic in Rust comes
        print(f"{name}: error: {type(error).__name__}: {_one_line(error)}; {_keep_traceback()}", file=sys.stderr)
    _finish_output()
    return 1


def _open_closed_streams() -> None:
    """Give what was closed (`>&-`) a place to go.

    Its descriptor would be that of the next file opened, a model's perhaps, and take what child processes print.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
            setattr(sys, name, open(descriptor, "w" if descriptor else "r"))  # noqa: SIM115


def _is_read_by_nobody() -> bool:
    """Whether the reader of our output, or of our errors, went away: such a pipe polls as an error."""
    polled = select.poll()
    for descriptor in (1, 2):
        polled.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in polled.poll(0))


def _finish_output() -> None:
    """What stdout still holds and nobody takes must not fail once more, in Python's own words, when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(error: BaseException) -> str:
    from hf_twell.cli.doctor import PACKAGES
    from hf_twell.files.packages import how_to_install

    if isinstance(error, ModuleNotFoundError) and error.name in PACKAGES:
        return f"this needs the package {error.name}: {how_to_install(error.name)}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if any(line.startswith("Traceback ") or line.startswith("Original Traceback ") for line in lines):
        return lines[-1]  # of a worker process, whose error comes as text
    # Transformers' messages for a wrong model name run over many lines; the first two say it.
    return " ".join(lines[:2]) or type(error).__name__


def _keep_traceback() -> str:
    """Write down what is being handled, and say where."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix="hf-twell-", suffix=".txt", delete=False) as file:
            traceback.print_exc(file=file)
    except OSError as error:
        return f"there is no place for its traceback ({error.strerror})"
    return f"its traceback is in {file.name}"
