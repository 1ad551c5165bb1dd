"""The experiments' harness on a tiny random Llama: every kind of job leaves finite rows, and the forward is Llama's."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = str(Path(__file__).parent.parent / "recipes" / "experiments")


@pytest.fixture
def lab(monkeypatch):
    """The harness's modules, by name, for one test alone: they are scripts beside each other, no package."""
    monkeypatch.syspath_prepend(FOLDER)
    names = [path.stem for path in Path(FOLDER).glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield lambda name: __import__(name)
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def parent():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def context(lab, parent, tmp_path):
    generator = np.random.default_rng(0)
    state = {
        name.removeprefix("model."): tensor for name, tensor in parent.state_dict().items() if "lm_head" not in name
    }
    sizes = generator.integers(6, 20, 40).astype(np.int32)
    evaluation = {
        **{text: generator.integers(0, 512, (4, 32)).astype(np.uint16) for text in lab("scoring").TEXTS},
        "task_tokens": generator.integers(0, 512, sizes.sum()).astype(np.uint16),
        "task_sizes": sizes,
        "task_starts": sizes - 3,
        "task_ids": np.repeat(np.arange(4, dtype=np.int8), 10),
        "task_rows": np.tile(np.repeat(np.arange(5, dtype=np.int32), 2), 4),
        "task_right": np.tile([True, False], 20),
        "task_characters": np.full(40, 7, np.int32),
    }
    windows = torch.from_numpy(generator.integers(0, 512, (64, 32)).astype(np.int32))
    shape = lab("model").Shape.of(parent.config)
    return lab("training").Context(shape, state, windows, evaluation, tmp_path, "cpu", torch.float32)


TINY = {"tokens": 4 * 256, "batch": 256, "micro_batch": 4, "compile": False, "report_every": 2}


def run(lab, context, preset: str, **settings) -> dict:
    job = {**lab("jobs").PRESETS[preset], "name": preset, **TINY, **settings}
    row = lab("training").run_job(job, context, lambda line: None)
    lab("lab").append_row(context.folder, row)
    return row


def test_forward_is_llamas(lab, context, parent):
    tokens = torch.randint(0, 512, (3, 32))
    model = context.load(None)
    with torch.no_grad():
        ours = model.logits(model(tokens)[0])
        assert torch.allclose(ours, parent(tokens).logits, rtol=1e-4, atol=1e-4)


def test_head_loss_has_the_gradients_of_the_whole(lab):
    model = lab("model")
    torch.manual_seed(0)
    hidden, head = torch.randn(12, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    teacher, teacher_head, targets = torch.randn(12, 8), torch.randn(20, 8), torch.randint(0, 20, (12,))
    arguments = (teacher, teacher_head, targets, torch.tensor([0.5, 0.7]), False)
    loss, _ = model.HeadLoss.apply(hidden, head, *arguments, 5, model.chunk_loss)
    chunked = torch.autograd.grad(loss, (hidden, head))
    plain = model.chunk_loss(hidden, head, *arguments)[0] / 12
    whole = torch.autograd.grad(plain, (hidden, head))
    assert torch.allclose(loss, plain)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(chunked, whole, strict=True))


@pytest.mark.slow
def test_every_kind_of_job_leaves_a_finite_row(lab, context):
    run(lab, context, "sample8", tokens=128, batch=4)
    run(lab, context, "free", tokens=128, batch=4, sample_length=16)
    trials = {preset: {} for preset in lab("jobs").PRESETS if preset not in ("sample8", "free")}
    trials["local"] = {"local_tokens": 512}
    trials["parent"] = trials["on0"] = trials["soup"] = {"tokens": 0}
    trials["on64"] = trials["on128"] = {"always_on": {"neurons": 4}}
    for preset, settings in trials.items():
        row = run(lab, context, preset, **settings)
        assert all(math.isfinite(loss) for loss in row["losses"].values()), preset
        assert set(row["tasks"]) == set(lab("scoring").TASKS)
        assert row["tokens"] == settings.get("tokens", 1024) + 512 * (preset == "local")
        assert all(math.isfinite(point["loss"]) for point in row["curve"])
    rows = lab("lab").read_rows(context.folder)
    assert len(rows) == len(trials) + 2
    assert "excess" in lab("lab").describe(rows[-1], rows)


def test_parent_of_its_own_text_is_sampled_as_it_is_read(lab, context):
    """Each sampled token's distribution is the whole forward's: with the noise gone, both choose the same."""
    sampling, model = lab("sampling"), context.load(None)
    with torch.no_grad():
        sampler = sampling.Sampler(model, 3, 16)
        tokens, chosen = torch.randint(0, 512, (3, 16)), []
        sampler.choose = lambda scores: chosen.append(scores) or scores.argmax(-1)
        for position in range(16):
            sampler.tokens.copy_(tokens[:, position])
            sampler.step(16)
        assert torch.allclose(torch.stack(chosen, 1), model.logits(model(tokens)[0]), rtol=1e-4, atol=1e-4)


PER_LAYER = pytest.param({"penalty": "sigmoid_count", "per_layer": "natural"}, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, PER_LAYER])
def test_density_follows_its_path(lab, context, settings):
    changes = {"tokens": 180 * 512, "batch": 512, "micro_batch": 16, "lr": 2e-3, "target": 0.25, "report_every": 10}
    row = run(lab, context, "kd", **changes, **settings)
    ratios = [point["density"] / point["path"] for point in row["curve"]]
    assert all(0.85 < ratio < 1.15 for ratio in ratios), ratios


def test_always_on_neurons_stand_in_for_what_relu_takes(lab, context):
    context.parent["embed_tokens.weight"] += 0.5  # streams of trained models have a mean, too
    teacher, swapped = context.load(None), context.load(None)
    swapped.set_blocks(activation="relu")
    row = run(lab, context, "on0", always_on={"neurons": 16})
    student, tokens = context.load("on0"), context.windows[32:].long()
    assert student.layers[0].mlp.gate_proj.out_features == 128
    assert min(row["filled"]) > 0
    assert row["density"] > 16 / 128

    with torch.no_grad():
        truth, far, near = (model.logits(model(tokens)[0]) for model in (teacher, swapped, student))
    assert (near - truth).norm() < 0.8 * (far - truth).norm(), "on text that they were not fitted on"
    whole = run(lab, context, "on0", name="all", always_on={"neurons": 64})
    assert sum(whole["filled"]) > sum(row["filled"])

    mlp = student.layers[1].mlp
    mlp.penalty = "contribution"
    x = torch.randn(5, 64)
    mlp(x)[1][1].backward()
    assert not mlp.gate_proj.weight.grad[-16:].any(), "nothing presses on them"
    assert mlp.gate_proj.weight.grad[:-16].any()
    with pytest.raises(ValueError, match=r"always on are 0\.1250 of all"):
        run(lab, context, "on64", always_on={"neurons": 16}, target=0.1)
    assert math.isfinite(run(lab, context, "kd", start_from="on0", target=0.3)["losses"]["openstax"])


def test_a_job_waits_for_what_it_builds_on(lab, tmp_path):
    queue = lab("lab")
    for name in ("queue", "taken", "status"):
        (tmp_path / name).mkdir()
    queue.add(tmp_path, ["fromcontrol", '{"name": "b5", "preset": "base", "target": 0.05}'])
    assert queue.claim(tmp_path) == {**lab("jobs").PRESETS["base"], "name": "b5", "target": 0.05}
    assert queue.claim(tmp_path) is None
    (tmp_path / "control.pt").touch()
    assert queue.claim(tmp_path)["name"] == "fromcontrol"
