"""Which backends work on this machine, why the others do not, and the compiled libraries behind them.

One library defines the operators ("ops"), and each compiled backend adds its implementation with its own. A library is
looked for in the user's cache, and is else compiled into it with ninja. Its name carries a hash of everything that it
depends on, so a stale one is never loaded. The cache is `$HF_TWELL_CACHE`, or `hf_twell` under `$XDG_CACHE_HOME` or
`~/.cache`.
"""

import fcntl
import functools
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
from pathlib import Path
from typing import NamedTuple

import torch

from hf_twell.ops import toolchain
from hf_twell.ops.toolchain import BuildError

logger = logging.getLogger(__name__)

# Each compiled backend, and the type of the devices whose tensors it takes. "auto" takes the first that works.
DEVICE_OF = {"cpu": "cpu", "cuda": "cuda"}
BACKENDS = ("reference", *DEVICE_OF)
_outcomes: dict[str, "BackendStatus"] = {}
_lock = threading.Lock()


class BackendStatus(NamedTuple):
    name: str
    available: bool
    reason: str


def status(name: str, *, build: bool = False) -> BackendStatus:
    """Whether one backend can run here; `reason` says why not, and what would change it.

    Args:
        build: load the backend's library, compiling it first if need be (a minute, once per user); a failure warns
            once. Without it nothing is compiled: a backend that would compile at first use counts as available.
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
    try:
        found = find_library(name)
        if found is not None:
            return BackendStatus(name, True, f"compiled: {found}")
        toolchain.compiler()
        if name == "cuda":
            toolchain.nvcc()
        _check_cache(cache_dir())
    except BuildError as error:
        return BackendStatus(name, False, str(error))
    return BackendStatus(name, True, f"not compiled yet; the first use compiles it into {cache_dir()}")


def _load(name: str) -> BackendStatus:
    try:
        for library in ("ops", name):
            path = find_library(library) or compile_library(library)
            torch.ops.load_library(path)
        importlib.import_module("hf_twell.ops.kernel_ops")
    except (BuildError, OSError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.__cause__:
            reason += f": {error.__cause__}"  # the linker's own words
        warnings.warn(f"hf_twell's {name} kernels are not used, plain PyTorch instead: {reason}", stacklevel=4)
        return BackendStatus(name, False, reason)
    return BackendStatus(name, True, f"compiled: {path}")


@functools.cache
def processor_features() -> frozenset[str]:
    """Names of the CPU's instruction sets as Linux gives them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line.split(":", 1)[1] for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.split())


def cache_dir() -> Path:
    if os.environ.get("HF_TWELL_CACHE"):
        return Path(os.environ["HF_TWELL_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_twell"


def _check_cache(folder: Path) -> None:
    """Without making it.

    Raises:
        BuildError: it cannot be made or written.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    if not (os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)):
        raise BuildError(f"the cache directory {folder} cannot be written; set HF_TWELL_CACHE to one that can")


def file_name(name: str, nvcc_version: str | None = None) -> str:
    """File name of a library, with a hash of its sources, flags (with the architecture), torch and processor family.

    nvcc's version stands beside the hash, so that a machine without nvcc finds a library that one with it made.

    Raises:
        BuildError: no kernel sources; for "cuda" also no GPU to compile for, or no nvcc to ask for its version.
    """
    folder, files = toolchain.kernels_dir(), toolchain.sources(name)
    parts = [torch.__version__, str(torch.compiled_with_cxx11_abi()), sys.platform, platform.machine()]
    parts += [" ".join(toolchain.flags(name, file)) for file in toolchain.compiled(files)]
    digest = hashlib.sha256("\0".join(parts).encode())
    for file in files:
        digest.update(file.encode() + b"\0" + (folder / file).read_bytes())
    end = f"-nvcc{nvcc_version or toolchain.nvcc_version()}" if name == "cuda" else ""
    return f"twell_{name}-{digest.hexdigest()[:20]}{end}.so"


def find_library(name: str) -> Path | None:
    """A library that fits this torch, these sources and this GPU, or None."""
    try:
        pattern = file_name(name)
    except BuildError:
        pattern = file_name(name, nvcc_version="*")
    found = sorted(cache_dir().glob(pattern))
    return found[-1] if found else None


def compile_library(name: str) -> Path:
    """Compile a library into the cache and return its path. Processes that start together compile it once.

    Raises:
        BuildError: no compiler, a cache directory that cannot be written, or a failed compilation (with its log).
    """
    toolchain.compiler()
    target = cache_dir() / file_name(name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = open(target.with_suffix(".lock"), "w")  # noqa: SIM115
    except OSError as error:
        raise BuildError(
            f"the cache directory {target.parent} cannot be written ({error.strerror}); "
            "set HF_TWELL_CACHE to one that can"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_file():  # another process was first
            return target
        try:
            logger.warning("compiling hf_twell's %s library into %s, once; it may take a minute", name, target.parent)
            return _run_ninja(name, target)
        except OSError as error:
            raise BuildError(
                f"compiling into {target.parent} failed ({error}); set HF_TWELL_CACHE elsewhere"
            ) from error


def _run_ninja(name: str, target: Path) -> Path:
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent, ignore_cleanup_errors=True) as path:
        folder = Path(path)
        (folder / "build.ninja").write_text(toolchain.ninja_file(name))
        run = subprocess.run([toolchain.ninja(), "-C", str(folder)], capture_output=True, text=True, check=False)
        if run.returncode != 0:
            log = target.with_suffix(".log")
            log.write_text(run.stdout + run.stderr)
            tool = toolchain.nvcc() if name == "cuda" else toolchain.compiler()
            needed = "" if name == "cuda" else "; g++ has to be 11 or newer"  # -mamx-bf16
            raise BuildError(
                f"compiling the {name} kernels with {tool} failed; the compiler's messages are in {log}{needed}"
            )
        os.replace(folder / "library.so", target)  # atomic: a reader sees the whole library or none
    return target
