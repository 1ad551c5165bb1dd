"""Finding, compiling and caching the kernel libraries, and what happens where that cannot work."""

import errno
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hf_twell.ops import build, toolchain
from tests.conftest import finished
from tests.paths import ROOT

USE = """
import warnings, torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from hf_twell.ops import api, build
    for _ in range(3):
        y = api.ffn(torch.ones(2, 8), torch.ones(4, 8), torch.ones(8, 4))
    assert y.tolist() == [[32.0] * 8] * 2
    for warning in caught:
        if "hf_twell" in str(warning.message):
            print("warning:", warning.message)
    print("status:", build.status("cpu"))
"""


def start(cache: Path, **environment) -> subprocess.Popen:
    """A fresh process that uses the operator with its own cache."""
    environment = {**os.environ, "HF_TWELL_CACHE": str(cache), "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", textwrap.dedent(USE)]
    place = environment["PYTHONPATH"]  # the working directory comes first among the places of imports
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=place, env=environment, text=True, **pipes)


def outputs_of(process: subprocess.Popen) -> tuple[str, str]:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out, err


def output_of(process: subprocess.Popen) -> str:
    return outputs_of(process)[0]


def is_found(look) -> bool:
    try:
        return bool(look())
    except toolchain.BuildError:
        return False


needs_compiler = pytest.mark.skipif(not is_found(toolchain.compiler), reason="no C++ compiler or ninja")


@pytest.mark.slow
@needs_compiler
def test_two_processes_compile_once_and_later_ones_need_no_compiler(tmp_path):
    """By a compiler that does not optimise, as what it makes computes next to nothing here."""
    quick, cache = tmp_path / "g++", tmp_path / "cache"
    quick.write_text(f'#!/bin/sh\nexec {toolchain.compiler()} "$@" -O0\n')
    quick.chmod(0o755)
    first, second = start(cache, CXX=str(quick)), start(cache, CXX=str(quick))
    told = ""
    for process in (first, second):
        out, err = outputs_of(process)
        assert "available=True" in out
        assert "warning" not in out
        told += err
    assert told.count("compiling hf_twell's cpu library") == 1, "who waits is told for what"
    for name in ("ops", "cpu"):
        (library,) = cache.glob(f"twell_{name}-*.so")
        assert library.name == build.file_name(build.stem(name), library)
    assert len(list(cache.glob("*.so"))) == 2
    assert not [path for path in cache.iterdir() if path.is_dir()], "no temporary folder is left"
    assert "available=True" in output_of(start(cache, CXX="/nowhere/g++", PATH="/nowhere"))


@pytest.mark.slow
def test_without_a_compiler_one_warning_gives_reason_and_fix(tmp_path):
    out = output_of(start(tmp_path, CXX="/nowhere/g++"))
    assert out.count("warning:") == 1
    assert "no C++ compiler found (looked for /nowhere/g++); install g++, or set CXX to one" in out
    assert "available=False" in out


@pytest.mark.slow
@needs_compiler
def test_a_cache_that_is_no_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    out = output_of(start(tmp_path / "file" / "cache"))
    assert out.count("warning:") == 1
    assert f"the cache directory {tmp_path}/file/cache cannot be written" in out
    assert "set HF_TWELL_CACHE to one that can" in out
    assert "Errno" not in out, "said twice"


@needs_compiler
def test_status_alone_sees_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(build, "_outcomes", {})
    monkeypatch.setenv("HF_TWELL_CACHE", str(tmp_path / "file" / "cache"))
    assert not build.status("cpu").available
    assert "set HF_TWELL_CACHE to one that can" in build.status("cpu").reason
    monkeypatch.setenv("HF_TWELL_CACHE", str(tmp_path / "to" / "be" / "made"))
    assert build.status("cpu").available
    assert not (tmp_path / "to").exists()


@pytest.mark.slow
@needs_compiler
def test_a_failed_compilation_leaves_its_log(tmp_path):
    broken = tmp_path / "broken-g++"
    broken.write_text("#!/bin/sh\necho this compiler is broken >&2\nexit 1\n")
    broken.chmod(0o755)
    out = output_of(start(tmp_path / "cache", CXX=str(broken)))
    assert out.count("warning:") == 1
    log = next((tmp_path / "cache").glob("*.log"))
    assert str(log) in out
    assert "g++ has to be 11 or newer" in out
    assert "this compiler is broken" in log.read_text()


@pytest.mark.slow
@needs_compiler
def test_a_library_that_was_cut_short_is_compiled_anew(tmp_path, monkeypatch, run_json):
    """The loader maps it, so that the process would end with a bus error."""
    for name in ("ops", "cpu"):  # as every test's process has them
        shutil.copy(next(build.find_libraries(name), None) or build.compile_library(name), tmp_path)
    (library,) = tmp_path.glob("twell_ops-*.so")
    whole = library.read_bytes()
    os.truncate(library, 3000)
    monkeypatch.setenv("HF_TWELL_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_outcomes", {})
    told = run_json("doctor")["backends"]["cpu"]["reason"]
    assert told == f"{library} is damaged; the first use compiles it into {tmp_path}"
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "/nowhere/g++")
        with pytest.warns(UserWarning, match=f"{library} is damaged; no C\\+\\+ compiler found") as warned:
            works = [build.status("cpu", build=True).available for _ in range(2)]
        assert (works, len(warned)) == ([False, False], 1)

    out, err = outputs_of(start(tmp_path))
    assert "available=True" in out
    assert "warning" not in out
    assert err.count(f"{library} is damaged; compiling") == err.count("compiling") == 1
    assert next(build.find_libraries("ops")).stat().st_size == len(whole)


@pytest.mark.parametrize("damage", ["cut", "one bit", "longer", "empty"])
def test_a_library_is_what_was_built_or_is_none(damage, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TWELL_CACHE", str(tmp_path))
    built = tmp_path / "library.so"
    built.write_bytes(bytes(range(256)) * 20)
    library = built.rename(tmp_path / build.file_name(build.stem("cpu"), built))
    assert next(build.find_libraries("cpu")) == library
    data = library.read_bytes()
    flipped = data[:700] + bytes([data[700] ^ 8]) + data[701:]
    library.write_bytes({"cut": data[:3000], "one bit": flipped, "longer": data + b"0", "empty": b""}[damage])
    assert not any(build.find_libraries("cpu"))


@pytest.mark.slow
def test_a_package_without_kernels_warns_and_falls_back(tmp_path):
    """As of an installation that lost files."""
    shutil.copytree(ROOT / "hf_twell", tmp_path / "hf_twell", ignore=shutil.ignore_patterns("__pycache__"))
    out = output_of(start(tmp_path / "cache", PYTHONPATH=str(tmp_path)))
    missing = f"kernels/build.toml is neither in {tmp_path / 'hf_twell'} nor in {tmp_path}; install hf_twell again"
    assert out.count("warning:") == 1
    assert out.count(missing) == 2
    assert "available=False" in out


def test_status_alone_compiles_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TWELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_outcomes", {})
    monkeypatch.setattr(build, "compile_library", lambda name: pytest.fail("compiled"))
    for name in build.BACKENDS:
        assert build.status(name).name == name
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ValueError, match="unknown backend 'tpu'; choose one of 'auto', 'reference', 'cpu', 'cuda'"):
        build.status("tpu")


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_every_kernel_source_is_listed_and_there_is_no_package_marker(name):
    folder = toolchain.kernels_dir()
    listed = {Path(source) for source in toolchain.sources(name)}
    places = [*(folder / f"twell_{name}").glob("**/*"), *(folder / "shared").glob("**/*")]
    on_disk = {path.relative_to(folder) for path in places if path.parent.name != "tests"}
    assert {path for path in on_disk if path.suffix in (".cpp", ".cu", ".h", ".cuh")} == listed
    assert not (folder / "__init__.py").exists(), "it would shadow the kernels package"


def test_the_oldest_torch_is_the_same_everywhere():
    """For pip, for our builds and for kernel-builder's, whose own parser reads build.toml where it is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch_wanted,) = (line for line in project["dependencies"] if line.startswith("torch"))
    major, minor = map(int, torch_wanted.removeprefix("torch>=").split("."))
    assert int(toolchain.STABLE_ABI_TARGET, 16) == major << 56 | minor << 48
    table = tomllib.loads((ROOT / "kernels" / "build.toml").read_text())
    assert set(table["torch"]["stable-abi"].values()) == {f"{major}.{minor}"}
    rust = pytest.importorskip("kernels._rust", reason="needs the package kernels")
    assert rust.Build.open(ROOT / "kernels").general


@pytest.mark.parametrize("source", toolchain.compiled(toolchain.sources("cpu")))
def test_sources_compile_for_aarch64(source):
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("needs aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu)")
    torch_headers = Path(torch.__file__).parent / "include"
    command = [compiler, "-std=c++17", "-fsyntax-only", "-Wall", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    folders = [f"-I{path}" for path in (*toolchain.includes("cpu"), torch_headers)]
    path = ROOT / "kernels" / source
    done = finished(*command, *folders, path)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@needs_compiler
def test_sources_under_a_path_with_blanks_compile(tmp_path):
    place = tmp_path / "my $folder"
    for name in ("hf_twell", "kernels"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {"HF_TWELL_CACHE": str(place / "cache"), "PYTHONPATH": str(place)}
    code = (
        "from hf_twell.ops import toolchain, build; print(toolchain.kernels_dir()); print(build.compile_library('ops'))"
    )
    done = finished(sys.executable, "-c", code, env=environment, cwd=place)
    assert done.returncode == 0, done.stderr
    sources, library = map(Path, done.stdout.splitlines())
    assert (sources, library.parent) == (place / "kernels", place / "cache")
    assert library.is_file()


def test_a_library_for_another_torch_processor_or_of_other_sources_has_another_name(tmp_path, monkeypatch):
    changed = tmp_path / "kernels"
    shutil.copytree(toolchain.kernels_dir(), changed)
    with open(changed / toolchain.sources("cpu")[-1], "a") as source:
        source.write("// changed")
    names = [build.stem("cpu")]
    for module, attribute, value in (
        (torch, "__version__", "2.99.0"),
        (build.platform, "machine", lambda: "AMD64"),  # with the flags of x86_64
        (toolchain, "STABLE_ABI_TARGET", "0x0263000000000000"),
        (toolchain, "kernels_dir", lambda: changed),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, attribute, value)
            names.append(build.stem("cpu"))
    assert len(set(names)) == 5, names


def test_instruction_sets_are_asked_for_where_there_are_such(monkeypatch):
    for machine, expected in (("x86_64", True), ("aarch64", False)):
        assert ("-mavx2" in toolchain.flags("cpu", "twell_cpu/isa/avx2.cpp", machine)) == expected
        monkeypatch.setattr(toolchain.platform, "machine", lambda machine=machine: machine)
        assert ("-mavx2" in toolchain.flags("cpu", "twell_cpu/isa/avx2.cpp")) == expected
        assert "-mavx2" not in toolchain.flags("cpu", "twell_cpu/forward/forward.cpp")


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TWELL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build.cache_dir() == tmp_path / ".cache" / "hf_twell"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.cache_dir() == tmp_path / "xdg" / "hf_twell"
    monkeypatch.setenv("HF_TWELL_CACHE", "")  # as if it were not set, and not the current folder
    assert build.cache_dir() == tmp_path / "xdg" / "hf_twell"
    monkeypatch.setenv("HF_TWELL_CACHE", str(tmp_path / "mine"))
    assert build.cache_dir() == tmp_path / "mine"


def test_a_missing_ninja_is_named(tmp_path, monkeypatch):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(toolchain.BuildError, match="ninja is missing; install it with `pip install ninja`"):
        toolchain.compiler()


# For each architecture the sources that it alone, or it first, reads so; "" is all. Of those in build.toml 8.6 reads
# what 8.0 reads, and 10.0 what 12.0. The files in sm90/ are empty but for sm_90a, and one architecture shows that.
CUDA_SOURCES = {
    "sm_80": "",
    "sm_89": "(decode/.*e4m3|common/dequantize)",
    "sm_90a": "(sm90/|decode/gate_up)",
    "sm_120": "(decode|common)/",
}


@pytest.mark.slow
@pytest.mark.skipif(
    not is_found(toolchain.nvcc_version), reason="no nvcc (the CUDA toolkit), on PATH, in $CUDA_HOME or /usr/local/cuda"
)
@pytest.mark.timeout(900)  # minutes of processor time, which take longer on a busy machine
@pytest.mark.parametrize("architecture", CUDA_SOURCES)
def test_cuda_sources_compile_without_warnings(architecture, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TWELL_CUDA_ARCH", architecture)
    folder, torch_headers = toolchain.kernels_dir(), Path(torch.__file__).parent / "include"

    def compile_one(source):
        # Device code to machine code; host code, which does not depend on the architecture, for one of them.
        kind = ["-cubin"] if source.endswith(".cu") else ["-c"]
        include = [f"-I{path}" for path in (*toolchain.includes("cuda"), torch_headers)]
        command = [toolchain.nvcc(), *toolchain.flags("cuda", source), *include, *kind, folder / source]
        command += ["-o", tmp_path / f"{source.replace('/', '-')}.out"]
        done = finished(*command)
        return source, done.returncode, done.stdout + done.stderr

    sources = toolchain.compiled(toolchain.sources("cuda"))
    files = [file for file in sources if re.match(f"twell_cuda/{CUDA_SOURCES[architecture]}", file)]
    if architecture != "sm_80":
        files = [file for file in files if file.endswith(".cu")]
    assert files
    with ThreadPoolExecutor(2) as pool:
        for source, code, messages in pool.map(compile_one, files):
            assert (code, messages) == (0, ""), f"{source}: {messages[-3000:]}"


def fake_nvcc(home: Path, version: str) -> Path:
    """A CUDA toolkit whose compiler knows its version and fails at everything else."""
    (home / "bin").mkdir(parents=True)
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "release, V{version}" && exit 0\necho nvcc is broken >&2\nexit 1\n'
    )
    nvcc.chmod(0o755)
    return home


@needs_compiler
def test_a_missing_or_broken_nvcc_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TWELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TWELL_CUDA_ARCH", "sm_80")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    says = r"no nvcc found \(looked for /nowhere/bin/nvcc\); install the CUDA toolkit, set CUDA_HOME"
    with pytest.raises(toolchain.BuildError, match=says):
        build.compile_library("cuda")
    home = fake_nvcc(tmp_path / "toolkit", "13.0.88")
    monkeypatch.setenv("CUDA_HOME", str(home))
    says = f"compiling the cuda kernels with {home}/bin/nvcc failed; the compiler's messages"
    with pytest.raises(toolchain.BuildError, match=says):
        build.compile_library("cuda")
    logs = [path.read_text() for path in (tmp_path / "cache").glob("*.log")]
    assert len(logs) == 1
    assert "nvcc is broken" in logs[0]
    monkeypatch.setenv("HF_TWELL_CUDA_ARCH", "hopper")
    for names in ("hopper", "sm_80,hopper"):
        monkeypatch.setenv("HF_TWELL_CUDA_ARCH", names)
        with pytest.raises(
            toolchain.BuildError, match=f"HF_TWELL_CUDA_ARCH is '{names}'; expected names such as sm_80 or sm_80,sm_90a"
        ):
            build.stem("cuda")
    monkeypatch.setenv("HF_TWELL_CUDA_ARCH", "sm_80")
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(tmp_path / "untold", "")))
    with pytest.raises(toolchain.BuildError, match=r"nvcc --version tells no version .*; repair the CUDA toolkit"):
        build.stem("cuda")
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setattr(Path, "write_text", raise_full_disk)
    with pytest.raises(toolchain.BuildError, match=r"No space left on device.*; set HF_TWELL_CACHE elsewhere"):
        build.compile_library("cuda")
    assert not list((tmp_path / "cache").glob("build-*"))


def test_make_names_a_missing_nvcc_and_what_needs_none():
    done = finished("make", "--no-print-directory", "cuda-compiler", cwd=ROOT, env={"CUDA_HOME": "/nowhere"})
    assert done.returncode != 0
    assert done.stdout.endswith("or leave them out: make cuda-compiler BACKENDS=cpu\n")


def raise_full_disk(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_cuda_library_fits_one_architecture_and_nvcc_and_is_found_without_nvcc(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TWELL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    names = {}
    for version in ("12.9.86", "13.0.88"):
        monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(tmp_path / version, version)))
        for architecture in ("sm_80", "sm_90a"):
            monkeypatch.setenv("HF_TWELL_CUDA_ARCH", architecture)
            names[version, architecture] = build.stem("cuda")
            assert not any(build.find_libraries("cuda"))
    assert len(set(names.values())) == 4
    several = []
    for architectures in ("sm_80,sm_90a", "sm_90a, sm_80,sm_80"):
        monkeypatch.setenv("HF_TWELL_CUDA_ARCH", architectures)
        several.append(build.stem("cuda"))
    assert several[0] == several[1]
    monkeypatch.setenv("HF_TWELL_CUDA_ARCH", "sm_90a")
    empty = tmp_path / "empty"
    empty.touch()
    made, newer = (
        tmp_path / "cache" / build.file_name(names[version, "sm_90a"], empty) for version in ("12.9.86", "13.0.88")
    )
    made.touch()
    assert not any(build.find_libraries("cuda")), "nvcc is newer than the library's"
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert next(build.find_libraries("cuda")) == made
    newer.touch()
    assert next(build.find_libraries("cuda")) == newer
    newer.unlink()
    monkeypatch.setenv("HF_TWELL_CUDA_ARCH", "sm_80")
    assert not any(build.find_libraries("cuda"))


def test_a_library_that_came_with_the_package_is_taken_where_it_fits(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TWELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.setattr(build, "_outcomes", {})
    monkeypatch.setattr(toolchain, "architectures", lambda: ["sm_90a"])
    monkeypatch.delenv("HF_TWELL_CUDA_ARCH", raising=False)
    empty = tmp_path / "empty"
    empty.touch()
    ops, prebuilt, cuda = (
        tmp_path / build.file_name(build.prebuilt_stem(name, "13.0"), empty) for name in ("ops", "cpu", "cuda")
    )
    for library in (ops, prebuilt, cuda):
        library.touch()
    assert next(build.find_libraries("cpu")) == prebuilt

    for version, found in (("13.2", True), ("12.8", False), (None, False)):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert any(build.find_libraries("cuda")) == found, version
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("HF_TWELL_CUDA_ARCH", "sm_90a")
    assert not any(build.find_libraries("cuda")), "named architectures are compiled"

    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.warns(UserWarning, match="twell_ops-.*so does not load .*; no C\\+\\+ compiler found"):
        assert not build.status("cpu", build=True).available, "and else it would be compiled"
    monkeypatch.setattr(build, "_outcomes", {})

    prebuilt.write_bytes(b"damaged")
    assert not any(build.find_libraries("cpu"))
    prebuilt.write_bytes(b"")
    monkeypatch.setattr(toolchain, "STABLE_ABI_TARGET", "0x0263000000000000")
    assert not any(build.find_libraries("cpu")), "of another ABI"


@needs_compiler
def test_status_names_the_library_that_loads(tmp_path, monkeypatch):
    """What was compiled here, where the package's own library does not load."""
    ops, compiled = (next(build.find_libraries(name), None) or build.compile_library(name) for name in ("ops", "cpu"))
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.setattr(build, "_outcomes", {})
    empty = tmp_path / "empty"
    empty.touch()
    prebuilt = empty.rename(tmp_path / build.file_name(build.prebuilt_stem("cpu", None), empty))
    available, reason = build.status("cpu")[1:]
    assert available
    assert reason.startswith(f"{prebuilt} does not load (")
    assert reason.endswith(f"; compiled: {compiled}")
    prebuilt.write_bytes(b"damaged")
    assert build.status("cpu").reason == f"compiled: {compiled}"
    monkeypatch.setenv("HF_TWELL_CACHE", str(tmp_path))
    (tmp_path / ops.name).symlink_to(ops)
    assert build.status("cpu").reason.startswith(f"{prebuilt} is damaged; the first use compiles it into ")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(toolchain, "architectures", lambda: ["sm_90a"])
    monkeypatch.delenv("HF_TWELL_CUDA_ARCH", raising=False)
    empty.touch()
    prebuilt = empty.rename(tmp_path / build.file_name(build.prebuilt_stem("cuda", "13.0"), empty))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert build.status("cuda").reason.startswith(f"{prebuilt} is not for CUDA 12.8, which PyTorch has; ")
