"""The compilers on this machine, and the ninja file that makes a kernel library of its sources."""

import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import torch

from hf_twell.files.carried import carried_folder

STABLE_ABI_TARGET = "0x020a000000000000"  # torch 2.10
OLDEST_GPU = (8, 0)  # compute capability; before it there is no bf16

_HOST_FLAGS = ["-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
_HOST_FLAGS += ["-Wno-unused-parameter", "-pthread"]


class BuildError(RuntimeError):
    """A library could not be had; the message says why, and what would change it."""


def kernels_dir() -> Path:
    """The kernel sources; a BuildError where they are not there."""
    try:
        return carried_folder("kernels", holds="build.toml")
    except FileNotFoundError as error:
        raise BuildError(str(error)) from None


def sources(name: str) -> list[str]:
    """The files of one library, headers too, relative to `kernels_dir()`; "ops" is the operators' definitions."""
    return [file for section in _sections(name) for file in section["src"]]


def includes(name: str) -> list[Path]:
    """The folders from which the sources of one library name their headers."""
    return [kernels_dir() / folder for folder in _sections(name)[0]["include"]]


def _sections(name: str) -> list[dict]:
    """Of build.toml: each has flags of its own."""
    table = _parsed((kernels_dir() / "build.toml").read_text())
    return [table["torch"]] if name == "ops" else [each for each in table["kernel"].values() if each["backend"] == name]


@functools.cache
def _parsed(toml: str) -> dict:
    return tomllib.loads(toml)


def compiler() -> str:
    """The C++ compiler: `$CXX`, or the first of g++, clang++ and c++; a BuildError without one, or without ninja."""
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    found = next(filter(None, map(shutil.which, wanted)), None)
    if found is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(wanted)}); install g++, or set CXX to one")
    ninja()
    return found


def nvcc() -> str:
    """The CUDA compiler: of `$CUDA_HOME` where that is set, else on PATH, else in /usr/local/cuda; or a BuildError."""
    home = os.environ.get("CUDA_HOME")
    wanted = [f"{home}/bin/nvcc"] if home else ["nvcc", "/usr/local/cuda/bin/nvcc"]
    found = next(filter(None, map(shutil.which, wanted)), None)
    if found is None:
        ways = "install the CUDA toolkit, set CUDA_HOME, or install a wheel that `make wheel` built elsewhere"
        raise BuildError(f"no nvcc found (looked for {', '.join(wanted)}); {ways}")
    return found


def nvcc_version() -> str:
    """For instance "13.0.88"; a BuildError where there is no nvcc, or it does not run."""
    path = nvcc()
    try:
        run = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
        return re.findall(r"\bV(\d+(?:\.\d+)+)", run.stdout)[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise BuildError(f"{path} --version tells no version ({error}); repair the CUDA toolkit") from error


def architectures() -> list[str]:
    """What nvcc compiles for, such as "sm_90a": `$HF_TWELL_CUDA_ARCH` (several with commas), or the visible GPUs.
    "compute_90" is PTX, which the driver compiles for later GPUs. A BuildError of a name that is none, without a GPU,
    or of one that is too old."""
    wanted = os.environ.get("HF_TWELL_CUDA_ARCH")
    if wanted:
        names = sorted({name.strip() for name in wanted.split(",")})
        if not all(re.fullmatch(r"(sm|compute)_\d+[af]?", name) for name in names):
            raise BuildError(f"HF_TWELL_CUDA_ARCH is {wanted!r}; expected names such as sm_80 or sm_80,sm_90a")
        return names
    found = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    if not found:
        raise BuildError("PyTorch sees no CUDA GPU to compile for; name an architecture in HF_TWELL_CUDA_ARCH")
    if min(found) < OLDEST_GPU:
        raise BuildError(
            f"a visible GPU has compute capability {'.'.join(map(str, min(found)))}; the kernels need "
            f"{'.'.join(map(str, OLDEST_GPU))} or newer; hide older GPUs with CUDA_VISIBLE_DEVICES"
        )
    # Hopper's matrix and copy instructions exist in its own feature set alone.
    return sorted("sm_90a" if pair == (9, 0) else f"sm_{pair[0]}{pair[1]}" for pair in found)


def flags(name: str, source: str, machine: str = "") -> list[str]:
    """The compiler's flags for one source of one library, on this machine or for another ("aarch64"). For "cuda" a
    BuildError as `architectures`."""
    common = ["-std=c++17", "-O3", f"-DTORCH_TARGET_VERSION={STABLE_ABI_TARGET}"]
    if name != "cuda":
        own: dict = next((section for section in _sections(name) if source in section["src"]), {})
        isa = own.get("cxx-flags", []) if (machine or platform.machine()) in ("x86_64", "AMD64") else []
        return [*common, *_HOST_FLAGS, *isa]
    codes = [f"-gencode=arch=compute_{arch.partition('_')[2]},code={arch}" for arch in architectures()]
    return [*common, *codes, f"-Xcompiler={','.join(_HOST_FLAGS)}"]


class Portable(NamedTuple):
    """What a library for other machines is compiled with, beside `flags`."""

    machine: str  # for instance "aarch64"
    torch_dir: Path  # of the oldest PyTorch that will load it, with its include/
    sources: list[str]  # relative to `kernels_dir()`
    compile_flags: str  # where $out is the object's name
    binding_flags: list[str]  # also for the files that name the operators
    link_flags: str


def ninja_file(name: str, portable: Portable | None = None) -> str:
    """What `ninja` reads to make library.so. nvcc compiles and links all of the CUDA library: it knows its folders."""
    folder, torch_dir, files = kernels_dir(), Path(torch.__file__).parent, compiled(sources(name))
    compile_flags, link_flags, machine = "-lineinfo" if name == "cuda" else "", "", ""
    binding_flags: list[str] = []
    linker = tool = f"'{nvcc()}' -ccbin '{compiler()}'" if name == "cuda" else f"'{compiler()}'"
    if portable:
        machine, torch_dir, more, compile_flags, binding_flags, link_flags = portable
        files = [*files, *more]
        linker = f"'{compiler()}'"  # nvcc would write its folders into the library
    include = " ".join(f"'-I{path}'" for path in [*includes(name), torch_dir / "include"]).replace("$", "$$")
    libraries = "-ltorch -ltorch_cpu -lc10" + (" -ltorch_cuda" if name == "cuda" else " -pthread")
    lines = [
        "rule compile",
        f"  command = {tool} $flags {compile_flags} {include} -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",  # where objects are kept, a changed header counts
        "  deps = gcc",
        "rule link",
        f"  command = {linker} -shared {link_flags} $in -o $out '-L{torch_dir / 'lib'}' {libraries}",
    ]
    objects = []
    for source in files:
        objects.append(f"{source}.o")  # in folders as the sources are, whose file names repeat
        its_flags = flags(name, source, machine)
        if Path(source).name.startswith(("bind_", "torch_binding")):
            its_flags = [*its_flags, *binding_flags]
        lines += [f"build {objects[-1]}: compile {_escaped(folder / source)}", f"  flags = {' '.join(its_flags)}"]
    lines += [f"build library.so: link {' '.join(objects)}", ""]
    return "\n".join(lines)


def _escaped(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def compiled(files: list[str]) -> list[str]:
    """The files that the compiler is given: all but headers."""
    return [file for file in files if file.endswith((".cpp", ".cu"))]


def ninja() -> str:
    """The path of ninja; a BuildError where there is none."""
    beside = Path(sys.executable).parent / "ninja"  # of the same environment, whether or not it is on PATH
    found = str(beside) if beside.is_file() else shutil.which("ninja")
    if found is None:
        raise BuildError("ninja is missing; install it with `pip install ninja`")
    return found
