"""What a row of `hf-twell bench` must name to be compared with another."""

import os
import platform
import subprocess
from pathlib import Path

import torch

import hf_twell

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def environment(device: torch.device) -> dict:
    """Processor, versions and commit."""
    cuda = device.type == "cuda"
    return {
        "device": device.type,
        "processor": torch.cuda.get_device_name(device) if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **(_cuda() if cuda else {"isa": os.environ.get("HF_TWELL_CPU_ISA") or _widest_isa()}),
        "hf_twell": hf_twell.__version__,
        "commit": commit(),
    }


def _cuda() -> dict:
    return {
        "cuda": torch.version.cuda,
        "path": os.environ.get("HF_TWELL_CUDA_PATH", "auto"),
        # Whether torch.compile's own kernels take part in programmatic dependent launch.
        "inductor_pdl": os.environ.get("TORCHINDUCTOR_ENABLE_PDL") == "1",
    }


def _widest_isa() -> str:
    flags = next((line.split(":", 1)[1] for line in _cpuinfo() if line.startswith(("flags", "Features"))), "")
    features = flags.split()
    return next((name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in features), "portable")


def _processor() -> str:
    names = (line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _cpuinfo() -> list[str]:
    """Lines that Linux has of the processor; none elsewhere."""
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def commit() -> str | None:
    """Of the checkout that this package lies in; None outside one, or without git.

    A copy without its `.git` (on another machine, say) is told its commit by `HF_TWELL_COMMIT`.
    """
    if told := os.environ.get("HF_TWELL_COMMIT"):
        return told
    folder = Path(__file__).resolve().parents[2]
    try:
        run = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return run.stdout.strip() or None
