"""Compile the libraries that a wheel carries: `make wheel` runs this.

They need nothing newer than manylinux_2_28 has, and take PyTorch's stable ABI of the oldest version that the package
supports, whose headers are given. Two builds of the same sources are equal byte by byte. CUDA's are so in one folder,
whose name nvcc hashes into names of functions.
"""

import argparse
import os
import shutil
import subprocess
from pathlib import Path

from hf_twell.ops import build, toolchain

# A100 to RTX 40; H100 and H200; by the driver's compiler, what came later.
ARCHITECTURES = "sm_80,sm_90a,compute_90"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_arguments(parser)
    args = parser.parse_args()
    prepare(args)
    for name in ("ops", *args.names):
        library = compile_library(name, args.torch.resolve(), args.objects.resolve() / name)
        cuda = toolchain.nvcc_version() if name == "cuda" else None
        target = args.output / build.file_name(build.prebuilt_stem(name, cuda), library)
        shutil.copyfile(library, target)
        print(f"{target}: {target.stat().st_size / 2**20:.2f} MiB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", choices=["cpu", "cuda"], help="the backends")
    parser.add_argument("--torch", type=Path, required=True, help="the folder of the oldest PyTorch, with its include/")
    parser.add_argument("--objects", type=Path, required=True, help="where object files are kept between runs")
    parser.add_argument("--output", type=Path, required=True, help="a folder, made anew")


def prepare(args: argparse.Namespace) -> None:
    os.environ["HF_TWELL_CUDA_ARCH"] = ARCHITECTURES
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)


def compile_library(name: str, torch: Path, folder: Path, hub_name: str | None = None) -> Path:
    """A library that needs no more than every torch from this one on, and every Linux from manylinux_2_28 on, has.

    Args:
        torch: the folder of the oldest PyTorch, with its include/ and lib/.
        folder: for what is made on the way, some of which the next run takes up.
        hub_name: what the operators are called in a library for the Hub, which has their definitions, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "exports.map").write_text("{ local: *; };\n")  # PyTorch is told of the operators as the library is loaded
    sources = ["release/older_systems.cpp"]
    host_flags = [f"-ffile-prefix-map={torch}=torch", f"-ffile-prefix-map={toolchain.kernels_dir()}=kernels"]
    if hub_name:
        sources += toolchain.compiled(toolchain.sources("ops"))
    compile_flags = ["-frandom-seed=$out", *host_flags]
    # Empty libraries stand in for PyTorch's, so that no symbol tells the linker which are needed.
    link_flags = ["-s", "--version-script=exports.map", "--build-id=none", "--no-as-needed"]
    link_flags = [f"-Xlinker {flag}" for flag in link_flags]
    if name == "cuda":
        compile_flags = ["--frandom-seed=$out", f"-Xcompiler={','.join(host_flags)}", "--compress-mode=size"]
        link_flags.append(f"'-L{torch / 'lib'}' -lcudart")  # shared: the one that PyTorch has loaded
    binding_flags = [f"-DTORCH_EXTENSION_NAME={hub_name}"] if hub_name else []
    portable = toolchain.Portable(torch, sources, " ".join(compile_flags), binding_flags, " ".join(link_flags))
    (folder / "build.ninja").write_text(toolchain.ninja_file(name, portable))
    subprocess.run([toolchain.ninja(), "-C", folder], check=True)
    return folder / "library.so"


if __name__ == "__main__":
    main()
