"""Dead neurons come back, their optimizer state with them, and nothing else changes."""

import functools
import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback
from transformers.optimization import Adafactor

from hf_twell import SparsityCallback, sparsify
from hf_twell.files.checkpoints import read_state
from hf_twell.recipe.variants import LoraOutsideFfns
from hf_twell.train.revival import Revival
from tests import one_step
from tests.conftest import tiny_llama, training_rows

pytestmark = pytest.mark.numeric

DEAD = [3, 17, 40]
TOKENS = sum(one_step.LENGTHS)  # of each optimizer step


class Watch(TrainerCallback):
    """The gate weights and moments of layer 1 after each step; its rows `DEAD` are pushed about before."""

    def __init__(self):
        self.rows = []

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        weight = model.model.layers[1].mlp.gate_proj.weight
        moments = optimizer.state.get(weight, {})
        self.rows.append(
            [weight.detach().clone(), *(moments[k].clone() for k in ("exp_avg", "exp_avg_sq") if k in moments)]
        )


def make_trainer(folder, revive_after=None, steps=4, optimizer=None, **model_options):
    model = sparsify(tiny_llama(**model_options))
    with torch.no_grad():
        # A gate of zeros never opens, and gets no gradient.
        model.model.layers[1].mlp.gate_proj.weight[DEAD] = 0
        if model.config.mlp_bias:
            model.model.layers[1].mlp.gate_proj.bias[DEAD] = -9.0
    options = {"max_steps": steps, "learning_rate": 1e-3, "weight_decay": 0.0}
    saves = {"save_strategy": "steps", "save_steps": 2, "max_grad_norm": 1.0}
    kind = functools.partial(Trainer, optimizers=(optimizer(model) if optimizer else None, None))
    trainer = one_step.make_trainer(folder, kind, model, **options, **saves)
    watch = Watch()
    trainer.add_callback(SparsityCallback(trainer, l1_weight=0.01, revive_after=revive_after))
    trainer.add_callback(watch)
    return trainer, watch


def test_dead_rows_are_drawn_back_and_living_ones_left_alone(tmp_path):
    left, untouched = make_trainer(tmp_path / "left", steps=2)
    left.train()
    trainer, watch = make_trainer(tmp_path / "revived", revive_after=2 * TOKENS, steps=2)
    trainer.train()
    assert torch.equal(watch.rows[0][0][DEAD], torch.zeros(3, 32)), "not dead for long enough"
    weight, first, second = watch.rows[1]
    living = [row for row in range(52) if row not in DEAD]
    for mine, plain in zip(watch.rows[1], untouched.rows[1], strict=True):
        assert torch.equal(mine[living], plain[living])
    # A tenth of the model's initializer_range, 0.2.
    assert weight[DEAD].std().item() == pytest.approx(0.02, rel=0.25)
    assert torch.equal(first[DEAD], torch.zeros(3, 32))
    torch.testing.assert_close(second[DEAD], second[living].mean(0).expand(3, -1))
    log = training_rows(trainer)
    assert log[1]["twell/revived"] == 0
    assert log[2]["twell/revived"] == pytest.approx(len(DEAD) / (3 * 52))
    assert log[2]["twell/layer_01/dead"] >= len(DEAD) / 52


class ReadsOnTheHost(TorchDispatchMode):
    """Operators whose result's values the host needs, so that it would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        masks = [index for index in args[1] if index is not None] if function is torch.ops.aten.index.Tensor else []
        names = ("aten::nonzero", "aten::_local_scalar_dense", "aten::masked_select")
        if function._schema.name in names or any(index.dtype == torch.bool for index in masks):
            self.seen.append(function._schema.name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mlp_bias", [False, True])
def test_to_revive_rows_waits_for_the_device_at_most_once(tmp_path, mlp_bias):
    trainer, _ = make_trainer(tmp_path, revive_after=TOKENS, steps=1, mlp_bias=mlp_bias)
    trainer.train()
    revival = next(each.revival for each in trainer.callback_handler.callbacks if isinstance(each, SparsityCallback))
    assert training_rows(trainer)[1]["twell/revived"] > 0
    with ReadsOnTheHost() as reads:
        assert revival.revive(trainer.optimizer, step=1) == pytest.approx(len(DEAD) / (3 * 52))
    assert reads.seen == [], "beside the number of dead rows in each layer"


def test_a_revived_neuron_fires_and_is_left_to_learn(tmp_path):
    trainer, watch = make_trainer(tmp_path, revive_after=TOKENS, steps=12)
    trainer.train()
    assert training_rows(trainer)[12]["twell/layer_01/dead"] == 0
    assert training_rows(trainer)[12]["twell/revived"] == 0
    assert (watch.rows[-1][2][DEAD] > 0).any(), "it gets gradients"


def test_biases_that_hold_a_neuron_shut_give_way(tmp_path):
    trainer, _ = make_trainer(tmp_path, revive_after=TOKENS, steps=5, mlp_bias=True)
    trainer.train()
    bias = trainer.model.model.layers[1].mlp.gate_proj.bias[DEAD]
    torch.testing.assert_close(bias, torch.full((3,), -9.0 * 0.9**4), atol=0.02, rtol=0)
    revived = [row["twell/revived"] > 0 for row in training_rows(trainer).values()]
    assert revived == [True] * 4 + [False], "not in the last fifth of the run"


def test_layers_that_are_dead_as_a_whole_each_get_noise_of_their_own():
    model = sparsify(tiny_llama(mlp_bias=True))
    ffns = [layer.mlp for layer in model.model.layers]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(**one_step.pad(one_step.rows())).loss.backward()
    optimizer.step()
    noises = []
    for step, seed in ((0, 7), (0, 7), (1, 7), (0, 8)):
        revival = Revival(ffns, 5, sigma=0.2, seed=seed)
        revival.count(torch.tensor(5.0), [torch.zeros(52) for _ in ffns])
        before = [ffn.gate_proj.weight.detach().clone() for ffn in ffns]
        assert revival.revive(optimizer, step) == 1.0
        noises.append([10 * (f.gate_proj.weight.detach() - 0.9 * b) for f, b in zip(ffns, before, strict=True)])
    for same, again in zip(*noises[:2], strict=True):
        torch.testing.assert_close(same, again, atol=1e-4, rtol=0)
    for one, other in itertools.combinations([noise for noises_of_one in noises[1:] for noise in noises_of_one], 2):
        assert one.std().item() == pytest.approx(0.2, rel=0.1)
        assert abs(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]) < 0.1
    for ffn in ffns:
        for parameter in (ffn.gate_proj.weight, ffn.gate_proj.bias):
            assert not any(optimizer.state[parameter][key].any() for key in ("exp_avg", "exp_avg_sq"))
    revival.count(torch.tensor(5.0), [torch.eye(52)[3] for _ in ffns])
    assert revival.revive(optimizer, 2) == pytest.approx(51 / 52), "one token is enough"


def test_a_run_that_begins_anew_counts_anew(tmp_path):
    trainer, _ = make_trainer(tmp_path, revive_after=3 * TOKENS, steps=2)
    for _ in range(2):
        trainer.train()
        assert [row["twell/revived"] for row in training_rows(trainer).values()] == [0, 0]


def test_a_resumed_run_revives_the_same(tmp_path):
    trainer, _ = make_trainer(tmp_path, revive_after=3 * TOKENS)
    trainer.train()
    assert read_state(tmp_path / "checkpoint-2")["revive_after"] == 3 * TOKENS
    resumed, _ = make_trainer(tmp_path, revive_after=3 * TOKENS)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert training_rows(trainer)[3]["twell/revived"] > 0, "after steps on both sides of the checkpoint"
    for step, row in training_rows(resumed).items():
        assert row == pytest.approx(training_rows(trainer)[step], abs=1e-6), step
    for mine, truth in zip(resumed.model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(mine, truth, atol=1e-6, rtol=0)


def test_plain_sgd_has_no_state_to_reset(tmp_path):
    trainer, watch = make_trainer(
        tmp_path, revive_after=TOKENS, steps=2, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3)
    )
    trainer.train()
    assert (watch.rows[0][0][DEAD] != 0).all()


class OtherState(torch.optim.SGD):
    """Keeps for each parameter what `make` makes of it."""

    def __init__(self, parameters, make):
        super().__init__(parameters, lr=1e-3)
        self.make = make

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            self.state.update({parameter: self.make(parameter.detach()) for parameter in group["params"]})


class QuantizedState(torch.Tensor):
    """As torchao's: it claims to be a floating-point tensor of the parameter's shape."""


STATES = {
    "bitsandbytes' AdamW of 32 bits": lambda p: {"state1": p.clone(), "state2": p.square()},
    "schedule-free AdamW": lambda p: {"z": p.clone(), "exp_avg_sq": p.square()},
    "torchao's AdamW": lambda p: {"exp_avg": p.clone().as_subclass(QuantizedState)},
    "one second moment for each row": lambda p: {"exp_avg_sq": p.reshape(len(p), -1).square().mean(1)},
    "averaged weights": lambda p: {"ax": p.clone()},
}


@pytest.mark.parametrize("state", STATES)
def test_unknown_optimizer_state_is_refused(tmp_path, state):
    """Zeroed, a second moment takes the next step too far, and weights are lost."""
    trainer, _ = make_trainer(
        tmp_path, revive_after=TOKENS, optimizer=lambda model: OtherState(model.parameters(), STATES[state])
    )
    with pytest.raises(ValueError, match="cannot reset the state of OtherState") as caught:
        trainer.train()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.RMSprop])
def test_second_moments_of_other_optimizers(tmp_path, optimizer):
    trainer, _ = make_trainer(
        tmp_path, revive_after=TOKENS, steps=1, optimizer=lambda model: optimizer(model.parameters(), lr=1e-3)
    )
    trainer.train()
    state = trainer.optimizer.state[trainer.model.model.layers[1].mlp.gate_proj.weight]
    second = state["sum" if "sum" in state else "square_avg"]
    living = [row for row in range(52) if row not in DEAD]
    torch.testing.assert_close(second[DEAD], second[living].mean(0).expand(3, -1))


def test_what_cannot_be_reached_is_refused(tmp_path):
    trainer, _ = make_trainer(
        tmp_path, revive_after=TOKENS,
        optimizer=lambda model: Adafactor(model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False),
    )  # fmt: skip
    with pytest.raises(ValueError, match="state of Adafactor"):
        trainer.train()

    def copies(model):
        return torch.optim.AdamW([p.detach().clone().requires_grad_() for p in model.parameters()])

    trainer, _ = make_trainer(tmp_path, revive_after=TOKENS, optimizer=copies)
    with pytest.raises(ValueError, match="copies or shards"):
        trainer.train()
    trainer, _ = make_trainer(tmp_path)
    for after in (0.5, 0, -1, True):
        with pytest.raises(ValueError, match="whole number of tokens"):
            SparsityCallback(trainer, 0.0, revive_after=after)
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="under FSDP or DeepSpeed"):
        SparsityCallback(trainer, 0.0, revive_after=TOKENS)
    trainer.is_fsdp_enabled = False
    weight = trainer.model.model.layers[2].mlp.gate_proj.weight
    weight.ds_id = 0  # as ZeRO-3 marks what it shards
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.gate_proj is sharded"):
        SparsityCallback(trainer, 0.0, revive_after=TOKENS)
    del weight.ds_id
    trainer.model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"mlp\.gate_proj .*frozen"):
        SparsityCallback(trainer, 0.0, revive_after=TOKENS)
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match="feed-forward blocks, which are trained in full"):
        LoraOutsideFfns(trainer.model, {"target_modules": ["gate_proj", "q_proj"]})
