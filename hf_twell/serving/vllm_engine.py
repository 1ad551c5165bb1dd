"""vLLM's own server in place of ours: when it is taken, what it is asked before, and the command that starts it."""

import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_twell.files.packages import how_to_install
from hf_twell.serving.vllm_plugin import ARCHITECTURES, MIXTURES, OWN_ARCHITECTURES, lacking
from hf_twell.serving.vllm_plugin.density import known_densities, known_settings

COMPUTED = (*ARCHITECTURES, *OWN_ARCHITECTURES)
PLUGINS, PLUGINS_VARIABLE = "vllm.general_plugins", "VLLM_PLUGINS"  # entry points that vLLM loads; the names of those
# What says how much memory vLLM takes: its options, and on a CPU a variable. Without them it takes so large a share.
MEMORY_OPTIONS, MEMORY_VARIABLE, MEMORY_SHARE = (
    ("--gpu-memory-utilization", "--device-memory-utilization", "--kv-cache-memory-bytes", "--config"),
    "VLLM_CPU_KVCACHE_SPACE",
    0.92,
)
MEMORY_SPARED = 0.1  # of the memory, where what is free is taken in place of that
# Three processes of vLLM have PyTorch in memory (2.1 GiB, 0.32) before the one that computes looks at what is free.
MEMORY_OF_VLLM = 3 << 30
# On a CPU that process looks at its NUMA node, and at its cgroup where that has less, by these functions.
ASK_MEMORY = (
    "from vllm.utils.cpu_resource_utils import get_memory_node_info as ask, get_visible_memory_node as nodes; "
    "node = ask(nodes()[0]); print(node.available_memory, node.total_memory)"
)


def why_not(engine: str, model: str, arguments: Sequence[str] = ()) -> str | None:
    """The reason, if any, for which `--engine` leaves a model to Transformers, `arguments` being vLLM's own. A
    ValueError or OSError of no such model, a config that cannot be right, or where vLLM was asked for and is not
    installed, or does not take the model."""
    if engine == "transformers":
        return "as asked"
    if importlib.util.find_spec("vllm") is None:
        if engine == "vllm":
            raise ValueError(f"--engine vllm, but vLLM is not installed: {how_to_install('vllm')}")
        return "vLLM is not installed"
    problem = refusal(model, arguments)
    if engine == "vllm" and problem is not None:
        raise ValueError(f"--engine vllm, but {problem}; or give --engine transformers")
    if engine == "auto" and problem is None and _is_sparse(config := _config(model)):
        return _left_out(config)
    return problem


def refusal(model: str, arguments: Sequence[str] = ()) -> str | None:
    """Why vLLM would not serve a model, as its files and its config say; starting vLLM to hear so takes a minute. A
    ValueError or OSError where there is no such model, Transformers would not serve it either, or vLLM's arguments hold
    settings of the plugin that cannot be right."""
    from hf_twell.models.custom import published_class
    from hf_twell.models.gguf_files import is_gguf

    if is_gguf(model):
        return "vLLM takes no GGUF file; `hf-twell sparsify` makes a model's folder of one"
    if Path(model, "adapter_config.json").is_file() and not Path(model, "config.json").is_file():
        return (
            f"vLLM takes no adapter without its base, and {model} is one; merge it into its base first: "
            "hf_twell.load_adapter(path).merge_and_unload(), and its save_pretrained"
        )
    config = _config(model)
    if published_class(config.get("model_type")):
        return f"vLLM knows no {config['model_type']}; `hf-twell sparsify` saves such a model in stock form"
    if problem := _own_type_problem(config, arguments):
        return problem
    if _fails_on_torchao(config):
        return (
            f"vLLM does not load {model}, which holds weights of torchao as `hf-twell quantize` writes them; of 8-bit "
            "checkpoints vLLM takes those of compressed-tensors (W8A8 and FP8_DYNAMIC of llm-compressor)"
        )
    if _is_sparse(config):
        _check_sparse(model, arguments)
    if (_is_sparse(config) or config.get("hidden_act") == "relu") and _left_out(config, arguments) is None:
        return _no_plugin()
    return None


def describe(model: str, arguments: Sequence[str] = ()) -> str:
    """In a line, what computes a model that vLLM does not refuse; a ValueError or OSError where there is no such
    model."""
    config = _config(model)
    if not _is_sparse(config):
        return "is dense (no `twell` entry in its config): served as it is, without sparse kernels"
    if reason := _left_out(config, arguments):
        return f"is sparse, but {reason}: no sparse kernels"
    unknown = _check_sparse(model, arguments)
    return "is sparse: the plugin of hf_twell computes its blocks" + (
        f", without kernels, as {unknown}" if unknown else ""
    )


def command(model: str, host: str, port: int, dtype: str, arguments: list[str]) -> list[str]:
    """The module is started: `vllm serve` asks for the metadata of a package called vllm, and vllm-cpu is another."""
    options = ["--model", model, "--host", host, "--port", str(port), "--dtype", dtype]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options, *arguments]


def take_option(arguments: Sequence[str], option: str) -> tuple[str | None, list[str]]:
    """The value that one of vLLM's options has among its arguments, and the other arguments."""
    value, others, rest = None, [], iter(arguments)
    for argument in rest:
        if _name(argument) == option:
            _, given, value = argument.partition("=")
            value = value if given else next(rest, "")
        else:
            others.append(argument)
    return value, others


def additional_config(arguments: Sequence[str]) -> tuple[dict, list[str]]:
    """vLLM's additional config, which has the plugin's settings, among its arguments, and the other arguments. A
    ValueError where it is no JSON mapping, or such settings cannot be."""
    text, others = take_option(arguments, "--additional-config")
    try:
        settings = {} if text is None else json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--additional-config is no JSON ({error}); give one JSON object") from error
    if not isinstance(settings, dict):
        raise ValueError(f"--additional-config is {text}; give one JSON object")
    known_settings(settings)
    return settings, others


def memory_options(arguments: Sequence[str]) -> list[str]:
    """On a CPU, options for vLLM to take the memory that is free, if it would ask for more and then not start."""
    if not _is_for_cpus() or set(map(_name, arguments)) & set(MEMORY_OPTIONS) or os.environ.get(MEMORY_VARIABLE):
        return []
    # In a process of its own, as the import of vLLM changes the environment, which the server would inherit.
    asked = subprocess.run([sys.executable, "-c", ASK_MEMORY], capture_output=True, text=True, check=False)
    try:
        available, total = map(int, asked.stdout.split()[-2:])
    except ValueError:  # another version of vLLM asks in another way; if it asks for too much, it says so
        return []
    share = memory_share(available, total)
    return [] if share is None else ["--gpu-memory-utilization", f"{share:.2f}"]


def memory_share(available: int, total: int) -> float | None:
    """The share of `total` bytes of memory that vLLM can have before it has started, of which `available` are free;
    None where that is as much as it asks for."""
    free = (available - MEMORY_OF_VLLM) / total
    return None if free >= MEMORY_SHARE else max(math.floor(100 * (free - MEMORY_SPARED)) / 100, 0.05)


def _is_for_cpus() -> bool:
    """Whether the vLLM here is a build for CPUs, as its version or its name says."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return "cpu" in name + importlib.metadata.version(name)
    return False


def _name(argument: str) -> str:
    """Of an option, as vLLM takes it: with underscores, too, and with its value after a sign of equality."""
    return argument.partition("=")[0].replace("_", "-")


def _config(model: str) -> dict:
    from hf_twell.files.configs import read_config  # which imports PyTorch, for what most callers need not know

    return read_config(model)


def _is_sparse(config: dict) -> bool:
    return config.get("twell") is not None


def _left_out(config: dict, arguments: Sequence[str] = ()) -> str | None:
    """Why the plugin does not have vLLM load such a model by a class of ours, or None."""
    if not set(config.get("architectures") or ()) & set(COMPUTED):
        return f"the plugin of hf_twell computes {', '.join(COMPUTED)} alone in vLLM"
    if take_option(arguments, "--model-impl")[0] == "transformers":
        return "Transformers' code was asked for"
    return None


def _own_type_problem(config: dict, arguments: Sequence[str]) -> str | None:
    """Why vLLM would not load a model of this package's own `model_type`, or None."""
    from hf_twell.blocks.modeling_twell import PREFIX

    kind, names = str(config.get("model_type")), config.get("architectures") or ()
    if not kind.startswith(PREFIX):
        return None
    if not set(names) & set(OWN_ARCHITECTURES):
        own = ", ".join(OWN_ARCHITECTURES)
        return f"vLLM knows no {kind}, a type of this package's own, of which its plugin brings {own} alone"
    if take_option(arguments, "--model-impl")[0] == "transformers":
        return f"vLLM knows {kind}, a type of this package's own, by its plugin alone; leave --model-impl out"
    name = next(name for name in names if name in OWN_ARCHITECTURES)
    return lacking(name, kind, _vllm_lists(name.removeprefix("Twell")))


def _vllm_lists(architecture: str) -> bool:
    """Whether the vLLM here has a model of this name, by the text of its registry: to import vLLM takes long."""
    spec: Any = importlib.util.find_spec("vllm")
    registry = Path(spec.origin).parent / "model_executor" / "models" / "registry.py"
    return registry.is_file() and f'"{architecture}"' in registry.read_text()


def _fails_on_torchao(config: dict) -> bool:
    """Whether vLLM would fail on weights of torchao: without that package, and where other linears are none of its.

    It does not read the patterns that name these, and takes their weights for quantized ones.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "torchao":
        return False
    others = quantization.get("modules_to_not_convert") or ()
    return importlib.util.find_spec("torchao") is None or any("*" in str(name) for name in others)


def _check_sparse(model: str, arguments: Sequence[str]) -> str | None:
    """Why no density is known of a sparse model's layers, without which none of its blocks uses kernels, or None. A
    ValueError as the plugin would raise it of the model's config and of its settings."""
    from transformers import AutoConfig

    from hf_twell.convert.entry import check_entry
    from hf_twell.convert.sparsify import chosen_layers
    from hf_twell.files.configs import one_line_errors

    settings, _ = additional_config(arguments)
    with one_line_errors(f"{model}: its config.json makes no model"):
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    try:
        layers = config.get_text_config().num_hidden_layers
        entry = check_entry(config)
        chosen_layers(config, None, layers)
        stored = (entry or {}).get("density")
        if isinstance(stored, list) and set(config.architectures or ()) & set(MIXTURES):
            layers = len(stored)  # one a block, and a layer may have two
        known, source = known_densities(settings, entry or {}, layers)
    except ValueError as error:
        raise ValueError(f"{model}: {error}") from error
    return source if known is None else None


def _no_plugin() -> str | None:
    """Why vLLM would run without our plugin, which brings ReLU and the kernels into it, or None."""
    names = [
        point.name for point in importlib.metadata.entry_points(group=PLUGINS) if point.value.startswith("hf_twell")
    ]
    allowed = os.environ.get(PLUGINS_VARIABLE)
    if not names:
        return "vLLM here lacks the plugin of hf_twell, and refuses ReLU; install hf_twell beside it"
    if allowed is not None and not set(names) & set(allowed.split(",")):
        return f"{PLUGINS_VARIABLE}={allowed!r} leaves out the plugin of hf_twell, and without it vLLM refuses ReLU"
    return None
