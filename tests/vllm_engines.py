"""Tiny sparse checkpoints, what Transformers computes with them, and engines of vLLM in an environment of its own."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

import hf_twell
from hf_twell.bench.compressed import quantize_folder
from tests.paths import MODEL

PYTHON = Path(f"{sys.prefix}-vllm") / "bin" / "python"
if not PYTHON.exists() and importlib.util.find_spec("vllm"):
    PYTHON = Path(sys.executable)
needs_vllm = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"needs vLLM in {PYTHON.parents[1].name}/, where `make test-all` installs it"
)
TIMEOUT_S = 900  # of several engines on two cores that others use, too
# Of prompts' log-probabilities (root mean square): by how much float32 may differ, and vLLM's int8 at least does.
SAME, ROUNDED = 2e-5, 0.01
AS_NEAR = 1.25  # in 16 and 8 bits: our error over that of vLLM's own blocks, at most
FAMILIES = {
    "llama": (tf.LlamaConfig, tf.LlamaForCausalLM),
    "mistral": (tf.MistralConfig, tf.MistralForCausalLM),
    "qwen2": (tf.Qwen2Config, tf.Qwen2ForCausalLM),
    "qwen3": (tf.Qwen3Config, tf.Qwen3ForCausalLM),
}
# In float32 and at a low density, a block of these sizes takes kernels for one token, two, and from four on.
SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}


def tiny(family="llama", seed=0, **changes):
    config, model = FAMILIES[family]
    torch.manual_seed(seed)
    changes = {"head_dim": 64, **changes} if family == "qwen3" else changes
    return model(config(**{**SIZES, **changes})).eval()


def save(model, folder, density=0.02, **entry) -> str:
    """Make it a sparse checkpoint whose `twell` entry holds each layer's density, or none."""
    hf_twell.unpatch(hf_twell.sparsify(model)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["twell"].pop("density", None)
    if density is not None:
        config["twell"]["density"] = [density] * model.config.get_text_config().num_hidden_layers
    config["twell"] |= entry
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def save_demo(folder) -> str:
    """The demo model with ReLU in place of SiLU, and its tokenizer."""
    path = save(tf.AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32"), folder)
    tf.AutoTokenizer.from_pretrained(MODEL).save_pretrained(path)
    return path


def save_quantized(model, folder, kind="int8", density=0.01, **options) -> str:
    """A sparse checkpoint in int8 or fp8, as `quantize_folder` writes it. The model gets what its weights stand for."""
    path = save(model, folder, density)
    quantize_folder(model, folder, kind, **options)
    state = load_file(folder / "model.safetensors")
    scales = {name: state.pop(f"{name}_scale") for name in list(state) if f"{name}_scale" in state}
    model.float()
    model.load_state_dict({n: t.float() * scales[n].float() if n in scales else t.float() for n, t in state.items()})
    return path


def prompts(*lengths) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 256, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def expected(model, prompts, new_tokens=8) -> dict:
    """Greedy tokens, and the log-probabilities of the prompts' own, by Transformers."""
    tokens, logprobs = [], []
    for ids in prompts:
        ids = torch.tensor([ids])
        options = {"do_sample": False, "max_new_tokens": new_tokens, "attention_mask": torch.ones_like(ids)}
        generated = model.generate(ids, **options)
        tokens.append(generated[0, ids.shape[1] :].tolist())
        log_p = model(ids).logits[0, :-1].float().log_softmax(-1)
        logprobs.append(log_p.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return {"tokens": tokens, "logprobs": logprobs}


def distance(logprobs, others) -> float:
    """Root mean square of their differences, in nats."""
    flat, flat_others = (torch.tensor([value for row in rows for value in row]) for rows in (logprobs, others))
    return (flat - flat_others).square().mean().sqrt().item()


def environment(folder, **changes) -> dict:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a function may ask the workers for the classes of their blocks
        "VLLM_CACHE_ROOT": str(folder.parent / "vllm-cache"),  # with what vLLM found of its models, for all tests
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_DISABLE_COMPILE_CACHE": "1",  # which would keep Inductor's own, where engines find others' code
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the engine is a process of its own, and starts twice as long
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # a package that not every machine with a GPU has
        **changes,
    }


@contextlib.contextmanager
def engines(folder, **changes) -> Iterator[Callable[[list[dict]], list[dict]]]:
    """What tests/vllm_runs.py says of runs, in one process for all of them: to import vLLM takes longer than to run it.

    Args:
        changes: of the process's environment.
    """
    ours, theirs = Pipe()
    command = [str(PYTHON), str(Path(__file__).parent / "vllm_runs.py"), str(theirs.fileno())]
    with open(folder / "log.txt", "w") as log:
        options = {"stdout": log, "stderr": subprocess.STDOUT, "pass_fds": [theirs.fileno()]}
        process = subprocess.Popen(command, cwd=folder, env=environment(folder, **changes), **options)
    theirs.close()

    def run(runs: list[dict]) -> list[dict]:
        try:
            ours.send(runs)
            return ours.recv()
        except (BrokenPipeError, EOFError):
            raise AssertionError((folder / "log.txt").read_text()[-6000:]) from None

    try:
        yield run
        ours.close()
        process.wait(60)
    finally:
        process.kill()
