"""Compile the libraries that a wheel carries: `make wheel` runs this.

They need nothing newer than manylinux_2_28 has, and take PyTorch's stable ABI of the oldest version that the package
supports, whose headers are given. Two builds of the same sources are equal byte by byte.
"""

import argparse
import os
import shutil
import subprocess
from pathlib import Path

from hf_twell.ops import build, toolchain

# A100 to RTX 40; H100 and H200; by the driver's compiler, what came later.
ARCHITECTURES = "sm_80,sm_90a,compute_90"
HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="+", choices=["cpu", "cuda"], help="the backends")
    parser.add_argument("--torch", type=Path, required=True, help="the folder of the oldest PyTorch, with its include/")
    parser.add_argument("--objects", type=Path, required=True, help="where object files are kept between runs")
    parser.add_argument("--output", type=Path, required=True, help="a folder, made anew")
    args = parser.parse_args()
    os.environ["HF_TWELL_CUDA_ARCH"] = ARCHITECTURES
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    for name in ("ops", *args.names):
        library = compile_library(name, args.torch.resolve(), args.objects.resolve() / name)
        cuda = toolchain.nvcc_version() if name == "cuda" else None
        target = args.output / build.file_name(build.prebuilt_stem(name, cuda), library)
        shutil.copyfile(library, target)
        print(f"{target}: {target.stat().st_size / 2**20:.2f} MiB")


def compile_library(name: str, torch: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "exports.map").write_text("{ local: *; };\n")  # PyTorch is told of the operators as the library is loaded
    prefixes = f"-ffile-prefix-map={torch}=torch -ffile-prefix-map={toolchain.kernels_dir()}=kernels"
    compile_flags = f"-frandom-seed=$out {prefixes}"
    link_flags = ["-s", "--version-script=exports.map", "--build-id=none", "--gc-sections"]
    if name == "cuda":
        compile_flags = f"--frandom-seed=$out -Xcompiler={','.join(prefixes.split())} --compress-mode=size"
    portable = toolchain.Portable(
        torch,
        ["wheel/older_systems.cpp"],
        compile_flags,
        " ".join(f"-Xlinker {flag}" for flag in link_flags) + (" -cudart shared" if name == "cuda" else ""),
    )
    (folder / "build.ninja").write_text(toolchain.ninja_file(name, portable))
    subprocess.run([toolchain.ninja(), "-C", folder], check=True)
    return folder / "library.so"


if __name__ == "__main__":
    main()
