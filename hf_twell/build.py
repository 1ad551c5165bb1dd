"""Which backends work on this machine, why the others do not, and the compiled libraries behind them.

A library is looked for ready-made beside the package (`prebuilt/`), then in the user's cache, and is else compiled into
the cache with ninja. Its name carries a hash of everything that it depends on, so a stale one is never loaded. The
cache is `$HF_TWELL_CACHE`, or `hf_twell` under `$XDG_CACHE_HOME` or `~/.cache`.
"""

import fcntl
import functools
import hashlib
import importlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

BACKENDS = ("reference", "cpu", "cuda")
STABLE_ABI_TARGET = "0x020a000000000000"  # torch 2.10

_COMMON_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-uninitialized"]
_COMMON_FLAGS += ["-Wno-maybe-uninitialized", "-Wno-unused-parameter", "-pthread"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"]
# One instruction set per source file, chosen when the program runs: only these files may hold its instructions.
_ISA_FLAGS = {
    "isa_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "isa_avx512.cpp": _AVX512,
    "isa_avx512_bf16.cpp": [*_AVX512, "-mavx512bf16"],
}
_outcomes: dict[str, "BackendStatus"] = {}
_lock = threading.Lock()


class BackendStatus(NamedTuple):
    name: str
    available: bool
    reason: str


class BuildError(RuntimeError):
    """A library could not be had; the message says why, and what would change it."""


def status(name: str, *, build: bool = False) -> BackendStatus:
    """Whether one backend can run here; `reason` says why not, and what would change it.

    Args:
        build: load the backend's library, compiling it first if need be (a minute, once per user); a failure warns
            once. Without it nothing is compiled: a backend that would compile at first use counts as available.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; choose one of 'auto', {', '.join(map(repr, BACKENDS))}")
    if name == "reference":
        return BackendStatus(name, True, f"plain PyTorch {torch.__version__}")
    if name == "cuda":
        if not torch.cuda.is_available():
            return BackendStatus(
                name, False, "PyTorch sees no CUDA GPU; install a CUDA build of PyTorch on a GPU machine"
            )
        return BackendStatus(name, False, "this version of hf_twell contains no cuda kernels; 'reference' is used")
    if name in _outcomes:
        return _outcomes[name]
    if build:
        with _lock:
            if name not in _outcomes:
                _outcomes[name] = _load(name)
        return _outcomes[name]
    try:
        found = find_library(name)
        if found is not None:
            return BackendStatus(name, True, f"compiled: {found}")
        compiler()
    except BuildError as error:
        return BackendStatus(name, False, str(error))
    return BackendStatus(name, True, f"not compiled yet; the first use compiles it into {cache_dir()}")


def _load(name: str) -> BackendStatus:
    try:
        path = find_library(name) or compile_library(name)
        torch.ops.load_library(path)
        importlib.import_module("hf_twell._kernel_ops")
    except (BuildError, OSError) as error:
        warnings.warn(f"hf_twell's {name} kernels are not used, plain PyTorch instead: {error}", stacklevel=4)
        return BackendStatus(name, False, str(error))
    return BackendStatus(name, True, f"compiled: {path}")


def kernels_dir() -> Path:
    """The kernel sources: inside an installed package, or at the top of the repository."""
    package = Path(__file__).resolve().parent
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "build.toml").is_file():
            return folder
    raise BuildError(f"no kernel sources beside {package}; reinstall hf_twell")


def cache_dir() -> Path:
    if "HF_TWELL_CACHE" in os.environ:
        return Path(os.environ["HF_TWELL_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_twell"


@functools.cache
def library_name(name: str) -> str:
    """File name of a backend's library, with a hash of its sources, flags, torch build and processor family."""
    folder = kernels_dir()
    sources = _sources(name)
    parts = [torch.__version__, str(torch.compiled_with_cxx11_abi()), sys.platform, platform.machine()]
    parts += [" ".join(_flags(source)) for source in sources if source.endswith(".cpp")]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sources:
        digest.update(source.encode() + b"\0" + (folder / source).read_bytes())
    return f"twell_{name}-{digest.hexdigest()[:20]}.so"


def find_library(name: str) -> Path | None:
    """A library that fits this torch and these sources, or None."""
    for folder in (Path(__file__).resolve().parent / "prebuilt", cache_dir()):
        path = folder / library_name(name)
        if path.is_file():
            return path
    return None


def compiler() -> str:
    """The C++ compiler: `$CXX`, or the first of g++, clang++ and c++.

    Raises:
        BuildError: there is none, or no ninja.
    """
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    found = next(filter(None, map(shutil.which, wanted)), None)
    if found is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(wanted)}); install g++, or set CXX to one")
    _ninja()
    return found


def compile_library(name: str) -> Path:
    """Compile a backend's library into the cache and return its path. Processes that start together compile it once.

    Raises:
        BuildError: no compiler, a cache directory that cannot be written, or a failed compilation (with its log).
    """
    cxx, target = compiler(), cache_dir() / library_name(name)
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
            return _run_ninja(name, cxx, target)
        except OSError as error:
            raise BuildError(
                f"compiling into {target.parent} failed ({error}); set HF_TWELL_CACHE elsewhere"
            ) from error


def _run_ninja(name: str, cxx: str, target: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="build-", dir=target.parent))
    (folder / "build.ninja").write_text(_ninja_file(name, cxx))
    run = subprocess.run([_ninja(), "-C", str(folder)], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        log = target.with_suffix(".log")
        log.write_text(run.stdout + run.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        raise BuildError(f"compiling the {name} kernels with {cxx} failed; the compiler's messages are in {log}")
    os.replace(folder / "library.so", target)  # atomic: a reader sees the whole library or none
    shutil.rmtree(folder, ignore_errors=True)
    return target


def _ninja_file(name: str, cxx: str) -> str:
    folder, torch_dir = kernels_dir(), Path(torch.__file__).parent
    escape = lambda text: str(text).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")  # noqa: E731
    include = torch_dir / "include"
    lines = [
        "rule compile",
        f"  command = '{cxx}' $flags '-I{include}' -c $in -o $out",
        "rule link",
        f"  command = '{cxx}' -shared $in -o $out '-L{torch_dir / 'lib'}' -ltorch -ltorch_cpu -lc10 -pthread",
    ]
    objects = []
    for source in _sources(name):
        if source.endswith(".cpp"):
            objects.append(source.replace("/", "_") + ".o")
            lines += [
                f"build {objects[-1]}: compile {escape(folder / source)}",
                f"  flags = {' '.join(_flags(source))}",
            ]
    lines += [f"build library.so: link {' '.join(objects)}", ""]
    return "\n".join(lines)


def _sources(name: str) -> list[str]:
    table = tomllib.loads((kernels_dir() / "build.toml").read_text())
    return table["torch"]["src"] + table["kernel"][f"twell_{name}"]["src"]


def _flags(source: str) -> list[str]:
    isa = _ISA_FLAGS.get(Path(source).name, []) if platform.machine() in ("x86_64", "AMD64") else []
    return [*_COMMON_FLAGS, f"-DTORCH_TARGET_VERSION={STABLE_ABI_TARGET}", *isa]


def _ninja() -> str:
    beside = Path(sys.executable).parent / "ninja"  # of the same environment, whether or not it is on PATH
    found = str(beside) if beside.is_file() else shutil.which("ninja")
    if found is None:
        raise BuildError("ninja is missing; install it with `pip install ninja`")
    return found
