"""Lay the kernel out as Hugging Face's `kernels` loads it, with compiled libraries: `make hub-kernel` runs this.

kernel-builder does the same from kernels/build.toml in an environment of its own; this needs a compiler alone.
"""

import json
import shutil
import tomllib

import jinja2
import prebuild

from hf_twell.ops import build, toolchain

OPS = '''"""Loads the library, and names its operators."""

from pathlib import Path

import torch

torch.ops.load_library(Path(__file__).parent / "{name}.abi3.so")
ops = torch.ops.{name}


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{name}::{{op_name}}"
'''


def main() -> None:
    args = prebuild.arguments(__doc__)
    general = tomllib.loads((toolchain.kernels_dir() / "build.toml").read_text())["general"]
    for name in args.names:
        cuda = toolchain.nvcc_version() if name == "cuda" else None
        hub_name = f"_hf_twell_{name}_{build.prebuilt_stem(name, cuda).split('-')[1]}"
        library = prebuild.compile_library(name, args, hub_name)
        device = "cpu" if cuda is None else "cu" + "".join(cuda.split(".")[:2])
        variant = args.output / "build" / f"torch-stable-abi210-{device}-{args.machine}-linux"
        shutil.copytree(toolchain.kernels_dir() / "torch-ext" / "hf_twell", variant)
        shutil.copyfile(library, variant / f"{hub_name}.abi3.so")
        (variant / "_ops.py").write_text(OPS.format(name=hub_name))
        about = {key: general[key] for key in ("name", "version", "license")}
        about |= {"id": hub_name, "python-depends": [], "backend": {"type": name}}
        (variant / "metadata.json").write_text(json.dumps(about, indent=2) + "\n")
    if args.repo:
        card = jinja2.Template((toolchain.kernels_dir() / "CARD.md").read_text())
        (args.output / "README.md").write_text(card.render(repo_id=args.repo, **general))


if __name__ == "__main__":
    main()
