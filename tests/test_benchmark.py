"""The benchmark's inputs are like real ones, its rows are whole, and it checks what it times."""

import argparse
import json

import pytest
import torch

from hf_twell import benchmark, workload
from hf_twell.cli import bench
from hf_twell.modeling import sparse_ffns


def test_workload_has_the_statistics_of_sparse_models():
    x, w_gate, _, _ = workload.make_ffn(2048, 512, 2048, 30, dtype=torch.float32)
    active = x @ w_gate.T > 0
    count = active.sum(1).float()
    assert count.mean().item() == pytest.approx(30, rel=0.05)
    assert count.max() > 5 * count.median(), "heavy tokens"
    assert count[::1024].mean() > 2 * count.mean(), "first tokens are dense"
    rate = active.float().mean(0).sort(descending=True).values
    assert rate[:64].sum() > 0.1 * rate.sum(), "hot neurons"
    together = active.view(-1, 64, 2048).any(1).sum(1).float().mean()
    apart = active[torch.randperm(2048)].view(-1, 64, 2048).any(1).sum(1).float().mean()
    assert together < 0.95 * apart, "neighbours share neurons"


def test_random_llama_is_calibrated_layer_by_layer():
    model = workload.make_llama(12.0, hidden=128, intermediate=512, layers=3, vocabulary=500, dtype=torch.float32)
    counts = []
    for block in sparse_ffns(model):
        block.act_fn.register_forward_hook(lambda m, a, out: counts.append((out > 0).sum(-1).float().mean().item()))
    with torch.no_grad():
        model(torch.randint(500, (2, 256)))
    assert counts == pytest.approx([12.0] * 3, rel=0.25)


@pytest.mark.parametrize("extra", [[], ["--backward"]])
def test_bench_ffn_writes_rows_and_a_plot(tmp_path, capsys, extra):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    args = ["ffn", "--tokens", "1", "20", "--l0", "8", "--hidden", "64", "--intermediate", "344", "--repeats", "2"]
    args += ["--no-compile", "--json", "--output", str(tmp_path), *extra]
    assert bench.run(parser.parse_args(args)) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["tokens"] for row in rows] == [1, 20]
    for row in rows:
        assert row["speedup"] > 0
        assert row["error"] <= 2 * row["error_eager"]
        assert {"processor", "threads", "torch", "commit", "eager_ms", "sparse_ms"} <= row.keys()
    assert [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()] == rows
    assert (tmp_path / "bench.png").stat().st_size > 1000


def test_bench_generate_gives_the_same_tokens_in_fp32():
    shape = {"hidden": 128, "intermediate": 512, "layers": 2, "vocabulary": 300}
    row = benchmark.bench_generate(l0=8, new_tokens=8, dtype="float32", repeats=1, **shape)
    assert row["same_tokens"]
    assert row["logits_difference"] < 1e-5
