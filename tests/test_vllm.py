"""The vLLM plugin against Transformers: vLLM runs in an environment of its own, which `make test-all` makes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import hf_twell
from hf_twell.vllm_plugin.density import known_densities

ROOT = Path(__file__).parents[1]
VLLM_PYTHON = Path(f"{sys.prefix}-vllm") / "bin" / "python"
needs_vllm = pytest.mark.skipif(
    not VLLM_PYTHON.exists(), reason=f"needs vLLM in {VLLM_PYTHON.parents[1].name}/, where make test-all installs it"
)
RUNS_TIMEOUT_S = 600
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
# In float32 a block of these sizes takes kernels for two tokens, and from four tokens on.
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
}
SPARSE, DENSE = "hf_twell::infer", "hf_twell_vllm::ffn"
EAGER = {"enforce_eager": True}
FP32 = {"dtype": "float32"}


def tiny(family="llama", dtype=torch.float32, **changes):
    config, model = FAMILIES[family]
    torch.manual_seed(0)
    changes = {"head_dim": 64, **changes} if family == "qwen3" else changes
    return model(config(**{**SIZES, **changes})).to(dtype).eval()


def save(model, folder, density=0.05) -> str:
    """A sparse checkpoint of the model with an entry of each layer's density, or one without."""
    hf_twell.unpatch(hf_twell.sparsify(model)).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["twell"].pop("density", None)
    if density is not None:
        config["twell"]["density"] = [density] * config["num_hidden_layers"]
    path.write_text(json.dumps(config))
    return str(folder)


def prompts(*lengths) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 256, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def expected(model, prompts, new_tokens=8) -> dict:
    """Greedy tokens and the prompts' log-probabilities by Transformers."""
    tokens, logprobs = [], []
    for ids in prompts:
        ids = torch.tensor([ids])
        length = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        tokens.append(model.generate(ids, do_sample=False, pad_token_id=0, **length)[0, ids.shape[1] :].tolist())
        log_p = model(ids).logits[0, :-1].float().log_softmax(-1)
        logprobs.append(log_p.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return {"tokens": tokens, "logprobs": logprobs}


def distance(logprobs, others) -> float:
    """Root mean square of their differences, in nats."""
    pairs = zip(sum(logprobs, []), sum(others, []), strict=True)
    return torch.tensor([a - b for a, b in pairs]).square().mean().sqrt().item()


def environment(folder, **changes) -> dict:
    return {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else engine and caller are two processes, and start twice as long
        "VLLM_CACHE_ROOT": str(folder / "vllm-cache"),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        **changes,
    }


def run(folder, runs, **changes) -> list[dict]:
    (folder / "runs.json").write_text(json.dumps(runs))
    command = [str(VLLM_PYTHON), str(ROOT / "tests" / "vllm_runs.py"), "runs.json", "results.json"]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(folder, **changes),
        capture_output=True,
        text=True,
        timeout=RUNS_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads((folder / "results.json").read_text())


def test_the_plugin_imports_neither_torch_nor_vllm():
    code = "import sys, hf_twell.vllm_plugin; sys.exit(bool({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_known_density_is_the_settings_else_the_checkpoints():
    entry = {"version": 1, "density": [0.01, 0.02]}
    assert known_densities({}, entry, 2) == ([0.01, 0.02], "the checkpoint's twell entry")
    for given, values in ((0.5, [0.5, 0.5]), ([0, 1], [0, 1])):
        assert known_densities({"hf_twell": {"density": given}}, entry, 2)[0] == values
    assert known_densities({"other": 1}, {}, 2)[0] is None


@pytest.mark.parametrize(
    ("settings", "entry", "says"),
    [
        ({"densities": 1}, {}, "it takes {'density': 0.01}"),
        (0.01, {}, "it takes {'density': 0.01}"),
        ({"density": 1.5}, {}, "gives the density as 1.5; give a number from 0 to 1, or a list of 2"),
        ({"density": [0.1]}, {}, r"\['density'\] gives the density as \[0.1\]; .* a list of 2"),
        ({"density": True}, {}, "gives the density as True"),
        ({"density": "0.1"}, {}, "gives the density as '0.1'"),
        ({}, {"density": [0.1, float("nan")]}, "the checkpoint's twell entry gives the density"),
    ],
)
def test_what_can_be_no_density_is_refused(settings, entry, says):
    with pytest.raises(ValueError, match=says):
        known_densities({"hf_twell": settings}, entry, 2)


@pytest.mark.slow
@needs_vllm
@pytest.mark.timeout(RUNS_TIMEOUT_S)
def test_families_give_the_tokens_of_transformers(tmp_path):
    """Compiled and eager; at once four prompts, whose 74 tokens come in one call, then one alone."""
    several, one = prompts(7, 16, 21, 30), prompts(25)
    runs, references = [], []
    for family in FAMILIES:
        model = tiny(family)
        path = save(model, tmp_path / family)
        references.append([expected(model, several), expected(model, one)])
        calls = [{"prompts": several, "logprobs": True}, {"prompts": one}]
        runs.append({"model": path, "options": FP32 | ({} if family in ("llama", "qwen3") else EAGER), "calls": calls})
    for result, (first, second) in zip(run(tmp_path, runs), references, strict=True):
        assert "error" not in result, result
        assert result["blocks"] == ["SparseFfn"] * 2
        assert result["lines"] == [
            "hf_twell: 2 of 2 feed-forward blocks use the sparse kernels where these are faster, "
            "at densities of 5.00% to 5.00%, from the checkpoint's twell entry"
        ]
        assert result["calls"][0]["tokens"] == first["tokens"]
        assert result["calls"][1]["tokens"] == second["tokens"]
        assert distance(result["calls"][0]["logprobs"], first["logprobs"]) < 2e-5
        assert [each["rows"][SPARSE] for each in result["calls"]] == [[4, 74], [1, 25]]
