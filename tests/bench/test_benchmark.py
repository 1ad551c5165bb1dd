"""The benchmark's inputs are like real ones, its rows are whole, and it refuses what is wrong before it times it."""

import argparse
import json
import sys
from types import SimpleNamespace

import matplotlib.pyplot
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_twell
from hf_twell.bench import (
    block,
    block_backward,
    check,
    generate,
    models,
    sharing,
    timing,
    train,
    workload,
    workload_llama,
)
from hf_twell.bench.plot import plot
from hf_twell.bench.progress import silent
from hf_twell.bench.wanted import Wanted
from hf_twell.bench.workload import make_ffn, patched_block
from hf_twell.blocks.batches import runs_of
from hf_twell.blocks.modeling import SparseFfn
from hf_twell.cli import bench, main
from hf_twell.cli.bench_table import CELLS
from hf_twell.files.folders import save_model
from hf_twell.ops import api, reference
from tests.conftest import finished
from tests.convert.test_own_type import dense
from tests.paths import DEMO, HELDOUT, ROOT

TINY = {"hidden": 128, "intermediate": 512, "layers": 2, "vocabulary": 2048}
TINY_SIZES = [str(item) for name, value in TINY.items() for item in (f"--{name}", value)]


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


@pytest.fixture(scope="module")
def llama():
    return models.RandomLlama(12.0, **{**TINY, "layers": 6}, dtype="float32")


def test_random_llama_is_calibrated_layer_by_layer(llama):
    text = workload_llama.make_text(2048, 4, 1024, seed=5)
    layers = workload_llama.layer_statistics(llama.model, text)
    assert len(layers) == 6
    workload_llama.check_layers(layers, 12.0, llama.distinct)


def test_random_llama_recites_the_workload(llama):
    text = workload_llama.make_text(2048, 3, 20, seed=5, starts_of_sequences=False)
    assert torch.equal(llama.model.generate(text[:, :8], max_new_tokens=12, do_sample=False), text)


def test_layers_unlike_the_workload_are_refused(llama):
    model, distinct = llama.model, llama.distinct
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
    llama.l0 = 14.0
    with pytest.raises(ValueError, match="where the workload has 14;"):
        llama.describe(text)
    with pytest.raises(ValueError, match="active neurons where 30 were asked for; decode more tokens"):
        workload_llama.typical_texts(model, 2, 40, 30.0)


@pytest.mark.parametrize("extra", [[], ["--backward"], ["--dtype", "float32"]])
def test_bench_ffn_writes_rows_and_a_plot(tmp_path, capsys, extra):
    sizes = ("--tokens", 1, 20, "--l0", 8, "--hidden", 64, "--intermediate", 344, "--repeats", 2, "--device", "cpu")
    rows = run(capsys, "ffn", *sizes, "--no-compile", "--output", tmp_path, *extra)
    revision = finished("git", "rev-parse", "--short", "HEAD", cwd=ROOT)
    assert [row["tokens"] for row in rows] == [1, 20]
    for row in rows:
        # It has three decimals, of which a turn that a busy machine held up leaves two zero.
        assert row["speedup"] == pytest.approx(row["eager_ms"] / row["sparse_ms"], rel=0.01, abs=6e-4)
        assert row["error"] <= max(2 * row["error_eager"], 2**-7)
        assert row["l0"] == pytest.approx(8, abs=0.3), "of few tokens, those nearest to it"
        assert row["density"] == pytest.approx(row["l0"] / 344, abs=1e-4)
        assert row["l0"] <= row["distinct_64"] <= 344
        assert list(row["unions"]) == (["16"] if row["tokens"] == 20 else [])
        assert (row["neighbours"], row["requested_union"]) == (True, None)
        wanted = {"processor", "threads", "torch", "commit", "eager_ms", "sparse_ms", "backend", "device", "dtype"}
        assert wanted <= row.keys()
        assert row["took"] in ("kernels", "plain matmuls")
        assert row["commit"] in (None, revision.stdout.strip())
        if "--backward" in extra:
            assert list(row["errors"]) == list(block_backward.TENSORS)
            assert row["took"] == ("kernels" if row["backend"] == "cpu" else "plain matmuls")
        else:
            assert row["down_stored_by"] == "columns"
    assert [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()] == rows
    assert (tmp_path / "bench.png").stat().st_size > 1000


@pytest.mark.slow
def test_rows_without_kernels_say_so(tmp_path):
    command = [sys.executable, "-m", "hf_twell", "bench", "ffn", "--device", "cpu", "--no-compile", "--json"]
    sizes = ["--tokens", "1", "--l0", "8", "--hidden", "64", "--intermediate", "344", "--repeats", "1"]
    (tmp_path / "file").touch()
    cache = {"HF_TWELL_CACHE": str(tmp_path / "file" / "cache")}  # which cannot be made
    done = finished(*command, *sizes, env=cache, timeout=120)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["backend"], row["took"]) == ("reference", "plain matmuls")
    assert "set HF_TWELL_CACHE to one that can" in done.stderr


def test_shapes_of_models_keep_the_density(capsys):
    options = ("--tokens", 2, "--repeats", 1, "--no-compile", "--device", "cpu")
    rows = run(capsys, "ffn", "--shape", "smollm2-135m", *options)
    assert (rows[0]["hidden"], rows[0]["intermediate"]) == (576, 1536)
    assert rows[0]["requested_l0"] == pytest.approx(30 * 1536 / 5632, abs=1e-3)
    head, (cells,) = CELLS["ffn"](rows)
    assert dict(zip(head, cells, strict=True))["L0 asked"] == "30 of 5,632 = 8.18"


@pytest.mark.parametrize("backward", [False, True])
def test_weights_take_turns_and_gradients_begin_at_none(monkeypatch, backward):
    """So that no cache holds the next call's weights; what has a gradient already would be added to."""
    x, *weights = workload.make_ffn(8, 64, 344, 8)
    size = sum(weight.nbytes for weight in weights)
    copies = block.copies(weights, 1)
    assert (copies - 1) * size >= block.COLD_BYTES, "between two calls with the same weights"
    monkeypatch.setattr(block, "COLD_BYTES", 2 * size)
    seen = {"eager": [], "sparse": []}

    def eager(x, w_gate, w_up, w_down, **term):
        seen["eager"].append((w_up.data_ptr(), x.grad is w_up.grad is w_down.grad is None))
        return block_backward.dense(x, w_gate, w_up, w_down, **term)

    def sparse(x, w_up, w_down, *rest, **options):
        seen["sparse"].append((w_up.data_ptr(), x.grad is w_up.grad is w_down.grad is None))
        return ffn(x, w_up, w_down, *rest, **options)

    def sparse_block(self, x):
        seen["sparse"].append((self.up_proj.weight.data_ptr(), x.grad is None))
        return call(self, x)

    ffn, call = api.ffn, SparseFfn.__call__
    if backward:
        monkeypatch.setattr(api, "ffn", sparse)
        block_backward.measure_backward({"eager": eager}, x, weights, block.copies(weights, 1), 4, False, 64, silent)
    else:  # a block's later calls need not come to api.ffn
        monkeypatch.setattr(SparseFfn, "__call__", sparse_block)
        active = workload.active_neurons(x, weights[0])
        block._measure({"eager": eager}, [x], weights, active, False, 4, False, silent)
    for name, calls in seen.items():
        places, fresh = zip(*calls[-6:], strict=True)  # two turns of warming up and four that are timed
        assert len(set(places)) == 3, name
        assert places[:3] == places[3:], name
        assert all(fresh), name


@pytest.mark.parametrize("backward", [False, True])
def test_a_wrong_block_is_not_timed(monkeypatch, backward):
    def wrong(x, w_up, w_down, w_gate, **options):
        y = reference.ffn(x, w_up, w_down, w_gate)
        return y + 0.02 * y.detach().roll(1, 0) if not backward else reference.ffn(1.02 * x, w_up, w_down, w_gate)

    monkeypatch.setattr(api, "ffn", wrong)
    rows = block.bench_ffn([64], [Wanted(8 / 344)], hidden=64, intermediate=344, compile_dense=False, backward=backward)
    with pytest.raises(ValueError, match="no speed"):
        next(rows)


def test_a_row_names_the_sparse_blocks_own_error(monkeypatch):
    def better(x, w_up, w_down, w_gate, **options):
        return reference.ffn(*(tensor.double() for tensor in (x, w_up, w_down, w_gate))).to(x.dtype)

    monkeypatch.setattr(api, "ffn", better)
    (row,) = block.bench_ffn([64], [Wanted(8 / 344)], hidden=64, intermediate=344, compile_dense=False, repeats=1)
    assert 0 < row["error"] < 0.8 * row["error_eager"]


@pytest.mark.parametrize(
    ("term", "forgotten"),
    [({"term": "l1"}, "l1_scale"), ({"term": "count"}, "count_scale"), ({"term": "count", "share": 16}, "runs")],
)
def test_a_block_without_its_term_is_not_timed(monkeypatch, term, forgotten):
    def forgetful(*args, capacity, backend, key, way, **options):
        del options[forgotten]
        return reference.ffn(*args, **options)

    monkeypatch.setattr(api, "ffn", forgetful)
    sizes = {"hidden": 64, "intermediate": 344, "compile_dense": False}
    rows = block.bench_ffn([64], [Wanted(8 / 344)], **sizes, backward=True, **term)
    with pytest.raises(ValueError, match="gradient of x of the sparse block is off"):
        next(rows)


@pytest.mark.parametrize("share", [None, 16, 70])
def test_bench_ffn_trains_with_the_count_term(capsys, monkeypatch, share):
    """Runs of which the last may be shorter."""
    monkeypatch.setattr(block, "COLD_BYTES", 0)  # what is timed here says nothing
    sizes = ("--tokens", 70, "--l0", 8, "--hidden", 64, "--intermediate", 344, "--repeats", 1, "--device", "cpu")
    options = ("--backward", "--term", "count", *(() if share is None else ("--share", share)))
    (row,) = run(capsys, "ffn", *sizes, "--no-compile", *options)
    assert (row["pass"], row["term"], row.get("share")) == ("forward+backward", "count", share)
    assert row["count_scale"] == block_backward.COUNT_SCALE
    assert "l1_scale" not in row
    assert list(row["errors"]) == list(block_backward.TENSORS)
    for error in row["errors"].values():
        assert 0 < error["sparse"] <= 2 * error["eager"]
    assert row["took"] == ("kernels" if row["backend"] == "cpu" else "plain matmuls")


@pytest.mark.slow
@pytest.mark.parametrize(("term", "share"), [("l1_scale", None), ("count_scale", None), ("count_scale", 16)])
def test_compiled_dense_training_has_the_term(term, share):
    x, *weights = (t.requires_grad_() for t in workload.make_ffn(64, 64, 344, 8, dtype=torch.float32))
    function = block_backward.dense
    of_runs = {} if share is None else {"runs": runs_of({"inputs_embeds": x.unsqueeze(0)}, share)}

    def gradients(function, scale):
        y = function(x, *weights, **{term: torch.tensor(scale)}, **of_runs)
        return torch.autograd.grad(y, (x, *weights), torch.ones_like(y))

    compiled = gradients(torch.compile(function, dynamic=False, fullgraph=True), 0.125)
    for value, wanted in zip(compiled, gradients(function, 0.125), strict=True):
        torch.testing.assert_close(value, wanted)
    assert check.relative_error(gradients(function, 0.0)[0], compiled[0]) > 0.1


def test_what_is_all_zero_must_come_out_zero():
    zero = torch.zeros(3)
    assert check.relative_error(zero, zero) == 0
    assert check.relative_error(torch.tensor([0.0, 1e-9, 0.0]), zero) == float("inf")
    assert not check.relative_error(torch.full((3,), float("nan")), zero) <= 1


def test_rows_have_the_union_that_was_asked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(block, "COLD_BYTES", 0)  # what is timed here says nothing
    sizes = ("--hidden", 64, "--intermediate", 344, "--repeats", 1, "--device", "cpu", "--no-compile")
    given = ("--tokens", 128, 1024, "--l0", 33, 20, "--union", 0.4, 0.25)
    rows = run(capsys, "ffn", *sizes, *given, "--output", tmp_path)
    assert [(row["tokens"], row["requested_l0"], row["requested_union"]) for row in rows] == [
        *((128, 33, 0.4), (128, 20, 0.25)),
        *((1024, 33, 0.4), (1024, 20, 0.25)),
    ]
    for row in rows:
        assert row["density"] == pytest.approx(row["requested_l0"] / 344, abs=0.005)
        near = 0.015 if row["tokens"] == 1024 else 0.05  # two runs of 64
        assert row["unions"]["64"] == pytest.approx(row["requested_union"], abs=near)
        assert row["density"] < row["unions"]["16"] < row["unions"]["64"] < row["unions"]["128"]
        assert row["distinct_64"] == pytest.approx(344 * row["unions"]["64"], abs=0.1)
    head, cells = CELLS["ffn"](rows)
    shown = dict(zip(head, cells[0], strict=True))["union of 16 / 64 / 128 tokens"]
    assert shown == " / ".join(f"{100 * share:.1f}" for share in rows[0]["unions"].values()) + " %"


def test_inputs_of_several_blocks_are_strangers_or_runs():
    x, w_gate, _, _ = workload.make_ffn(16384, 32, 128, 8, dtype=torch.float32)
    place = {tuple(row): index for index, row in enumerate(x[:, 2:6].tolist())}
    for count, neighbours in ((16, False), (16, True), (256, True)):
        xs, active = block.draw(x, w_gate, count, 8, 28, not neighbours)
        assert [some.shape for some in xs] == [(count, 32)] * 28
        assert active.sum(1).float().mean().item() == pytest.approx(8, rel=0.1)
        places = torch.tensor([[place[tuple(row)] for row in some[:, 2:6].tolist()] for some in xs])
        assert bool((places.diff() == 1).all()) == neighbours


def test_sixteen_tokens_of_one_sequence_have_the_union_of_their_kind():
    """As drafted tokens that are verified; of as many sequences they share little."""
    x, w_gate, _, _ = workload.make_ffn(16384, 32, 512, 30, unions={"64": 0.25}, dtype=torch.float32)
    mean = sharing.unions_of(workload.active_neurons(x, w_gate))["16"]
    for sets in (1, 28):
        _, active = block.draw(x, w_gate, 16, 30, sets, False)
        assert block.activity(active, 16, False)["unions"] == {"16": pytest.approx(mean, rel=0.05)}
    _, active = block.draw(x, w_gate, 16, 30, 28, True)
    assert block.activity(active, 16, True)["unions"]["16"] > 1.5 * mean


@pytest.mark.slow
def test_bench_prefill_writes_rows_and_a_plot(tmp_path, capsys):
    rows = run(
        capsys, "prefill", *TINY_SIZES, "--l0", 12, "--batch", 2, "--length", 512, "--repeats", 1, "--device", "cpu",
        "--dtype", "float32", "--output", tmp_path,
    )  # fmt: skip
    (row,) = rows
    ours, theirs = min(row["sparse_ms"], row["sparse_compiled_ms"]), min(row["eager_ms"], row["compiled_ms"])
    assert row["speedup"] == pytest.approx(theirs / ours, abs=0.01)
    assert row["logits_difference"] < 1e-5
    if row["backend"] == "cpu":  # whose sums are in another order
        assert row["error_sparse"] != row["error_eager"]
        assert row["error_sparse_compiled"] != row["error_compiled"]
    assert row["layer_l0"] == pytest.approx([12.0] * 2, rel=0.1)
    assert {"eager_ms", "compiled_ms", "sparse_ms", "sparse_compiled_ms", "heads", "vocabulary"} <= row.keys()
    assert json.loads((tmp_path / "bench.jsonl").read_text()) == row
    assert (tmp_path / "prefill.png").stat().st_size > 1000


def test_bench_generate_gives_the_same_tokens_in_fp32():
    subject = models.RandomLlama(12, dtype="float32", **TINY)
    row = generate.bench_generate(subject, batch=2, new_tokens=16, how=models.How(repeats=1))
    assert row["same_tokens"]
    assert row["recited"] == 1
    assert row["logits_difference"] < 1e-5
    assert row["decoded_l0"] == pytest.approx(12, rel=0.1)
    assert row["error_dense_step"] < 1e-5, "the step feeds the right tokens at the right positions"
    assert row["step_speedup"] == pytest.approx(row["dense_step_ms"] / row["sparse_step_ms"], rel=0.01)
    assert row["speedup"] == pytest.approx(row["sparse_tokens_per_s"] / row["dense_tokens_per_s"], rel=0.01)
    if row["backend"] == "cpu":  # whose sums are in another order
        assert row["error_sparse"] != row["error_eager"]
        assert row["error_sparse_step"] != row["error_dense_step"]


def test_bench_generate_of_steps_alone_draws_its_figure(tmp_path, capsys):
    (row,) = run(
        capsys, "generate", *TINY_SIZES, "--l0", 12, "--new-tokens", 32, "--repeats", 1, "--device", "cpu",
        "--dtype", "float32", "--steps-only", "--output", tmp_path, "--heads", 4, "--kv-heads", 2,
    )  # fmt: skip
    assert (row["heads"], row["kv_heads"], row["new_tokens"], row["batch"]) == (4, 2, 32, 1)
    assert "speedup" not in row
    assert (tmp_path / "generate.png").stat().st_size > 1000


@pytest.fixture
def own(tmp_path) -> list[str]:
    """A sparse checkpoint on disk, and a text for it."""
    model = hf_twell.sparsify(AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype="float32"))
    save_model(model, tmp_path / "own", AutoTokenizer.from_pretrained(DEMO / "model"))
    return [str(tmp_path / "own"), "--text", str(HELDOUT), "--repeats", "1", "--device", "cpu"]


def test_bench_generate_of_ones_own_model(own, capsys):
    (row,) = run(capsys, "generate", *own, "--new-tokens", 8)
    assert (row["model"], row["layers"], row["batch"], row["new_tokens"]) == (own[0], 4, 1, 8)
    assert row["dtype"] == "float32", "as stored"
    assert row["same_tokens"]
    assert row["error_dense_step"] < 1e-5
    assert row["density"] == pytest.approx(row["l0"] / row["intermediate"], rel=0.01)
    assert row["density"] < row["unions"]["16"], "of the text, in runs that it is long enough for"
    assert row["speedup"] == pytest.approx(row["sparse_tokens_per_s"] / row["dense_tokens_per_s"], rel=0.01)
    assert 0 <= row["sparse_layers_on_kernels"] <= 4
    head, (cells,) = CELLS["generate"]([row])
    assert dict(zip(head, cells, strict=True))["density"] == f"{100 * row['density']:.2f} %"


def test_bench_generate_of_a_model_with_linear_attention(tmp_path, capsys):
    """Whose cache is a state, which each turn begins anew; a step rounds otherwise than many tokens at a time do."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    save_model(hf_twell.sparsify(dense(vocab_size=len(tokenizer))), tmp_path / "own", tokenizer)
    text = str(HELDOUT)
    options = ["--text", text, "--repeats", "2", "--device", "cpu", "--new-tokens", "8", "--steps-only"]
    (row,) = run(capsys, "generate", str(tmp_path / "own"), *options)
    assert max(row["error_dense_step"], row["error_sparse_step"]) < 1e-4


def test_bench_prefill_of_ones_own_model(own, tmp_path, capsys):
    rows = run(
        capsys, "prefill", *own, "--length", 32, "--batch", 1, 2, "--no-compile", "--output", tmp_path,
        "--dtype", "bfloat16",
    )  # fmt: skip
    assert [row["batch"] for row in rows] == [1, 2]
    assert {row["dtype"] for row in rows} == {"bfloat16"}
    assert all(row["speedup"] == pytest.approx(row["eager_ms"] / row["sparse_ms"], rel=0.01) for row in rows)
    assert (tmp_path / "prefill.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["prefill", "{own}"], "needs --text FILE"),
        (["prefill", "{own}", "--text", "{text}", "--l0", "3"], "--l0 is for random models; leave it out for "),
        (["generate", "--text", "{text}"], "--text goes with a MODEL"),
        (["generate", "{dense}", "--text", "{text}"], "is not sparse (activation: silu); convert it with hf-twell"),
        (["prefill", "{own}", "--text", "{text}", "--batch", "90"], "90 sequences of 512 take 46,080; give more"),
    ],
)
def test_own_models_that_cannot_be_measured_are_refused(own, arguments, says, error_line):
    names = {"own": own[0], "text": own[2], "dense": str(DEMO / "model")}
    assert says in error_line("bench", *(argument.format(**names) for argument in arguments), "--device", "cpu")


def test_the_bar_says_what_is_being_done(capsys):
    arguments = ["--l0", "12", "--new-tokens", "32", "--repeats", "1", "--device", "cpu", "--dtype", "float32"]
    assert main(["bench", "generate", *TINY_SIZES, *arguments]) == 0
    shown = capsys.readouterr().err
    phases = ["making the model", "calibrating", "choosing texts", "checking", "timing dense_step, turn 1 of 2"]
    places = [shown.index(phase) for phase in [*phases, "timing generate, eager, turn 1 of 1"]]
    assert places == sorted(places)


@pytest.fixture
def wait(monkeypatch):
    """Lets seconds pass on the clock that times are taken from; none pass otherwise."""
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def wait(seconds):
        now[0] += seconds

    return wait


def test_times_are_medians_of_calls_alone(wait):
    """After two turns of warming up, without what prepares a call or reports it."""
    told = []

    def report(*phase):
        told.append(phase)
        wait(7)

    seconds = {"one": [9, 9, 0.001, 0.002, 0.03], "other": [0, 0, 0.004, 0.004, 0.005]}
    calls = {name: lambda turn, name=name: wait(seconds[name][turn]) for name in seconds}
    times = timing.interleaved_ms(calls, 3, torch.device("cpu"), lambda name, turn: wait(5), report=report)
    assert times == pytest.approx({"one": 2, "other": 4})
    assert told[:2] == [("timing", "one, turn 1 of 5"), ("timing", "other, turn 1 of 5")]
    assert len(told) == 10


def test_a_steps_time_is_the_mean_over_its_positions(wait):
    seconds = iter([0.001, 0.002, 0.006])
    positions = (wait(5) for _ in range(3))
    assert timing.mean_ms(lambda: wait(next(seconds)), positions, torch.device("cpu")) == pytest.approx(3)


def test_generations_speed_is_all_sequences_tokens(monkeypatch, wait):
    """Stand-ins for models, of 2 and 4 seconds; of three turns one is disturbed."""
    monkeypatch.setattr(generate, "time", timing.time)
    text = torch.arange(60).view(3, 20)  # three sequences of 16 + 4 tokens

    class Model:
        def __init__(self, seconds):
            self.seconds = iter(seconds)

        def generate(self, prompt, *, max_new_tokens, **_):
            wait(next(self.seconds))
            return text[:, : prompt.shape[1] + max_new_tokens]

    models = {"eager": Model([4, 100, 4]), "sparse": Model([2, 2, 100])}
    speed, tokens = generate._generate(models, text, False, 3, silent)
    assert speed == {"eager": 12 / 4, "sparse": 12 / 2}
    assert torch.equal(tokens["sparse"], text)


def test_errors_of_more_than_twice_eagers_are_refused():
    truth = {"y": torch.ones(4, 4, dtype=torch.float64)}

    def error(eager, sparse, pairs, dtype=torch.bfloat16):
        outputs = {name: {"y": (1 + share) * truth["y"]} for name, share in (("eager", eager), ("sparse", sparse))}
        return check.check_block(outputs, truth, dtype, 4, pairs)["y"]["sparse"]

    assert error(0.01, 0.0199, 64) == pytest.approx(0.0199)
    assert error(0.0, 0.007, 63) == pytest.approx(0.007), "a few elements' luck"
    for wrong in (
        *((0.01, 0.0201, pairs) for pairs in (63, 64)),
        *((0.0, 0.007, 64), (0.0, 0.008, 63), (0.0, 1e-9, 63, torch.float32)),
        *((0.01, float("nan"), 64), (float("nan"), 0.01, 64)),
    ):
        with pytest.raises(ValueError, match="y of the sparse block is off"):
            error(*wrong)


def test_logits_of_a_wrong_model_are_refused():
    truth = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    right = torch.cat([truth, truth + 1])  # higher precision knows the first sequences alone
    outputs = {"eager": 1.001 * right, "sparse": 1.0019 * right, "sparse_compiled": 1.001 * right}
    errors = check.check_logits(outputs, truth)
    assert errors["error_sparse"] == pytest.approx(0.0019, rel=0.01)
    assert errors["logits_difference"] == pytest.approx(0.0009, rel=0.01)
    late, nowhere = right.clone(), right.clone()
    late[3] *= 1.01
    nowhere[3, 0] = float("nan")
    for name in ("sparse", "sparse_compiled"):
        for wrong in (1.0021 * right, late, nowhere, float("nan") * right):
            with pytest.raises(ValueError, match=f"logits of {name} are off"):
                check.check_logits({**outputs, name: wrong}, truth)


def test_bench_train_writes_rows_and_a_plot(tmp_path, capsys, monkeypatch):
    scales, ffn = [], api.ffn

    def recording(*args, l1_scale=None, **options):
        scales.append(None if l1_scale is None else float(l1_scale))
        return ffn(*args, l1_scale=l1_scale, **options)

    monkeypatch.setattr(api, "ffn", recording)
    (row,) = run(
        capsys, "train", *TINY_SIZES, "--l0", 12, "--batch", 2, "--length", 256, "--repeats", 1, "--device", "cpu",
        "--dtype", "float32", "--no-compile", "--output", tmp_path,
    )  # fmt: skip
    assert row["speedup"] == pytest.approx(row["eager_ms"] / row["sparse_ms"], abs=0.01)
    assert row["eager_tokens_per_s"] == pytest.approx(512e3 / row["eager_ms"], rel=1e-2)
    assert 1 < row["loss"] < 7, "neither certain nor clueless"
    assert row["loss_sparse"] == pytest.approx(row["loss_eager"], rel=1e-5)
    assert row["gradient_errors"]["sparse"].keys() >= {"gate_proj", "up_proj", "down_proj", "q_proj", "embed_tokens"}
    timed = [scale for scale in scales if scale is not None][-2 * 2 * 3 :]  # 2 layers, each timed after an untimed step
    assert row["l1_weight"] > 0
    assert min(timed) > 0, "the L1 term is in what is timed"
    assert row["sparse_layers_on_kernels"] == (2 if api.resolve("auto", "cpu") == "cpu" else 0)
    assert row["layer_l0"] == pytest.approx([12.0] * 2, rel=0.1)
    assert row["absent"] == {"liger": "its kernels need a GPU"}
    assert json.loads((tmp_path / "bench.jsonl").read_text()) == row
    assert (tmp_path / "train.png").stat().st_size > 1000


@pytest.mark.slow
def test_bench_train_compiles_dense_and_sparse():
    sizes = {"hidden": 64, "intermediate": 256, "layers": 1, "vocabulary": 2048}
    row = train.bench_train(models.RandomLlama(12, **sizes), batch=1, length=128, how=models.How(repeats=1))
    assert row["absent"].keys() == {"liger"}
    for name in ("eager", "compiled", "sparse", "sparse_compiled"):
        assert row[f"{name}_ms"] > 0
        assert row[f"loss_{name}"] == pytest.approx(row["loss"], rel=2**-7)


def test_bench_train_goes_on_without_a_compiler(monkeypatch, capsys):
    def no_compiler(self, **options):
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr(torch.nn.Module, "compile", no_compiler)
    (row,) = run(
        capsys, "train", *TINY_SIZES, "--l0", 12, "--batch", 1, "--length", 64, "--repeats", 1, "--device", "cpu"
    )
    assert row["absent"]["sparse_compiled"] == "RuntimeError: no compiler here"
    assert "sparse_ms" in row
    assert "compiled_ms" not in row


def test_wrong_training_is_refused():
    errors = {"eager": {"up_proj": 0.01}, "liger": {"up_proj": 0.1}}
    errors |= {name: {"up_proj": 0.019} for name in ("sparse", "sparse_compiled")}
    losses = dict.fromkeys(errors, 3.01)
    check.check_training(losses, errors, 3.0, torch.bfloat16)
    for name in ("sparse", "sparse_compiled"):
        for wrong in (0.021, float("nan")):
            with pytest.raises(ValueError, match=f"gradients of up_proj in {name} are off"):
                check.check_training(losses, {**errors, name: {"up_proj": wrong}}, 3.0, torch.bfloat16)
    for wrong in (3.1, float("nan")):
        with pytest.raises(ValueError, match="the loss of liger is"):
            check.check_training({**losses, "liger": wrong}, errors, 3.0, torch.bfloat16)


def test_a_wrong_step_of_training_is_not_timed(monkeypatch):
    def wrong(x, w_up, w_down, w_gate, *, capacity=None, backend="auto", key=None, way=None, **options):
        y = reference.ffn(x, w_up, w_down, w_gate, **options)
        return y + 0.01 * (y - y.detach())  # in its gradients alone

    monkeypatch.setattr(api, "ffn", wrong)
    subject = models.RandomLlama(12, dtype="float32", **TINY)
    with pytest.raises(ValueError, match=r"gradients of .* in sparse are off"):
        train.bench_train(subject, batch=2, length=128, how=models.How(repeats=1, compile=False))


@pytest.mark.parametrize(("mode", "option"), [("ffn", "--tokens"), ("prefill", "--length"), ("generate", "--batch")])
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
        ("ffn --l0 563.2 --union 0.05", "--union 0.05 where --l0 563.2 of 5,632 neurons are active for a token; give"),
        ("ffn --l0 5 9 30 --union 0.2 0.4", "--union has 2 shares for 3 of --l0; give one, or one for each"),
        ("ffn --layer 3", "--layer is of a measured model; name it with --activity"),
        ("ffn --activity figures.json --l0 50", "--activity gives density and unions; leave --l0 and --union out"),
        ("ffn --shape qwen2.5-7b --l0 6000", "--l0 6000 of 5,632 neurons"),
        ("ffn --term count", "--term count is of training; give --backward, too"),
        ("ffn --backward --share 64", "--share 64 goes with --term count alone; give that, too"),
        ("ffn --backward --term count --share 64 --tokens 128 63", "--share 64 of --tokens 63; give 2 or more, and at"),
        ("ffn --backward --term count --share 64", "--share 64 of --tokens 1; give 2 or more, and at least as many"),
        ("ffn --backward --term count --share 1 --tokens 8", "--share 1 of --tokens 8; give 2 or more"),
        ("ffn --experts 4 --share 64", "--experts measures plain weights forward alone; leave --share out"),
        ("ffn --experts 4 --term count", "--experts measures plain weights forward alone; leave --term out"),
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


@pytest.mark.parametrize("arguments", ["generate --length 8", "ffn --layers 2", "train --steps-only"])
def test_options_of_another_mode_are_refused(capsys, arguments):
    mode, option, *_ = arguments.split()
    with pytest.raises(SystemExit):
        main(["bench", *arguments.split()])
    message = capsys.readouterr().err
    assert f"hf-twell bench {mode}: error: unrecognized arguments: {option}" in message
    assert f"usage: hf-twell bench {mode}" in message


def test_tables_show_each_figure_below_its_name():
    row = {"hidden": 64, "intermediate": 344, "tokens": 16, "l0": 8.5, "density": 0.0247, "error": 0.003}
    row |= {"unions": {"16": 0.1234}, "speedup": 2.5}
    row |= {"error_eager": 0.004, "eager_ms": 5.0, "sparse_ms": 2.0, "took": "kernels", "sparse_mj_per_token": 7.0}
    shown = {"D x F": "64 x 344", "tokens": 16, "L0": 8.5, "density": "2.47 %"}
    shown |= {"union of 16 / 64 / 128 tokens": "12.3 / n/a / n/a %", "error / eager's": "0.003 / 0.004"}
    shown |= {"eager ms": 5.0, "sparse ms": 2.0, "took": "kernels", "sparse mj per token": 7.0, "speed-up": "2.50x"}
    head, (cells,) = CELLS["ffn"]([row])
    assert dict(zip(head, cells, strict=True)) == shown
    row = {"layers": 2, "batch": 4, "layer_l0": [12.0, 11.0], "layer_distinct_64": [90.0, 80.0], "eager_ms": 5.0}
    row |= {"workload_distinct_64": 85.0, "sparse_ms": 2.0, "speedup": 2.5, "sparse_tokens_per_s": 3.0}
    head, cells = CELLS["train"]([{**row, "compiled_ms": 4.0}, row])
    shared = {"layers": 2, "batch": 4, "L0 of layers": "11 to 12", "distinct in 64 (workload)": "80 to 90 (85)"}
    shared |= {"eager ms": 5.0, "sparse ms": 2.0, "speedup": 2.5, "sparse tokens per s": 3.0}
    assert [dict(zip(head, line, strict=True)) for line in cells] == [
        {**shared, "compiled ms": 4.0},
        {**shared, "compiled ms": ""},
    ]


def test_the_figure_has_a_line_for_each_setting(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(matplotlib.pyplot, "close", drawn.append)
    same = {"bench": "train", "batch": 8, "length": 2048, "dtype": "bfloat16", "processor": "P"}
    rows = [
        {**same, "layers": layers, "l0": l0, "speedup": speedup, "peak_share": speedup / 4}
        for layers, l0, speedup in ((28, 30, 2.0), (8, 30, 1.5), (8, 100, 1.25), (28, 100, 1.75))
    ]
    plot(rows, tmp_path / "train.png")
    (figure,) = drawn
    for axes, share in zip(figure.axes, (1, 4), strict=True):
        lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines[:2]}
        assert lines == {
            "l0 100": [[8, 1.25 / share], [28, 1.75 / share]],
            "l0 30": [[8, 1.5 / share], [28, 2 / share]],
        }
        assert axes.get_xlabel() == "layers"
    assert [axes.get_ylabel().partition(",")[0] for axes in figure.axes] == [
        "speed-up over dense (the best of its variants)",
        "peak memory",
    ]
    assert figure.get_suptitle() == "train, batch 8, length 2048, dtype bfloat16\nP"
    monkeypatch.undo()
    matplotlib.pyplot.close(figure)


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
    assert [row["neighbours"] for row in rows] == [False, False, True]
    (row,) = run(capsys, "ffn", "--tokens", 16, "--neighbours", "--union", 0.1, *sizes)
    assert (row["neighbours"], row["timed"]) == (True, "captured graph of 28 blocks")
    assert 0.012 < row["unions"]["16"] < 0.1
    more = ("--layers", 2, "--vocabulary", 4096)
    (row,) = run(capsys, "prefill", *sizes, *more, "--batch", 2, "--length", 512)
    assert row["sparse_compiled_ms"] > 0
    (row,) = run(capsys, "train", *sizes, *more, "--batch", 2, "--length", 512)
    assert row["sparse_compiled_ms"] > 0
    assert row["sparse_peak_mib"] > row["resident_mib"] > 0
    for term in ((), ("--term", "count"), ("--term", "count", "--share", 64)):
        (row,) = run(capsys, "ffn", "--backward", "--tokens", 1024, *sizes, *term)
        for name in ("eager", "compiled", "sparse"):
            assert row[f"{name}_peak_mib"] > row[f"{name}_held_mib"] >= 0
    (row,) = run(capsys, "generate", *sizes, *more, "--batch", 2, "--new-tokens", 16)
    assert row["compiled"]
    assert row["sparse_step_ms"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_bench_of_a_dynamic_block_that_is_too_dense_for_kernels(run_json):
    """Compiled, with h in 16 bits and, as torchao's own config has it, in 8."""
    pytest.importorskip("torchao.quantization")
    sizes = ["--hidden", "512", "--intermediate", "1408", "--l0", "700", "--tokens", "1024", "--repeats", "1"]
    (row,) = run_json("bench", "ffn", "--weights", "fp8-dynamic", *sizes, "--device", "cuda")["rows"]
    assert row["took"] == "plain matmuls"
    assert min(row["sparse_compiled_ms"], row["sparse_h_compiled_ms"]) > 0


@pytest.mark.parametrize("hidden", [288, 63])  # 288 / 32 heads would be an odd size
def test_a_block_of_any_hidden_size(hidden):
    x, *weights = make_ffn(4, hidden, 768, l0=30, dtype=torch.float32)
    torch.testing.assert_close(patched_block(*weights)(x), reference.ffn(x, weights[1], weights[2], weights[0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "took", "order"),
    [("int8", "kernels", "columns"), ("fp8", "plain matmuls", "rows"), ("fp8-dynamic", "plain matmuls", "rows")],
)
def test_bench_ffn_in_eight_bits(error_line, run_json, weights, took, order):
    """Beside the plain block and torchao's own matmuls, in one row; what it cannot measure it refuses."""
    pytest.importorskip("torchao.quantization")
    command = ["bench", "ffn", "--weights", weights, "--hidden", "512", "--intermediate", "1408", "--l0", "8"]
    (row,) = run_json(*command, "--tokens", "3", "--repeats", "1", "--no-compile", "--device", "cpu")["rows"]
    assert (row["weights"], row["took"], row["down_stored_by"]) == (weights, took, order)
    for name in ("eager_ms", "torchao_ms", "sparse_plain_ms", "sparse_ms", "speedup_same_weights", "speedup_plain"):
        assert row[name] > 0
    assert row["error"] <= max(2 * row["error_eager"], 2**-7)
    assert ("scaled_mm_ms" in row) == (weights == "fp8-dynamic")
    assert f"--weights {weights} measures forward alone" in error_line(*command, "--backward")


@pytest.mark.slow
def test_bench_ffn_of_several_kinds_of_weights(capsys, tmp_path, error_line):
    """One table and one figure; bf16 are the rows that come without the option."""
    pytest.importorskip("torchao.quantization")
    sizes = ["--hidden", "512", "--intermediate", "1408", "--l0", "20", "--tokens", "70", "--repeats", "1"]
    command = ["bench", "ffn", *sizes, "--no-compile", "--device", "cpu", "--weights", "bf16", "fp8-dynamic"]
    assert main([*command, "--output", str(tmp_path)]) == 0
    head, _, plain, dynamic = capsys.readouterr().out.strip().splitlines()
    assert "weights" in head.split()
    assert (plain.split()[3], dynamic.split()[3]) == ("bfloat16", "fp8-dynamic")
    rows = [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    assert [row.get("weights") for row in rows] == [None, "fp8-dynamic"]
    assert "scaled_mm_ms" in rows[1]
    assert (tmp_path / "bench.png").stat().st_size > 0
    assert "--weights bf16 fp8-dynamic with --dtype float16" in error_line(*command, "--dtype", "float16")
    assert "torchao takes bfloat16 and multiples of 16" in error_line(*command[:-2], "fp8-dynamic", "--hidden", "500")
