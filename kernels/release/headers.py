"""Take out of a wheel of PyTorch what compiling and linking need: its headers, and empty libraries of the names of its.

Its own libraries are 2 GB, and nothing of them goes into ours but their names.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

from hf_twell.ops import toolchain

# As the linker looks for them, and as the loader does.
NEEDED = {name: name for name in ("libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libc10.so")}
NEEDED["libcudart.so"] = "libcudart.so.13"


def main(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder, [name for name in file.namelist() if name.startswith("torch/include/")])
    libraries = folder / "torch" / "lib"
    libraries.mkdir(exist_ok=True)
    for name, called in NEEDED.items():
        make = [toolchain.compiler(), "-shared", "-nostdlib", f"-Wl,-soname,{called}", "-x", "c", "/dev/null"]
        subprocess.run([*make, "-o", libraries / name], check=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
