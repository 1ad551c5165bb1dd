"""vLLM's own server in place of ours: when it is taken, and the command that starts it."""

import contextlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

PLUGINS = "vllm.general_plugins"  # the entry points that vLLM loads
# What says how much memory vLLM takes: its options, and on a CPU a variable. Without them it takes so large a share.
MEMORY_OPTIONS, MEMORY_VARIABLE, MEMORY_SHARE = (
    ("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--config"),
    "VLLM_CPU_KVCACHE_SPACE",
    0.92,
)
MEMORY_SPARED = 0.1  # of the machine's memory, where the free share is taken in place of that


def why_not(engine: str, model: str) -> str | None:
    """The reason, if any, for which `--engine` leaves a model to Transformers.

    Raises:
        ValueError, OSError: no such model, or vLLM was asked for and is not installed.
    """
    if engine == "transformers":
        return "as asked"
    if importlib.util.find_spec("vllm") is None:
        if engine == "vllm":
            raise ValueError("--engine vllm, but vLLM is not installed: pip install 'hf_twell[vllm]'")
        return "vLLM is not installed"
    if engine == "vllm":
        return None
    if model.endswith(".gguf") or Path(model, "adapter_config.json").is_file():
        return "vLLM is given neither GGUF files nor adapters here"
    if _is_sparse(model) and not _has_plugin():
        return "vLLM here lacks the plugin of hf_twell, and refuses ReLU"
    return None


def describe(model: str) -> str:
    """In a line, what computes a model.

    Raises:
        ValueError, OSError: no such model.
    """
    if not _is_sparse(model):
        return "is dense (no `twell` entry in its config): served as it is, without sparse kernels"
    if _has_plugin():
        return "is sparse: the plugin of hf_twell computes its blocks"
    return "is sparse, but vLLM here lacks the plugin of hf_twell: no sparse kernels"


def command(model: str, host: str, port: int, dtype: str, arguments: list[str]) -> list[str]:
    """The module is started: `vllm serve` asks for the metadata of a package called vllm, and vllm-cpu is another."""
    options = ["--model", model, "--host", host, "--port", str(port), "--dtype", dtype]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options, *arguments]


def memory_options(arguments: Sequence[str]) -> list[str]:
    """On a CPU, options for vLLM to take the memory that is free, if it would ask for more and then not start."""
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    if not _is_for_cpus() or given & set(MEMORY_OPTIONS) or MEMORY_VARIABLE in os.environ:
        return []
    free = _free_share()
    if free is None or free > MEMORY_SHARE:
        return []
    return ["--gpu-memory-utilization", f"{max(free - MEMORY_SPARED, 0.05):.2f}"]


def _is_for_cpus() -> bool:
    """Whether the vLLM here is a build for CPUs, as its version or its name says."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return "cpu" in name + importlib.metadata.version(name)
    return False


def _free_share() -> float | None:
    """Of this machine's memory; None where Linux does not say it."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free, total = (int(lines[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError):
        return None
    return free / total


def _is_sparse(model: str) -> bool:
    from hf_twell.files.configs import read_config  # which imports PyTorch, for what most callers need not know

    return read_config(model).get("twell") is not None


def _has_plugin() -> bool:
    """Whether vLLM finds ours, which brings the kernels into it."""
    return any(point.value.startswith("hf_twell") for point in importlib.metadata.entry_points(group=PLUGINS))
