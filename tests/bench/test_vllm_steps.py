"""Steps of vLLM: the spans of graphs in a trace, and both engines end to end (on a CPU: without the times of a GPU)."""

import argparse
import json
import os

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hf_twell.bench.compressed import KINDS, quantize_folder
from hf_twell.bench.plot import plot
from hf_twell.bench.progress import silent
from hf_twell.bench.vllm_steps import busy_us, graph_steps, kernels_us, span_us
from hf_twell.cli.bench_table import CELLS
from hf_twell.cli.bench_vllm import save_llama
from tests.conftest import finished, tiny_llama
from tests.paths import DEMO, HELDOUT
from tests.vllm_engines import PYTHON, TIMEOUT_S, environment, needs_vllm, save, tiny


def kernel(start, duration, correlation):
    return {"cat": "kernel", "name": "k", "ts": start, "dur": duration, "args": {"correlation": correlation}}


def launch(correlation, name="cudaGraphLaunch"):
    return {"cat": "cuda_runtime", "name": name, "ts": 0, "dur": 1, "args": {"correlation": correlation}}


def test_a_steps_time_is_its_graphs_span():
    """Not that of a smaller graph, nor of kernels that were launched one by one."""
    events = [
        *(launch(1), kernel(10, 5, 1), kernel(18, 4, 1)),
        *(launch(2), kernel(30, 5, 2), kernel(33, 7, 2)),
        *(launch(3), kernel(50, 100, 3)),
        *(launch(4, "cudaLaunchKernel"), kernel(200, 1, 4), kernel(300, 1, 4)),
        {"name": "thread_name", "ph": "M", "args": {}},
    ]
    steps = graph_steps({"traceEvents": events})
    assert list(map(span_us, steps)) == [12, 10]
    assert kernels_us(steps) == [{"kernel": "k", "count": 2, "us": 10.5}], "(5 + 4 + 5 + 7) / 2"
    assert graph_steps({"traceEvents": events[-4:]}) == kernels_us([]) == []
    fewer = [launch(5), *(kernel(400 + 2 * place, 1, 5) for place in range(3))]
    assert list(map(span_us, graph_steps({"traceEvents": events + fewer}))) == [
        12,
        10,
    ]  # one step of fewer sequences, of more kernels


def test_the_gpu_is_busy_while_any_kernel_runs():
    assert busy_us({"traceEvents": [kernel(0, 10, 1), kernel(5, 10, 2), kernel(20, 5, 3), launch(1)]}) == 20


def test_the_table_and_the_figure_compare_both_sides(tmp_path):
    row = {"bench": "vllm", "measured": "decode", "batch": 16, "tokens": [[1, 2], [3, 4]], "processor": "a GPU"}
    dense = {**row, "side": "dense", "step_us": 30.0, "tokens_per_s": [100.0, 90.0, 110.0]}
    sparse = {**row, "side": "sparse", "step_us": 20.0, "tokens_per_s": [120.0], "tokens": [[1, 2], [3, 5]]}
    assert CELLS["vllm"]([dense, sparse])[1] == [
        ["decode 16", 30.0, 20.0, "1.500x", "100.0 (90.0 to 110.0)", "120.0 (120.0 to 120.0)", "1.200x", "1 of 2"]
    ]
    plot([dense, sparse], tmp_path / "both.png")
    for side in (dense, sparse):
        del side["tokens_per_s"]
    steps_only = CELLS["vllm"]([dense, sparse])[1]
    assert steps_only == [["decode 16", 30.0, 20.0, "1.500x", None, None, None, "1 of 2"]], "--steps-only"
    plot([dense, sparse], tmp_path / "one.png")
    assert (tmp_path / "both.png").stat().st_size > (tmp_path / "one.png").stat().st_size


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_both_engines(tmp_path):
    """Of a model of the user's on a text; without the times of a GPU."""
    model = save(tiny(vocab_size=8192, num_hidden_layers=1), tmp_path / "model")
    AutoTokenizer.from_pretrained(DEMO / "model").save_pretrained(model)
    options = ["--batch", "1", "2", "--prefill", "2", "--prompt-tokens", "20", "--length", "50", "--new-tokens", "8"]
    options += [model, "--text", str(HELDOUT), "--dtype", "float32"]
    command = [PYTHON, "-m", "hf_twell", "bench", "vllm", *options, "--repeats", "2", "--json"]
    done = finished(*command, cwd=tmp_path, env=environment(tmp_path, PYTHONPATH=os.getcwd()), timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = json.loads(done.stdout)["rows"]
    loads = [("decode", 1), ("decode", 2), ("prefill", 2)]
    assert [(row["side"], row["measured"], row["batch"]) for row in rows] == [
        (side, *load) for side in ("dense", "sparse") for load in loads
    ]
    assert all(len(row["tokens_per_s"]) == 2 for row in rows)
    assert rows[1]["tokens"] == rows[4]["tokens"], "float32"
    assert "1 of 1 feed-forward blocks use the sparse kernels" in done.stderr, "what each engine says of its blocks"


@pytest.mark.slow
def test_the_random_model_that_engines_get(tmp_path):
    """In 8 bits, as tests/serving/test_vllm_quantized.py has vLLM load them."""
    sizes = {"hidden": 256, "intermediate": 1024, "vocabulary": 2048, "heads": 4, "kv_heads": 4}
    args = argparse.Namespace(**sizes, length=50, weights="int8")
    told, prompts = save_llama(str(tmp_path / "model"), args, layers=2, l0=12, count=4, report=silent)
    assert [len(prompt) for prompt in prompts] == [50] * 4
    assert told["weights"] == "int8"
    assert 12 <= told["l0"] < 30, "of short prompts, whose first tokens are dense"
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert len(config["twell"]["density"]) == 2
    assert sum(config["twell"]["density"]) / 2 == pytest.approx(told["l0"] / 1024, rel=0.01)
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


@pytest.mark.parametrize("weights", KINDS)
def test_a_checkpoint_in_8_bits(tmp_path, weights):
    """One scale for each row of the linears' weights; nothing else changes."""
    model = tiny_llama(hidden_size=64, intermediate_size=256, vocab_size=512)
    for name in ("plain", "quantized"):
        model.save_pretrained(tmp_path / name)
    quantize_folder(model, tmp_path / "quantized", weights)
    plain, quantized = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "quantized"))
    scales = {name for name in quantized if name.endswith("_scale")}
    assert {name.removesuffix("_scale") for name in scales} == {name for name in plain if "_proj" in name}
    step = {"int8": 1 / 127, "fp8": 1 / 16}[weights]  # of a row's largest; of a value itself
    for name, weight in plain.items():
        if f"{name}_scale" not in scales:
            assert torch.equal(quantized[name], weight)
            continue
        assert quantized[name].dtype == KINDS[weights][0]
        meant = quantized[name].float() * quantized[f"{name}_scale"].float()
        allowed = step * weight.float().abs().amax(1, keepdim=True)
        assert ((meant - weight.float()).abs() <= allowed).all()
