"""The benchmark's inputs are like real ones, its rows are whole, and it refuses what is wrong before it times it."""

import argparse
import json
import os
import subprocess
import sys
import time

import pytest
import torch

from hf_twell import (
    benchmark,
    benchmark_backward,
    benchmark_check,
    benchmark_generate,
    benchmark_train,
    ops,
    reference,
    timing,
    workload,
    workload_llama,
)
from hf_twell.cli import bench, main
from hf_twell.workload import make_ffn, patched_block

TINY = {"hidden": 128, "intermediate": 512, "layers": 2, "vocabulary": 2048}


def run(capsys, *arguments):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    assert bench.run(parser.parse_args([str(argument) for argument in (*arguments, "--json")])) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def test_workload_has_the_statistics_of_sparse_models():
    x, w_gate, _, _ = workload.make_ffn(2048, 512, 2048, 30, dtype=torch.float32)
    active = workload.active_neurons(x, w_gate)
    count = active.sum(1).float()
    assert count.mean().item() == pytest.approx(30, rel=0.05)
    assert count.max() > 5 * count.median(), "heavy tokens"
    assert count[::1024].mean() > 2 * count.mean(), "first tokens are dense"
    rate = active.float().mean(0).sort(descending=True).values
    assert rate[:64].sum() > 0.1 * rate.sum(), "hot neurons"
    apart = workload.distinct_neurons(active[torch.randperm(2048)])
    assert workload.distinct_neurons(active) < 0.95 * apart, "neighbours share neurons"


def test_distinct_neurons_by_hand():
    active = torch.tensor([[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]]) > 0
    assert workload.distinct_neurons(active, 2) == 1.5
    assert workload.distinct_neurons(active, 64) == 3


@pytest.fixture(scope="module")
def llama():
    return workload_llama.make_llama(12.0, **{**TINY, "layers": 6}, dtype=torch.float32)


def test_random_llama_is_calibrated_layer_by_layer(llama):
    model, distinct = llama
    text = workload_llama.make_text(2048, 4, 1024, seed=5)
    layers = workload_llama.layer_statistics(model, text)
    assert len(layers) == 6
    workload_llama.check_layers(layers, 12.0, distinct)


def test_random_llama_recites_the_workload(llama):
    text = workload_llama.make_text(2048, 3, 20, seed=5, starts_of_sequences=False)
    assert torch.equal(llama[0].generate(text[:, :8], max_new_tokens=12, do_sample=False), text)


def test_layers_unlike_the_workload_are_refused(llama):
    model, distinct = llama
    text = workload_llama.make_text(2048, 4, 1024, seed=5)
    thresholds = model.model.layers[3].mlp.gate_proj.weight[:, 0]
    kept = thresholds.clone()
    with torch.no_grad():
        thresholds.mul_(0.9)
        with pytest.raises(ValueError, match=r"layer 3 has .* where the workload has 12;"):
            workload_llama.check_layers(workload_llama.layer_statistics(model, text), 12.0, distinct)
        thresholds.copy_(kept)
    layers = workload_llama.layer_statistics(model, text)
    with pytest.raises(ValueError, match="distinct in 64"):
        workload_llama.check_layers(layers, 12.0, 1.3 * distinct)


@pytest.mark.parametrize("extra", [[], ["--backward"], ["--dtype", "float32"]])
def test_bench_ffn_writes_rows_and_a_plot(tmp_path, capsys, extra):
    sizes = ("--tokens", 1, 20, "--l0", 8, "--hidden", 64, "--intermediate", 344, "--repeats", 2, "--device", "cpu")
    rows = run(capsys, "ffn", *sizes, "--no-compile", "--output", tmp_path, *extra)
    assert [row["tokens"] for row in rows] == [1, 20]
    for row in rows:
        assert row["speedup"] > 0
        assert row["error"] <= max(2 * row["error_eager"], 2**-7)
        assert row["l0"] <= row["distinct_64"] <= 344
        wanted = {"processor", "threads", "torch", "commit", "eager_ms", "sparse_ms", "backend", "device", "dtype"}
        assert wanted <= row.keys()
        assert row["took"] in ("kernels", "plain matmuls")
        if "--backward" in extra:
            assert list(row["errors"]) == list(benchmark_backward.TENSORS)
    assert [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()] == rows
    assert (tmp_path / "bench.png").stat().st_size > 1000


def test_rows_without_kernels_say_so(tmp_path):
    command = [sys.executable, "-m", "hf_twell", "bench", "ffn", "--device", "cpu", "--no-compile", "--json"]
    sizes = ["--tokens", "1", "--l0", "8", "--hidden", "64", "--intermediate", "344", "--repeats", "1"]
    (tmp_path / "file").touch()
    environment = {**os.environ, "HF_TWELL_CACHE": str(tmp_path / "file" / "cache")}  # which cannot be made
    done = subprocess.run([*command, *sizes], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["backend"], row["took"]) == ("reference", "plain matmuls")
    assert "set HF_TWELL_CACHE to one that can" in done.stderr


def test_shapes_of_models_keep_the_density(capsys):
    rows = run(
        capsys, "ffn", "--shape", "smollm2-135m", "--tokens", 2, "--repeats", 1, "--no-compile", "--device", "cpu"
    )
    assert (rows[0]["hidden"], rows[0]["intermediate"]) == (576, 1536)
    assert rows[0]["requested_l0"] == pytest.approx(30 * 1536 / 5632, abs=1e-3)


@pytest.mark.parametrize("backward", [False, True])
def test_a_wrong_block_is_not_timed(monkeypatch, backward):
    def wrong(x, w_up, w_down, w_gate, **options):
        y = reference.ffn(x, w_up, w_down, w_gate)
        return y + 0.02 * y.detach().roll(1, 0) if not backward else reference.ffn(1.02 * x, w_up, w_down, w_gate)

    monkeypatch.setattr(ops, "ffn", wrong)
    rows = benchmark.bench_ffn([64], [8], hidden=64, intermediate=344, compile_dense=False, backward=backward)
    with pytest.raises(ValueError, match="no speed"):
        next(rows)


def test_a_block_without_its_l1_term_is_not_timed(monkeypatch):
    def forgetful(*args, l1_scale=None, **options):
        return reference.ffn(*args)

    monkeypatch.setattr(ops, "ffn", forgetful)
    rows = benchmark.bench_ffn([64], [8], hidden=64, intermediate=344, compile_dense=False, backward=True)
    with pytest.raises(ValueError, match="gradient of x of the sparse block is off"):
        next(rows)


def test_compiled_dense_training_has_the_l1_term():
    x, *weights = (t.requires_grad_() for t in workload.make_ffn(64, 64, 344, 8, dtype=torch.float32))
    function = benchmark_backward.dense

    def gradients(function, scale):
        y = function(x, *weights, torch.tensor(scale))
        return torch.autograd.grad(y, (x, *weights), torch.ones_like(y))

    compiled = gradients(torch.compile(function, dynamic=False, fullgraph=True), 0.125)
    for value, wanted in zip(compiled, gradients(function, 0.125), strict=True):
        torch.testing.assert_close(value, wanted)
    assert benchmark_check.relative_error(gradients(function, 0.0)[0], compiled[0]) > 0.1


def test_what_is_all_zero_must_come_out_zero():
    zero = torch.zeros(3)
    assert benchmark_check.relative_error(zero, zero) == 0
    assert benchmark_check.relative_error(torch.tensor([0.0, 1e-9, 0.0]), zero) == float("inf")
    assert not benchmark_check.relative_error(torch.full((3,), float("nan")), zero) <= 1


def test_inputs_of_several_blocks_are_strangers_or_runs():
    x, w_gate, _, _ = workload.make_ffn(16384, 32, 128, 8, dtype=torch.float32)
    place = {tuple(row): index for index, row in enumerate(x[:, 2:6].tolist())}
    for count, neighbours in ((16, False), (256, True)):
        xs, active = benchmark._draw(x, w_gate, count, 8, 28)
        assert [some.shape for some in xs] == [(count, 32)] * 28
        assert active.sum(1).float().mean().item() == pytest.approx(8, rel=0.1)
        places = torch.tensor([[place[tuple(row)] for row in some[:, 2:6].tolist()] for some in xs])
        assert bool((places.diff() == 1).all()) == neighbours


def test_bench_prefill_writes_rows_and_a_plot(tmp_path, capsys):
    sizes = [item for name, value in TINY.items() for item in (f"--{name}", value)]
    rows = run(
        capsys, "prefill", *sizes, "--l0", 12, "--batch", 2, "--length", 512, "--repeats", 1, "--device", "cpu",
        "--dtype", "float32", "--output", tmp_path,
    )  # fmt: skip
    (row,) = rows
    assert row["speedup"] > 0
    assert row["logits_difference"] < 1e-5
    assert row["layer_l0"] == pytest.approx([12.0] * 2, rel=0.1)
    assert {"eager_ms", "compiled_ms", "sparse_ms", "sparse_compiled_ms", "heads", "vocabulary"} <= row.keys()
    assert json.loads((tmp_path / "bench.jsonl").read_text()) == row
    assert (tmp_path / "prefill.png").stat().st_size > 1000


def test_bench_generate_gives_the_same_tokens_in_fp32():
    row = benchmark_generate.bench_generate(l0=12, batch=2, new_tokens=16, dtype="float32", repeats=1, **TINY)
    assert row["same_tokens"]
    assert row["recited"] == 1
    assert row["logits_difference"] < 1e-5
    assert row["decoded_l0"] == pytest.approx(12, rel=0.1)
    assert row["error_dense_step"] < 1e-5, "the step feeds the right tokens at the right positions"
    assert row["sparse_step_ms"] > 0


def test_bench_generate_of_steps_alone_draws_its_figure(tmp_path, capsys):
    sizes = [item for name, value in TINY.items() for item in (f"--{name}", value)]
    (row,) = run(
        capsys, "generate", *sizes, "--l0", 12, "--new-tokens", 32, "--repeats", 1, "--device", "cpu",
        "--dtype", "float32", "--steps-only", "--output", tmp_path,
    )  # fmt: skip
    assert row["step_speedup"] > 0
    assert "speedup" not in row
    assert (tmp_path / "generate.png").stat().st_size > 1000


def test_the_bar_says_what_is_being_done(capsys):
    sizes = [item for name, value in TINY.items() for item in (f"--{name}", str(value))]
    arguments = ["--l0", "12", "--new-tokens", "32", "--repeats", "1", "--device", "cpu", "--dtype", "float32"]
    assert main(["bench", "generate", *sizes, *arguments]) == 0
    shown = capsys.readouterr().err
    phases = ["making the model", "calibrating", "choosing texts", "checking", "timing dense_step, turn 1 of 2"]
    places = [shown.index(phase) for phase in [*phases, "timing generate, eager, turn 1 of 1"]]
    assert places == sorted(places)


def test_reports_are_not_timed():
    told = []

    def report(*phase):
        told.append(phase)
        time.sleep(0.05)

    calls = {"one": lambda turn: None, "other": lambda turn: None}
    times = timing.interleaved_ms(calls, 1, torch.device("cpu"), report=report)
    assert told[:2] == [("timing", "one, turn 1 of 3"), ("timing", "other, turn 1 of 3")]
    assert len(told) == 6
    assert max(times.values()) < 5


def test_logits_of_a_wrong_model_are_refused():
    truth = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    outputs = {"eager": truth * 1.001, "sparse": truth * 1.0015}
    assert benchmark_check.check_logits(outputs, truth)["error_sparse"] == pytest.approx(0.0015, rel=0.01)
    with pytest.raises(ValueError, match="logits of sparse are off"):
        benchmark_check.check_logits({**outputs, "sparse": truth * 1.01}, truth)


def test_bench_train_writes_rows_and_a_plot(tmp_path, capsys):
    sizes = [item for name, value in TINY.items() for item in (f"--{name}", value)]
    (row,) = run(
        capsys, "train", *sizes, "--l0", 12, "--batch", 2, "--length", 256, "--repeats", 1, "--device", "cpu",
        "--dtype", "float32", "--no-compile", "--output", tmp_path,
    )  # fmt: skip
    assert row["speedup"] > 0
    assert row["eager_tokens_per_s"] == pytest.approx(512e3 / row["eager_ms"], rel=1e-2)
    assert 1 < row["loss"] < 7, "neither certain nor clueless"
    assert row["loss_sparse"] == pytest.approx(row["loss_eager"], rel=1e-5)
    assert row["gradient_errors"]["sparse"].keys() >= {"gate_proj", "up_proj", "down_proj", "q_proj", "embed_tokens"}
    assert row["sparse_layers_on_kernels"] == (2 if ops.resolve("auto", "cpu") == "cpu" else 0)
    assert row["layer_l0"] == pytest.approx([12.0] * 2, rel=0.1)
    assert row["absent"] == {"liger": "its kernels need a GPU"}
    assert json.loads((tmp_path / "bench.jsonl").read_text()) == row
    assert (tmp_path / "train.png").stat().st_size > 1000


def test_bench_train_compiles_dense_and_sparse():
    sizes = {"hidden": 64, "intermediate": 256, "layers": 1, "vocabulary": 2048}
    row = benchmark_train.bench_train(l0=12, batch=1, length=128, repeats=1, **sizes)
    assert row["absent"].keys() == {"liger"}
    for name in ("eager", "compiled", "sparse", "sparse_compiled"):
        assert row[f"{name}_ms"] > 0
        assert row[f"loss_{name}"] == pytest.approx(row["loss"], rel=2**-7)


def test_bench_train_goes_on_without_a_compiler(monkeypatch, capsys):
    def no_compiler(self, **options):
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr(torch.nn.Module, "compile", no_compiler)
    sizes = [item for name, value in TINY.items() for item in (f"--{name}", value)]
    (row,) = run(capsys, "train", *sizes, "--l0", 12, "--batch", 1, "--length", 64, "--repeats", 1, "--device", "cpu")
    assert row["absent"]["sparse_compiled"] == "RuntimeError: no compiler here"
    assert "sparse_ms" in row
    assert "compiled_ms" not in row


def test_wrong_training_is_refused():
    errors = {"eager": {"up_proj": 0.01}, "sparse": {"up_proj": 0.019}, "liger": {"up_proj": 0.1}}
    losses = dict.fromkeys(errors, 3.01)
    benchmark_check.check_training(losses, errors, 3.0, torch.bfloat16)
    with pytest.raises(ValueError, match="gradients of up_proj in sparse are off"):
        benchmark_check.check_training(losses, {**errors, "sparse": {"up_proj": 0.021}}, 3.0, torch.bfloat16)
    with pytest.raises(ValueError, match="the loss of liger is"):
        benchmark_check.check_training({**losses, "liger": 3.1}, errors, 3.0, torch.bfloat16)


@pytest.mark.parametrize(
    ("mode", "option"),
    [
        *(("ffn", "--tokens"), ("ffn", "--repeats"), ("ffn", "--hidden"), ("prefill", "--length")),
        *(("generate", "--layers"), ("generate", "--batch"), ("generate", "--repeats")),
    ],
)
@pytest.mark.parametrize("value", ["0", "-3", "2.5"])
def test_sizes_that_are_none(capsys, mode, option, value):
    with pytest.raises(SystemExit):
        main(["bench", mode, f"{option}={value}"])
    assert f"argument {option}: {value}: give a whole number, 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("ffn --intermediate 128 --l0 5 129", "--l0 129 of 128 neurons; give more than 0 and at most 128"),
        ("ffn --l0 0", "--l0 0 of 5,632 neurons"),
        ("ffn --shape qwen2.5-7b --l0 6000", "--l0 6000 of 5,632 neurons"),
        ("ffn --hidden 1", "--hidden 1; give at least 2"),
        ("prefill --hidden 63", "--hidden 63 with attention heads: 1; give a multiple of 2"),
        ("train --hidden 64 --heads 3", "--hidden 64 with attention heads: 3; give a multiple of 6"),
        ("generate --hidden 64 --heads 4 --kv-heads 3", "--kv-heads 3 with attention heads: 4; give a divisor of 4"),
    ],
)
def test_sizes_that_make_no_benchmark_are_refused(capsys, arguments, reason):
    assert main(["bench", *arguments.split(), "--device", "cpu"]) == 1
    message = capsys.readouterr().err
    assert reason in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        *("generate --tokens 4", "generate --length 8", "ffn --batch 4", "ffn --layers 2", "train --new-tokens 4"),
        *("prefill --backward", "train --steps-only", "generate --shape llama-70b"),
    ],
)
def test_options_of_another_mode_are_refused(capsys, arguments):
    mode, option, *_ = arguments.split()
    with pytest.raises(SystemExit):
        main(["bench", *arguments.split()])
    message = capsys.readouterr().err
    assert f"hf-twell bench {mode}: error: unrecognized arguments: {option}" in message
    assert f"usage: hf-twell bench {mode}" in message


def test_bench_ffn_of_an_odd_hidden_size(capsys):
    arguments = (
        "bench ffn --hidden 63 --intermediate 128 --l0 5 --tokens 1 --no-compile --repeats 1 --json --device cpu"
    )
    assert main(arguments.split()) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["hidden"] == 63


def test_energy_on_a_cpu_is_refused(capsys):
    with pytest.raises(ValueError, match="NVIDIA GPU"):
        timing.millijoules(lambda turn: None, torch.device("cpu"))
    with pytest.raises(ValueError, match="Leave --energy out"):
        run(capsys, "ffn", "--device", "cpu", "--energy")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_bench_on_a_gpu(tmp_path, capsys):
    sizes = ("--hidden", 256, "--intermediate", 1024, "--l0", 12, "--repeats", 2, "--device", "cuda")
    rows = run(capsys, "ffn", "--tokens", 1, 64, 300, *sizes, "--output", tmp_path)
    assert [row["timed"] for row in rows] == ["captured graph of 28 blocks"] * 2 + ["single calls"]
    assert all(row["sparse_peak_mib"] > 0 and row["eager_ms"] > 0 for row in rows)
    more = ("--layers", 2, "--vocabulary", 4096)
    (row,) = run(capsys, "prefill", *sizes, *more, "--batch", 2, "--length", 512)
    assert row["sparse_compiled_ms"] > 0
    (row,) = run(capsys, "train", *sizes, *more, "--batch", 2, "--length", 512)
    assert row["sparse_compiled_ms"] > 0
    assert row["sparse_peak_mib"] > row["resident_mib"] > 0
    (row,) = run(capsys, "ffn", "--backward", "--tokens", 1024, *sizes)
    for name in ("eager", "compiled", "sparse"):
        assert row[f"{name}_peak_mib"] > row[f"{name}_held_mib"] >= 0
    (row,) = run(capsys, "generate", *sizes, *more, "--batch", 2, "--new-tokens", 16)
    assert row["compiled"]
    assert row["sparse_step_ms"] > 0


def test_a_block_of_any_hidden_size():
    x, *weights = make_ffn(4, 288, 768, l0=30, dtype=torch.float32)  # 288 / 32 heads would be an odd size
    torch.testing.assert_close(patched_block(*weights)(x), reference.ffn(x, weights[1], weights[2], weights[0]))
