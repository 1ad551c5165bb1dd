"""Compile the libraries that a wheel carries: `make wheel` runs this.

They need nothing newer than manylinux_2_28 has, and take PyTorch's stable ABI of the oldest version that the package
supports, whose headers are given. Two builds of the same sources, by the compilers that compilers.txt names, are equal
byte by byte. CUDA's are so in one folder, whose name nvcc hashes into names of functions. A cross compiler in $CXX
makes libraries for its own kind of machine.
"""

import argparse
import os
import shutil
import subprocess
from pathlib import Path

from hf_twell.ops import build, toolchain

# A100 to RTX 40; H100 and H200; by the driver's compiler, what came later.
ARCHITECTURES = "sm_80,sm_90a,compute_90"
# PyTorch's libraries as the linker looks for them, and as the loader does.
TORCH_LIBRARIES = {name: name for name in ("libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libc10.so")}
TORCH_LIBRARIES["libcudart.so"] = "libcudart.so.13"


def main() -> None:
    args = arguments(__doc__)
    for name in ("ops", *args.names):
        library = compile_library(name, args)
        cuda = toolchain.nvcc_version() if name == "cuda" else None
        target = args.output / build.file_name(build.prebuilt_stem(name, cuda), library)
        shutil.copyfile(library, target)
        print(f"{target}: {target.stat().st_size / 2**20:.2f} MiB")
    told = subprocess.run([toolchain.compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    compilers = told.splitlines()[:1] + ([f"nvcc {toolchain.nvcc_version()}"] if "cuda" in args.names else [])
    (args.output / "compilers.txt").write_text("\n".join(compilers) + "\n")


def arguments(about: str) -> argparse.Namespace:
    """What the command line asks for; the output's folder is made anew."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("names", nargs="+", choices=["cpu", "cuda"], help="the backends")
    parser.add_argument("--machine", required=True, help="what the compiler compiles for: x86_64, or aarch64")
    parser.add_argument("--torch", type=Path, required=True, help="the folder of the oldest PyTorch, with its include/")
    parser.add_argument("--objects", type=Path, required=True, help="where object files are kept between runs")
    parser.add_argument("--output", type=Path, required=True, help="a folder, made anew")
    parser.add_argument("--repo", help="of a kernel that will be published: its repository on the Hub, for the card")
    args = parser.parse_args()
    os.environ["HF_TWELL_CUDA_ARCH"] = ARCHITECTURES
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    return args


def compile_library(name: str, args: argparse.Namespace, hub_name: str | None = None) -> Path:
    """A library that needs no more than every torch from this one on, and every Linux from manylinux_2_28 on, has; one
    for the Hub has the operators' definitions, too, under `hub_name`."""
    folder, torch = args.objects.resolve() / name, args.torch.resolve()
    (folder / "lib").mkdir(parents=True, exist_ok=True)
    for library, called in TORCH_LIBRARIES.items():  # empty ones, as nothing of them goes into ours but their names
        empty = [toolchain.compiler(), "-shared", "-nostdlib", f"-Wl,-soname,{called}", "-x", "c", "/dev/null"]
        subprocess.run([*empty, "-o", folder / "lib" / library], check=True)
    (folder / "exports.map").write_text("{ local: *; };\n")  # PyTorch is told of the operators as the library is loaded
    sources = ["release/older_systems.cpp"]
    host_flags = [f"-ffile-prefix-map={torch}=torch", f"-ffile-prefix-map={toolchain.kernels_dir()}=kernels"]
    compile_flags = ["-frandom-seed=$out", *host_flags]
    # No symbol tells the linker which of the empty libraries are needed.
    link_flags = ["-s", "--version-script=exports.map", "--build-id=none", "--no-as-needed"]
    link_flags = ["-Llib", *(f"-Xlinker {flag}" for flag in link_flags)]
    if name == "cuda":
        compile_flags = ["--frandom-seed=$out", f"-Xcompiler={','.join(host_flags)}", "--compress-mode=size"]
        link_flags.append("-lcudart")  # shared: the one that PyTorch has loaded
    binding_flags = []
    if hub_name:
        sources += toolchain.compiled(toolchain.sources("ops"))
        binding_flags.append(f"-DTORCH_EXTENSION_NAME={hub_name}")
    flags = " ".join(compile_flags), binding_flags, " ".join(link_flags)
    (folder / "build.ninja").write_text(
        toolchain.ninja_file(name, toolchain.Portable(args.machine, torch, sources, *flags))
    )
    subprocess.run([toolchain.ninja(), "-C", folder], check=True)
    return folder / "library.so"


if __name__ == "__main__":
    main()
