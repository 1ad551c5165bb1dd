"""Steps of vLLM: the spans of graphs in a trace, and both engines end to end (on a CPU: without the times of a GPU)."""

import json
import os
import subprocess
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from hf_twell.bench import save_llama
from hf_twell.bench.compressed import KINDS
from hf_twell.bench.vllm_steps import busy_us, cells, graph_steps, kernels_us, span_us
from tests.vllm_engines import PYTHON, TIMEOUT_S, environment, needs_vllm, prompts, save, tiny


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


def test_the_table_compares_both_sides():
    row = {"measured": "decode", "batch": 16, "tokens": [[1, 2], [3, 4]]}
    dense = {**row, "side": "dense", "step_us": 30.0, "tokens_per_s": [100.0, 90.0, 110.0]}
    sparse = {**row, "side": "sparse", "step_us": 20.0, "tokens_per_s": [120.0], "tokens": [[1, 2], [3, 5]]}
    assert cells([dense, sparse]) == [
        ["decode 16", 30.0, 20.0, "1.500x", "100.0 (90.0 to 110.0)", "120.0 (120.0 to 120.0)", "1.200x", "1 of 2"]
    ]
    for side in (dense, sparse):
        del side["tokens_per_s"]
    assert cells([dense, sparse]) == [["decode 16", 30.0, 20.0, "1.500x", None, None, None, "1 of 2"]], "--steps-only"


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_both_engines(tmp_path):
    model = save(tiny(), tmp_path / "model")
    (tmp_path / "ids.json").write_text(json.dumps(prompts(40, 50, 30)))
    options = ["--batch", "1", "2", "--prefill", "2", "--prompt-tokens", "20", "--new-tokens", "8", "--repeats", "2"]
    command = [str(PYTHON), "-m", "hf_twell.bench.vllm_steps", model, "--prompts", "ids.json", "--output", "out"]
    done = subprocess.run(
        [*command, *options, "--context", "128", "--dtype", "float32"],
        cwd=tmp_path,
        env=environment(tmp_path, PYTHONPATH=os.getcwd()),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "vllm_steps.jsonl").read_text().splitlines()]
    loads = [("decode", 1), ("decode", 2), ("prefill", 2)]
    assert [(row["side"], row["measured"], row["batch"]) for row in rows] == [
        (side, *load) for side in ("dense", "sparse") for load in loads
    ]
    assert all(len(row["tokens_per_s"]) == 2 for row in rows)
    assert rows[1]["tokens"] == rows[4]["tokens"], "float32"
    assert done.stdout.count("2 of 2") == 1
    assert "2 of 2 feed-forward blocks use the sparse kernels" in done.stderr, "what each engine says of its blocks"


def test_the_benchmarks_llama_is_saved_for_engines(tmp_path):
    sizes = ["--hidden", "64", "--intermediate", "256", "--vocabulary", "2048", "--layers", "2", "--l0", "12"]
    save_llama.main([str(tmp_path / "model"), *sizes, "--prompts", "3", "--length", "40"])
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert (model.config.hidden_act, model.config.num_hidden_layers) == ("relu", 2)
    assert model.config.twell["density"] == pytest.approx([12 / 256] * 2, rel=0.5)
    ids = json.loads((tmp_path / "model" / "ids.json").read_text())
    assert [len(row) for row in ids] == [40] * 3
    assert all(after == (before + 1) % 2048 for row in ids for before, after in pairwise(row)), "the workload's text"


@pytest.mark.parametrize("weights", KINDS)
def test_the_benchmarks_llama_in_8_bits(tmp_path, weights):
    sizes = ["--hidden", "64", "--intermediate", "256", "--vocabulary", "2048", "--layers", "1", "--l0", "12"]
    options = [*sizes, "--prompts", "1", "--length", "8"]
    for name, more in (("plain", []), ("quantized", ["--weights", weights])):
        save_llama.main([str(tmp_path / name), *options, *more])
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
