"""Which backends work on this machine, why the others do not, and the compiled libraries behind them.

One library defines the operators ("ops"), and each compiled backend adds its implementation with its own. A library is
looked for in the package, where a wheel brings it, then in the user's cache, and is else compiled into that with ninja.
Its name carries a hash of everything that it depends on, so a stale one is never loaded, and the hash of its own bytes,
so a damaged one is not either: the loader would map it, and a file that was cut short ends the process. The cache is
`$HF_TWELL_CACHE`, or `hf_twell` under `$XDG_CACHE_HOME` or `~/.cache`.
"""

import fcntl
import hashlib
import importlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from hf_twell.ops import toolchain
from hf_twell.ops.toolchain import BuildError

logger = logging.getLogger(__name__)

# Each compiled backend, and the type of the devices whose tensors it takes. "auto" takes the first that works.
DEVICE_OF = {"cpu": "cpu", "cuda": "cuda"}
BACKENDS = ("reference", *DEVICE_OF)
PREBUILT = Path(__file__).parents[1] / "prebuilt"  # only a wheel has it
_outcomes: dict[str, "BackendStatus"] = {}
_lock = threading.Lock()


class BackendStatus(NamedTuple):
    name: str
    available: bool
    reason: str


def status(name: str, *, build: bool = False) -> BackendStatus:
    """Whether one backend can run here; `reason` says why not, and what would change it.

    Args:
        build: compile the backend's library if need be (a minute, once per user); a failure warns once. Without it
            what is there is loaded, and a backend that would compile at first use counts as available.
    """
    if name in _outcomes:  # first, as every call of a block asks
        return _outcomes[name]
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; choose one of 'auto', {', '.join(map(repr, BACKENDS))}")
    if name == "reference":
        return BackendStatus(name, True, f"plain PyTorch {torch.__version__}")
    if DEVICE_OF.get(name) == "cuda" and not torch.cuda.is_available():
        return BackendStatus(name, False, "PyTorch sees no CUDA GPU; install a CUDA build of PyTorch on a GPU machine")
    if build:
        with _lock:
            if name not in _outcomes:
                _outcomes[name] = _load(name)
        return _outcomes[name]
    wrong = ""
    try:
        for library in _libraries(name):
            path, complaint = _load_found(library)
            wrong += complaint
            if path is None:  # without the operators their implementation is not loaded
                break
            origin = _origin(path)
        else:
            return BackendStatus(name, True, f"{wrong}{origin}")
        toolchain.compiler()
        if name == "cuda":
            toolchain.nvcc()
        _check_cache(cache_dir())
    except (BuildError, OSError) as error:
        return BackendStatus(name, False, f"{wrong}{error}")
    return BackendStatus(name, True, f"{wrong or 'not compiled yet; '}the first use compiles it into {cache_dir()}")


def _libraries(name: str) -> tuple[str, str]:
    """What a backend loads, in this order."""
    return "ops", name


def _load(name: str) -> BackendStatus:
    wrong = ""
    try:
        for library in _libraries(name):
            path, complaint = _load_found(library)
            wrong += complaint
            if path is None:
                path = compile_library(library)
                _open(path)
            origin = _origin(path)
        importlib.import_module("hf_twell.ops.kernel_ops")
    except (BuildError, OSError) as error:
        reason = f"{wrong}{error}"
        warnings.warn(f"hf_twell's {name} kernels are not used, plain PyTorch instead: {reason}", stacklevel=4)
        return BackendStatus(name, False, reason)
    return BackendStatus(name, True, origin)


def _load_found(name: str) -> tuple[Path | None, str]:
    """Load the first library that is there and loads; and what is wrong with others. A BuildError of one that does not
    load though it was compiled here: to compile it again would not help."""
    wrong = ""
    for path in find_libraries(name):
        try:
            _open(path)
            return path, wrong
        except BuildError as error:
            if path.parent != PREBUILT:
                raise
            wrong += f"{error}; "
    return None, wrong or _unfit(name)


def _open(library: Path) -> None:
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise BuildError(f"{library} does not load ({error.__cause__ or error})") from error  # in the linker's words


def _origin(library: Path) -> str:
    return f"{'came with the package' if library.parent == PREBUILT else 'compiled'}: {library}"


def cache_dir() -> Path:
    if os.environ.get("HF_TWELL_CACHE"):
        return Path(os.environ["HF_TWELL_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_twell"


def _check_cache(folder: Path) -> None:
    """A BuildError where it cannot be made or written; it is not made here."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    if not (os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)):
        raise BuildError(f"the cache directory {folder} cannot be written; set HF_TWELL_CACHE to one that can")


def stem(name: str, nvcc_version: str | None = None) -> str:
    """How the file name of a library that is compiled here begins: a hash of its sources, flags, torch and processor.
    nvcc's version stands beside it, so that a machine without nvcc finds a library that one with it made. A BuildError
    without kernel sources; for "cuda" also without a GPU to compile for, or an nvcc to ask for its version."""
    parts = [torch.__version__, str(torch.compiled_with_cxx11_abi()), sys.platform, platform.machine()]
    parts += [" ".join(toolchain.flags(name, file)) for file in toolchain.compiled(toolchain.sources(name))]
    end = f"-nvcc{nvcc_version or toolchain.nvcc_version()}" if name == "cuda" else ""
    return f"twell_{name}-{_digest(name, parts)}{end}"


def prebuilt_stem(name: str, cuda: str | None) -> str:
    """How the file name of a library that comes in a wheel begins: a hash of its sources and the ABI that it asks for.
    Of "cuda" the first number of `cuda`, "13.0" say, whose runtime it loads, stands beside it."""
    end = f"-cuda{str(cuda).partition('.')[0]}" if name == "cuda" else ""
    return f"twell_{name}-{_digest(name, [toolchain.STABLE_ABI_TARGET])}{end}"


def _digest(name: str, parts: list[str]) -> str:
    folder, digest = toolchain.kernels_dir(), hashlib.sha256("\0".join(parts).encode())
    for file in toolchain.sources(name):
        digest.update(file.encode() + b"\0" + (folder / file).read_bytes())
    return digest.hexdigest()[:20]


def file_name(stem: str, library: Path) -> str:
    """What a compiled library is called in the cache: its stem and the hash of its bytes."""
    with open(library, "rb") as file:
        return f"{stem}-{hashlib.file_digest(file, 'sha256').hexdigest()[:20]}.so"


def find_libraries(name: str) -> Iterator[Path]:
    """Whole libraries that fit this torch, these sources and this GPU, the best first; a BuildError as `stem`. Each is
    read when it is asked for."""
    return filter(_is_whole, [*_prebuilt(name), *_cached(name)])


def _unfit(name: str) -> str:
    """What is wrong with libraries that `find_libraries` does not name; nothing of one that is not there."""
    prebuilt = _prebuilt(name)
    wrong = [f"{path} is damaged; " for path in (*prebuilt, *_cached(name)) if not _is_whole(path)]
    if name == "cuda" and not prebuilt and not os.environ.get("HF_TWELL_CUDA_ARCH"):
        others = PREBUILT.glob(f"{prebuilt_stem(name, '*')}-*.so")
        wrong += [f"{path} is not for CUDA {torch.version.cuda}, which PyTorch has; " for path in others]
    return "".join(wrong)


def _prebuilt(name: str) -> list[Path]:
    """What came with the package. Whoever names architectures in $HF_TWELL_CUDA_ARCH wants the kernels compiled."""
    if name == "cuda":
        toolchain.architectures()  # a GPU that is too old is refused
        if os.environ.get("HF_TWELL_CUDA_ARCH"):
            return []
    return list(PREBUILT.glob(f"{prebuilt_stem(name, torch.version.cuda)}-*.so"))


def _cached(name: str) -> list[Path]:
    """What was compiled here, the newest nvcc's first."""
    try:
        start = stem(name)
    except BuildError:
        start = stem(name, nvcc_version="*")
    return sorted(cache_dir().glob(f"{start}-*.so"), reverse=True)


def _is_whole(library: Path) -> bool:
    try:
        return library.name == file_name(library.name.rpartition("-")[0], library)
    except FileNotFoundError:  # another process found it damaged, and removed it
        return False


def compile_library(name: str) -> Path:
    """Compile a library into the cache and return its path. Processes that start together compile it once. A BuildError
    without a compiler, where the cache cannot be written, or of a failed compilation (with its log)."""
    toolchain.compiler()
    folder, start = cache_dir(), stem(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / f"{start}.lock", "w")  # noqa: SIM115
    except OSError as error:
        raise BuildError(
            f"the cache directory {folder} cannot be written ({error.strerror}); set HF_TWELL_CACHE to one that can"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = next(filter(_is_whole, _cached(name)), None)
        if found is not None:  # another process was first
            return found
        try:
            message = "%scompiling hf_twell's %s library into %s, once; it may take a minute"
            logger.warning(message, _unfit(name), name, folder)
            for path in _cached(name):  # damaged, all of them
                path.unlink()
            return _run_ninja(name, start)
        except OSError as error:
            raise BuildError(f"compiling into {folder} failed ({error}); set HF_TWELL_CACHE elsewhere") from error


def _run_ninja(name: str, start: str) -> Path:
    cache = cache_dir()
    with tempfile.TemporaryDirectory(prefix="build-", dir=cache, ignore_cleanup_errors=True) as path:
        folder = Path(path)
        (folder / "build.ninja").write_text(toolchain.ninja_file(name))
        run = subprocess.run([toolchain.ninja(), "-C", str(folder)], capture_output=True, text=True, check=False)
        if run.returncode != 0:
            log = cache / f"{start}.log"
            log.write_text(run.stdout + run.stderr)
            tool = toolchain.nvcc() if name == "cuda" else toolchain.compiler()
            needed = "" if name == "cuda" else "; g++ has to be 11 or newer"  # -mamx-bf16
            raise BuildError(
                f"compiling the {name} kernels with {tool} failed; the compiler's messages are in {log}{needed}"
            )
        target = cache / file_name(start, folder / "library.so")
        os.replace(folder / "library.so", target)  # atomic: a reader sees the whole library or none
    return target
