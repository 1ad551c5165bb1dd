"""A chosen density instead of a coefficient: the controller finds it, holds it, and goes on where it stopped."""

import math
import re

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_twell import L1Penalty, SparsityCallback, sparsify
from hf_twell.blocks.modeling import BlockSizes, sparse_ffns
from hf_twell.files.checkpoints import read_state
from hf_twell.train.controller import DensityController
from hf_twell.train.logs import warn_of_miss
from hf_twell.train.step_counts import StepCounts
from tests.conftest import tiny_llama, training_rows
from tests.paths import ROOT
from tests.rounding import rounding

pytestmark = pytest.mark.numeric

TEXT = ROOT / "recipes" / "demo" / "text" / "train.txt"
STEPS, WARMUP_STEPS, SAVE_STEPS = 240, 96, 200


def letters() -> list[dict]:
    """Real text, letter by letter, in 96 of them."""
    ids = torch.tensor([min(95, max(3, ord(letter) - 29)) for letter in TEXT.read_text()[:250_000]])
    return [{"input_ids": row, "labels": row} for row in ids[: len(ids) // 64 * 64].view(-1, 64)]


def make_trainer(folder, **options) -> Trainer:
    args = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=16, learning_rate=3e-3, lr_scheduler_type="cosine",
        logging_steps=1, save_steps=SAVE_STEPS, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(sparsify(tiny_llama(intermediate_size=208)), args, train_dataset=letters())
    trainer.add_callback(SparsityCallback(trainer, **options))
    return trainer


def held(controller, steps, *, warmup, lag, exponent, needed, noise) -> list[float]:
    """Log densities over the target, for layers that follow their weight late and weakly, at a cosine learning rate."""
    generator = torch.Generator().manual_seed(0)
    start, target, l1 = math.log(0.45), math.log(controller.target_density), 20.0
    density, weight, path = start, 1e-9, []
    for step in range(steps):
        settled = min(start, target - exponent * math.log(weight / (needed * 0.03 / l1)))
        density += (settled - density) * (1 + math.cos(math.pi * step / steps)) / 2 / lag
        seen = math.exp(density + noise * torch.randn((), generator=generator).item())
        progress = min(1.0, (step + 1) / (warmup * steps))
        weight = controller.update(torch.tensor([seen]), torch.tensor([l1]), progress).item()
        path.append(density - target)
    return path


@pytest.mark.parametrize("needed", [1, 10, 100], ids="needs x{}".format)
@pytest.mark.parametrize("exponent", [0.5, 1.0], ids="exponent {}".format)
@pytest.mark.parametrize(("steps", "lag"), [(100, 3), (400, 8), (400, 40), (3000, 200)])
@pytest.mark.parametrize("warmup", [0.1, 0.4], ids="warm-up {}".format)
def test_layers_of_many_kinds_reach_the_target(steps, lag, exponent, needed, warmup):
    layer = {"lag": lag, "exponent": exponent, "needed": needed, "noise": 0.03}
    path = held(DensityController(0.01, steps=steps), steps, warmup=warmup, **layer)
    assert abs(path[-1]) < math.log(1.1), "within 10 %"
    # An early path outruns layers that follow late: they fall below the target for a moment.
    assert min(path) > math.log(0.8 if warmup == 0.4 else 0.3), "and never far below"


def test_the_weight_of_a_layer_that_cannot_follow_stays_in_bounds():
    for bounds in (None, (1e-4, 1e-2)):
        controller = DensityController(0.01, steps=50, l1_bounds=bounds)
        weights = [controller.update(torch.tensor([0.5]), torch.tensor([20.0]), 1.0).item() for _ in range(500)]
        low, high = bounds or (0.03 / 20 / 1e3, 4 / 20)
        assert max(weights) == pytest.approx(high, rel=1e-4)
        weights = [controller.update(torch.tensor([1e-6]), torch.tensor([20.0]), 1.0).item() for _ in range(800)]
        assert weights[-1] == pytest.approx(low, rel=1e-4)


@pytest.mark.parametrize(("steps", "integral"), [(10, 0.4), (100, 0.24)])
def test_weights_follow_the_formula(steps, integral):
    """A run of few steps would be pushed too hard by all of the integral part."""
    controller = DensityController(0.01, steps=steps)
    weights = [controller.update(torch.tensor([0.5]), torch.tensor([20.0]), 1.0).item() for _ in range(2)]
    assert weights == pytest.approx([0.03 / 20 * math.exp(4 + integral), 0.03 / 20 * math.exp(4 + 2 * integral)])


@pytest.mark.parametrize("second", [0.5, 0.0])
def test_a_layer_that_begins_without_an_active_neuron(second):
    controller = DensityController(0.1, steps=10)
    for step in range(10):
        weights = controller.update(torch.tensor([0.0, second]), torch.tensor([0.0, 40 * second]), step / 10)
        assert weights.isfinite().all()
    assert (weights[0] < weights[1]) == (second > 0)


@pytest.mark.parametrize("l1", [math.nan, math.inf])
@pytest.mark.parametrize("layer_shares", ["equal", "free"])
@pytest.mark.parametrize("overflowed", [0, 5])
def test_a_step_that_overflowed_changes_no_weight(overflowed, layer_shares, l1):
    """The loss scaler of fp16 passes over such a step, and training goes on."""
    runs = []
    for steps in ([s for s in range(10) if s != overflowed], range(10)):
        controller = DensityController(0.01, steps=100, layer_shares=layer_shares)
        for step in steps:
            good = step != overflowed
            density = torch.tensor([0.5, 0.3 + step / 100 if good else 1.0])
            before = controller.weights() if controller.started else torch.zeros(2)
            weights = controller.update(density, torch.tensor([20.0, 10.0 if good else l1]), (step + 1) / 100)
            assert good or torch.equal(weights, before)
        runs.append(weights)
    assert torch.equal(*runs)


def test_a_step_of_padding_alone_changes_no_weight():
    controller = DensityController(0.01, steps=100)
    padding = StepCounts(torch.tensor(0.0), torch.zeros(2, 1 + 8), (BlockSizes(None, 8),) * 2)
    assert not controller.update(padding.density(), padding.l1(), 0.0).any()
    assert not controller.started
    weights = controller.update(torch.tensor([0.5, 0.3]), torch.tensor([20.0, 10.0]), 0.01)
    assert torch.equal(controller.update(padding.density(), padding.l1(), 0.02), weights)


def test_counts_of_steps_add_up():
    step = StepCounts(torch.tensor(4.0), torch.tensor([[6.0, 4.0, 0.0, 2.0]]), (BlockSizes(None, 3),))
    step.check_counted_once()  # a neuron may be active for every token
    total = step.added_to(step.added_to(None))
    layer = {"l0": 1.5, "density": 0.5, "l1": 1.5, "dead": 1 / 3, "l1_weight": 0.25}
    assert total.figures([0.25]) == {**layer, "tokens": 8, "layers": [layer]}
    assert total.tokens.dtype == total.table.dtype == torch.float64
    padding = StepCounts(torch.tensor(0.0), torch.zeros(1, 4), (BlockSizes(None, 3),))
    assert padding.density().tolist() == [0.0]
    assert padding.figures([0.25]) is None


def test_counts_of_a_narrower_layer():
    sizes = BlockSizes(None, 3), BlockSizes(None, 2)
    step = StepCounts(torch.tensor(4.0), torch.tensor([[6.0, 4.0, 0.0, 2.0], [1.0, 3.0, 0.0, 0.0]]), sizes)
    assert step.density().tolist() == [0.5, 0.375]
    assert step.size("count").tolist() == [1.5, 0.75]
    assert [layer.tolist() for layer in step.active] == [[4.0, 0.0, 2.0], [3.0, 0.0]]
    narrower = step.figures([0.25, 0.25])["layers"][1]
    assert narrower == {"l0": 0.75, "density": 0.375, "l1": 0.25, "dead": 0.5, "l1_weight": 0.25}


@pytest.mark.parametrize("share", ["equal", "free"])
def test_every_layer_or_their_mean(share):
    controller = DensityController(0.1, steps=20, layer_shares=share)
    densities = torch.tensor([0.5, 0.1, 0.02])
    controller.update(densities, torch.ones(3), 1.0)
    weights = controller.update(densities, torch.ones(3), 1.0)
    first = torch.full((3,), 0.03)
    if share == "free":
        assert (weights == weights[0]).all()
        assert weights[0] > first[0], "their mean, 0.21, is above the target"
    else:
        assert weights[0] > first[0]
        assert weights[2] < first[2]


def test_who_is_at_a_bound_and_who_is_off_the_target():
    """Within a tenth of the path, a layer at its bound is where it should be."""
    controller = DensityController(0.1, steps=10, l1_bounds=(1e-3, 1e-2))
    for _ in range(200):
        weights = controller.update(torch.tensor([0.5, 0.105, 0.096, 0.02]), torch.full((4,), 20.0), 1.0)
    assert weights.tolist() == pytest.approx([1e-2, 1e-2, 1e-3, 1e-3])
    assert controller.held() == {"upper": [0], "lower": [3]}
    assert controller.missed() == pytest.approx({0: 0.5, 3: 0.02})
    for densities, missed in (([0.15, 0.05], {}), ([0.3, 0.1], {0: 0.3, 1: 0.1})):
        controller = DensityController(0.1, steps=10, layer_shares="free")
        controller.update(torch.tensor(densities), torch.ones(2), 1.0)
        assert controller.missed() == pytest.approx(missed)


def test_no_weight_exceeds_its_bound_where_l1_falls_or_differs():
    falls = DensityController(0.1, steps=10)
    for l1 in (20.0, *[1e-6] * 200):
        weights = falls.update(torch.tensor([0.5]), torch.tensor([l1]), 1.0)
    assert weights.item() == pytest.approx(0.03 / 20 * 1e5, rel=1e-4)
    shared = DensityController(0.1, steps=10, layer_shares="free")
    for _ in range(200):
        weights = shared.update(torch.tensor([0.5, 0.5]), torch.tensor([10.0, 30.0]), 1.0)
    assert weights.tolist() == pytest.approx([4 / 20] * 2), "one weight for all layers"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shares", "where"), [("equal", r"model.layers.0.mlp \d+.\d\d%, "), ("free", r"the layers' mean is \d+.\d\d%; ")]
)
def test_a_run_that_misses_its_target_says_so(tmp_path, caplog, shares, where):
    make_trainer(tmp_path, target_density=0.001, warmup_steps=WARMUP_STEPS, layer_shares=shares).train()
    (line,) = [record.getMessage() for record in caplog.records if "was missed" in record.getMessage()]
    assert re.match(f"target_density=0.001 was missed by more than a tenth: {where}", line)
    assert "shorter" not in line, "what is said of a layer at its bound asks for a longer warm-up"


@pytest.mark.parametrize(
    ("target", "how"),
    [(0.1, "more steps, a higher learning rate or another warmup_steps"), (0.9, "a lower learning rate or more steps")],
)
def test_what_to_do_depends_on_the_side_of_the_miss(caplog, target, how):
    controller, ffns = DensityController(target, steps=10), sparse_ffns(sparsify(tiny_llama()))
    for _ in range(10):
        controller.update(torch.tensor([0.5, 0.6]), torch.tensor([20.0, 20.0]), 1.0)
    warn_of_miss(controller, ffns, target="target_density")
    assert caplog.messages[0].endswith(f"; give {how}")


def bound_lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if " bound" in record.getMessage()]


@pytest.mark.slow
def test_a_weight_at_its_bound_is_told_while_it_happens_and_once(tmp_path, caplog):
    told_at = {}

    class Watch(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            told_at.setdefault(len(bound_lines(caplog)), state.global_step)

    trainer = make_trainer(tmp_path, target_density=0.05, warmup_steps=WARMUP_STEPS, l1_bounds=(1e-3, 2e-2))
    trainer.add_callback(Watch())
    trainer.train()
    lines = bound_lines(caplog)
    assert sorted(re.findall(r"model\.layers\.\d\.mlp", " ".join(lines))) == [f"model.layers.{i}.mlp" for i in range(3)]
    for line in lines:
        assert re.match(r"step \d+: the penalty's weight of .*\.mlp \(0\.02\).* is at its upper bound", line)
        assert "l1_bounds" in line
    assert told_at[1] < STEPS / 2, "not only at the end"


def test_layers_that_share_the_target_are_told_of_as_one(tmp_path, caplog):
    trainer = make_trainer(tmp_path, target_density=0.05, warmup_steps=2, layer_shares="free", l1_bounds=(1e-3, 2e-2))
    trainer.args.max_steps = 10
    trainer.train()
    (line,) = bound_lines(caplog)
    assert re.match(r"step \d+: the penalty's weight of all layers \(0\.02\) is at its upper bound", line)


@pytest.mark.slow
def test_bounds_are_recorded_and_new_ones_are_told_and_used(tmp_path, caplog):
    options = {"target_density": 0.05, "warmup_steps": 2}
    first = make_trainer(tmp_path, **options, l1_bounds=(1e-3, 2e-2))
    first.args.max_steps = first.args.save_steps = 8
    first.train()
    assert read_state(tmp_path / "checkpoint-8")["l1_bounds"] == [1e-3, 2e-2]
    for bounds, highest in (((1e-3, 4e-2), 0.04), (None, None)):
        caplog.clear()
        again = make_trainer(tmp_path, **options, l1_bounds=bounds)
        again.args.max_steps = 20
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
        (line,) = [record.getMessage() for record in caplog.records if "trained with" in record.getMessage()]
        assert f"l1_bounds=[0.001, 0.02] and goes on with {list(bounds) if bounds else None}" in line
        weight = training_rows(again)[20]["twell/l1_weight"]
        assert weight == pytest.approx(highest, rel=1e-4) if bounds else weight > 0.04
    caplog.clear()
    same = make_trainer(tmp_path, **options, l1_bounds=(1e-3, 2e-2))
    same.args.max_steps = 9
    same.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert "trained with" not in caplog.text


@pytest.mark.slow
def test_a_real_run_is_steered_logged_and_resumed(tmp_path, caplog):
    whole = make_trainer(tmp_path, target_density=0.1, warmup_steps=WARMUP_STEPS)
    whole.train()
    assert "was missed" not in caplog.text
    rows = training_rows(whole)
    assert rows[1]["twell/l1_weight"] > 0, "what the first step saw sets the weight of the next"
    targets = [row["twell/target"] for row in rows.values()]
    assert targets == sorted(targets, reverse=True)
    assert targets[WARMUP_STEPS - 1 :] == pytest.approx([0.1] * (STEPS - WARMUP_STEPS + 1))
    for layer in range(3):
        reached = [rows[step][f"twell/layer_{layer:02d}/density"] for step in range(STEPS - 23, STEPS + 1)]
        assert sum(reached) / len(reached) == pytest.approx(0.1, rel=0.1), "each layer, within 10 %"
    weights = {rows[STEPS][f"twell/layer_{layer:02d}/l1_weight"] for layer in range(3)}
    assert len(weights) == 3, "each has its own"
    state = read_state(tmp_path / f"checkpoint-{SAVE_STEPS}")
    assert state["target_density"] == 0.1
    assert len(state["controller"]["log_weight"]) == 3
    last = read_state(tmp_path / f"checkpoint-{STEPS}")["controller"]["density"]
    assert whole.model.config.twell["density"] == pytest.approx(last, abs=1e-6), "what steered is what is stored"

    resumed = make_trainer(tmp_path, target_density=0.1, warmup_steps=WARMUP_STEPS)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVE_STEPS}"))
    for step, row in training_rows(resumed).items():
        assert row == pytest.approx(rows[step], rel=1e-4, abs=1e-5), step


def test_a_run_follows_the_formula_from_its_first_step_and_begins_anew(tmp_path):
    """The density falls over a tenth of the steps, rounded up, unless it is said otherwise."""
    trainer, begun = make_trainer(tmp_path, target_density=0.05, layer_shares="free"), []

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 0:
                begun.append(callback.penalty.layer_weights)

    callback = next(each for each in trainer.callback_handler.callbacks if isinstance(each, SparsityCallback))
    trainer.add_callback(Watch())
    trainer.args.max_steps = 15
    for _ in range(2):
        trainer.train()
        first, second = (training_rows(trainer)[step] for step in (1, 2))
        targets = [math.sqrt(first["twell/density"] * 0.05), 0.05]
        assert [first["twell/target"], second["twell/target"]] == pytest.approx(targets)
        error = min(1.0, math.log(first["twell/density"] / 0.05) / 2)
        weight = 0.03 / first["twell/l1"] * math.exp((4 + 0.4) * error)
        assert first["twell/l1_weight"] == pytest.approx(weight, rel=1e-4), "found in the first step, for the second"
    assert begun == [None, None], "the first step only looks"


def test_steps_of_a_warm_up(tmp_path):
    trainer = make_trainer(tmp_path, target_density=0.05)
    trainer.state.max_steps = 40
    for given, steps in ((0, 0), (0.0, 0), (1, 1), (1.0, 1), (12, 12), (0.25, 10), (0.24, 10), (0.01, 1)):
        callback = SparsityCallback(trainer, target_density=0.05, warmup_steps=given)
        assert [callback.progress(step) for step in (0, steps, 40)] == [0.0 if steps else 1.0, 1.0, 1.0], given
        assert steps < 2 or callback.progress(steps - 1) == (steps - 1) / steps
    callback = SparsityCallback(trainer, l1_weight=2.0, warmup_steps=8, warmup="sine")
    weights = [callback.weight_at(step) for step in (0, 1, 4, 7, 8)]
    assert weights == pytest.approx([0, 1 - math.cos(math.pi / 8), 1, 1 + math.cos(math.pi / 8), 2])
    for value in (-1, True, math.nan, 1.5):
        with pytest.raises(ValueError, match=f"warmup_steps={value}; give a whole number of steps"):
            SparsityCallback(trainer, l1_weight=2.0, warmup_steps=value)
    with pytest.raises(ValueError, match=r"blend_steps: blending is gone; leave it out, .* ReLU at once; .* teacher"):
        SparsityCallback(trainer, l1_weight=2.0, blend_steps=0.2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'target_densty'"):
        SparsityCallback(trainer, target_densty=0.05)
    with pytest.raises(ValueError, match="warmup='steep'; choose one of 'linear', 'sine'"):
        SparsityCallback(trainer, l1_weight=2.0, warmup="steep")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "no l1_weight, target_density or target_union; give one of them"),
        ({"term": "count", "share": 8}, "no l1_weight, target_density or target_union; give one of them"),
        ({"l1_weight": 1.0, "target_density": 0.1}, "l1_weight=1.0 and target_density=0.1; give one of them"),
        ({"target_density": 1.5}, "between 0 and 1"),
        ({"target_density": 1}, "between 0 and 1"),
        ({"target_density": 0.1, "layer_shares": "some"}, "'equal', 'free'"),
        ({"target_density": 0.1, "l1_bounds": (1.0, 0.1)}, "lowest and the highest"),
        ({"target_density": 0.1, "l1_bounds": [1.0]}, "lowest and the highest"),
        ({"target_density": 0.1, "l1_bounds": ["a", "b"]}, "lowest and the highest"),
        ({"l1_weight": 0.1, "l1_bounds": (0.1, 1.0)}, "goes with target_density or target_union alone"),
        ({"target_density": 0.1, "warmup_steps": 2.5}, "whole number of steps"),
        ({"target_density": 0.1, "target_union": 0.3, "share": 8}, "give one of them: the share of neurons"),
        ({"l1_weight": 0.1, "target_union": 0.3, "term": "count", "share": 8}, "target_union=0.3; give one of them"),
        ({"target_union": 0.3, "term": "count"}, "say of how many: share=64"),
        ({"target_union": 0.3, "share": 8}, "share=8 goes with term='count' alone"),
        ({"target_union": 1.0, "term": "count", "share": 8}, "target_union=1.0; give a share between 0 and 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, options, says):
    with pytest.raises(ValueError, match=says):
        make_trainer(tmp_path, **options)


def test_limits_are_refused_themselves():
    for density in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="between 0 and 1"):
            DensityController(density, steps=10)
    for bounds in ((0.0, 1.0), (1.0, 1.0), (1.0, math.inf), (math.nan, 1.0), (1.0, 2.0, 3.0)):
        with pytest.raises(ValueError, match="lowest and the highest"):
            DensityController(0.1, steps=10, l1_bounds=bounds)


def test_the_count_term_is_a_smooth_count_of_active_neurons():
    """The gradient that is added is that of sum over neurons of tanh(a / 0.2), written as a loss."""
    torch.manual_seed(0)
    model = sparsify(tiny_llama(intermediate_size=40, num_hidden_layers=2).double())
    batches = [{"input_ids": torch.randint(96, (2, 7)), "attention_mask": torch.ones(2, 7)} for _ in range(2)]
    batches[1]["attention_mask"][1, 4:] = 0
    for batch in batches:
        batch["labels"] = batch["input_ids"]
    penalty = L1Penalty(model, 0.3, term="count")
    for batch in penalty.micro_batches(batches):
        model(**batch).loss.backward()
    parameters = list(model.parameters())
    found = [parameter.grad.clone() for parameter in parameters]
    penalty.detach()
    model.zero_grad()

    gates, outputs = [], []
    handles = [ffn.gate_proj.register_forward_hook(lambda _, __, y: gates.append(y)) for ffn in penalty.ffns]
    for batch in batches:
        gates.clear()
        outputs.append(model(**batch).loss)
        counts = [torch.tanh(gate.relu() / 0.2).sum(-1) * batch["attention_mask"] for gate in gates]
        (0.3 / 2 * sum(count.sum() for count in counts) / 25).backward(retain_graph=True)
    for handle in handles:
        handle.remove()
    magnitudes = [0 if parameter.grad is None else parameter.grad.abs().max().item() for parameter in parameters]
    assert max(magnitudes) > 0
    sum(outputs).backward()
    for mine, magnitude, parameter in zip(found, magnitudes, parameters, strict=True):
        # In float32 are a token's coefficient (a product and two quotients) and five norms of 32 channels.
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-12, atol=rounding(3 + 5 * 32, magnitude) + 1e-15)
    report = penalty.report()
    assert report["tokens"] == 25
    assert 0 < report["density"] < 1


@pytest.mark.slow
def test_the_count_term_reaches_and_holds_its_target(tmp_path):
    trainer = make_trainer(tmp_path, target_density=0.05, term="count", layer_shares="free", warmup_steps=WARMUP_STEPS)
    trainer.train()
    late = [row for row in trainer.state.log_history if "loss" in row and row["step"] > 180]
    densities = [row["twell/density"] for row in late]
    assert all(0.04 < density < 0.06 for density in densities), densities
    state = read_state(tmp_path / f"checkpoint-{SAVE_STEPS}")
    assert state["term"] == "count"


def test_a_count_goes_with_a_target_alone(tmp_path):
    with pytest.raises(ValueError, match="term='count' goes with target_density or target_union alone"):
        make_trainer(tmp_path, l1_weight=0.1, term="count")
    with pytest.raises(ValueError, match="term='l0'; choose one of 'l1', 'count'"):
        make_trainer(tmp_path, target_density=0.1, term="l0")


@pytest.mark.slow
def test_the_count_term_is_the_same_compiled_and_checkpointed():
    def step(prepare) -> tuple[list[torch.Tensor], dict]:
        model = sparsify(tiny_llama()).train()
        penalty, run = L1Penalty(model, 0.5, term="count"), prepare(model)
        words = torch.arange(3, 43).view(2, 20)
        for batch in penalty.micro_batches([{"input_ids": words, "labels": words}]):
            run(**batch).loss.backward()
        return [parameter.grad for parameter in model.parameters()], penalty.report()

    def compiled(model):
        return torch.compile(model, backend="aot_eager")

    def checkpointed(model):
        model.gradient_checkpointing_enable()
        return model

    (eager, counted), *others = (step(prepare) for prepare in (lambda model: model, compiled, checkpointed))
    for gradients, report in others:
        assert report["l0"] == counted["l0"]
        for mine, theirs in zip(eager, gradients, strict=True):
            # Sums over 40 tokens, and over at most 96 neurons or words in each of the products on the way.
            torch.testing.assert_close(mine, theirs, rtol=0, atol=rounding(40 + 4 * 96, mine.abs().max().item()))
