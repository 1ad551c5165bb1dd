"""How a block on a GPU chooses its way in training: a logic that needs no GPU, run on CPU tensors here."""

import copy
import math
import pickle
import re
import warnings

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

import hf_twell
from hf_twell import L1Penalty, SparsityCallback
from hf_twell.blocks import calls as block_calls
from hf_twell.blocks.batches import runs_of
from hf_twell.dispatch import choose, limits, training
from hf_twell.dispatch import key as dispatch_key
from hf_twell.dispatch.activity import Sample
from hf_twell.dispatch.key import CallKey
from hf_twell.dispatch.limits import limit
from hf_twell.dispatch.training import (
    Block,
    ModelChoice,
    TrainingChoice,
    needed_capacity,
    saved_capacity,
)
from hf_twell.ops import api, build
from hf_twell.recipe.trainer import PackedTrainer
from tests import one_step
from tests.conftest import tiny_llama
from tests.ffn_cases import make_case, run

pytestmark = pytest.mark.numeric

needs_cpu_kernels = pytest.mark.skipif(
    not build.status("cpu", build=True).available, reason=build.status("cpu", build=True).reason
)
TOKENS, HIDDEN, INTERMEDIATE = 64, 16, 2048
LIMIT = 0.02
STEPS = limit("kCudaSampleSteps")  # between two samples


@pytest.fixture(autouse=True)
def few_tokens_pay(monkeypatch):
    """So that tests stay small."""
    monkeypatch.setitem(limits.read(), "kCudaTrainingLimits", ((8, 0.0), (math.inf, LIMIT)))


def too_dense(choice, x, gate, runs=False) -> bool:
    tokens, kind = x.numel() // x.shape[-1], torch.bfloat16
    asked = CallKey("cuda", "9.0", kind, kind, tokens, HIDDEN, INTERMEDIATE, training=True, runs=runs)
    return choose.choose(asked, choice.activity(asked, x, gate)) != "kernels"


class Run:
    """A gate whose density each step sets, and an optimizer that writes to it."""

    def __init__(self):
        self.choice = TrainingChoice()
        self.gate = torch.nn.Parameter(torch.zeros(INTERMEDIATE, HIDDEN))
        self.x = torch.ones(TOKENS, HIDDEN)

    def step(self, density: float, micro_batches: int = 1) -> bool:
        """Whether the step that follows trains densely; every micro-batch and recomputation must."""
        with torch.no_grad():
            active = torch.arange(INTERMEDIATE) % 1024 < 1024 * density
            self.gate.copy_(torch.where(active, 1.0, -1.0)[:, None])
        ways = {too_dense(self.choice, self.x, self.gate) for _ in range(2 * micro_batches)}
        assert len(ways) == 1
        return ways.pop()

    def steps(self, density: float, count: int = 2 * STEPS) -> list[bool]:
        return [self.step(density, 3) for _ in range(count)]


def count_samples(monkeypatch) -> list:
    taken, sample = [], training.Sample
    monkeypatch.setattr(training, "Sample", lambda *args: taken.append(1) or sample(*args))
    return taken


def test_dense_until_it_is_known_to_be_sparse():
    run = Run()
    assert run.step(0.005)
    assert run.choice.density is None
    assert not run.step(0.005)
    assert run.choice.density == pytest.approx(6 / 1024)
    assert Run().steps(0.5) == [True] * 2 * STEPS


def test_one_sample_in_some_steps_however_many_micro_batches(monkeypatch):
    run, taken = Run(), count_samples(monkeypatch)
    run.steps(0.005, count=4 * STEPS)
    assert len(taken) == 4


def test_it_changes_between_steps_alone():
    run = Run()
    run.steps(0.005)
    dense_x = -run.x
    assert not any(too_dense(run.choice, dense_x, run.gate) for _ in range(5 * STEPS))
    assert all(run.steps(0.5)[STEPS:])


def test_it_does_not_flap():
    run = Run()
    between = LIMIT * (1 + limit("kCudaTrainingBack")) / 2
    assert all(run.steps(between)), "not sparse enough to move over"
    assert not run.steps(0.9 * LIMIT)[-1]
    assert not any(run.steps(between)), "not dense enough to move back"
    assert run.steps(1.1 * limit("kCudaTrainingBack") * LIMIT)[-1]
    assert all(run.steps(between)[STEPS:])


def test_few_tokens_never_pay():
    run = Run()
    run.x = torch.ones(8, HIDDEN)
    assert all(run.steps(0.0))
    run.x = torch.ones(9, HIDDEN)
    assert not run.steps(0.0)[-1]
    assert too_dense(run.choice, torch.ones(8, HIDDEN), run.gate), "a smaller micro-batch of the same step"
    assert not too_dense(run.choice, run.x, run.gate)


@pytest.mark.parametrize(
    ("density", "intermediate", "capacity"),
    [(0.0, 2048, 64), (0.0208, 2048, 64), (0.0211, 2048, 128), (0.02, 5632, 256), (0.9, 5632, 5632), (0.5, 40, 40)],
)
def test_capacity_is_a_power_of_two_that_holds_half_as_many_neurons_again(density, intermediate, capacity):
    assert needed_capacity(density, intermediate) == capacity


def test_a_late_sample_counts_when_it_arrives_and_in_deterministic_mode_is_waited_for(monkeypatch):
    monkeypatch.setattr(Sample, "arrived", lambda sample: False)
    assert all(Run().steps(0.005))
    torch.use_deterministic_algorithms(True)
    try:
        assert Run().steps(0.005, 5) == [True, False, False, False, False]
    finally:
        torch.use_deterministic_algorithms(False)


def test_weights_whose_version_tells_nothing_follow_begin_step():
    """Fused optimizers, FSDP2 and DeepSpeed write past the version; frozen weights never change."""
    choice, x = TrainingChoice(), torch.ones(TOKENS, HIDDEN)
    frozen = -torch.ones(INTERMEDIATE, HIDDEN)
    assert all(too_dense(choice, x, frozen) for _ in range(5))
    choice.begin_step()
    assert not any(too_dense(choice, x, frozen) for _ in range(5))


def test_copies_and_pickles_start_anew():
    run = Run()
    run.steps(0.005)
    for other in (copy.deepcopy(run.choice), pickle.loads(pickle.dumps(run.choice))):
        assert (other.density, other.capacity, other.sparse) == (None, None, False)
    assert run.choice.sparse


@pytest.mark.parametrize(
    ("union", "kinds", "by_columns", "dense"),
    [(0.3, 3, True, False), (0.15, 1, True, False), (0.5, 3, False, True), (0.36, 1, False, False)],
)
@pytest.mark.parametrize("runs", [False, True])
def test_blocks_whose_neighbours_share_train_by_columns(monkeypatch, union, kinds, by_columns, dense, runs):
    """Up to a union; and by pairs, also above the limit of density, where these are faster than columns. Where runs
    count, no capacity chooses between the two: see `test_where_runs_count_a_gpu_keeps_columns_whatever_is_asked`."""
    numbers = {"kCudaTrainingUnionLimits": ((math.inf, 0.4, 0.1, 0.4),), "kCudaColumnsDensity": 8.0}
    for name, number in numbers.items():
        monkeypatch.setitem(limits.read(), name, number)
    run, neurons = Run(), torch.arange(INTERMEDIATE)[:, None]
    run.x = torch.eye(HIDDEN).repeat(16, 1)  # tokens of 16 kinds; each of the used neurons is active in some
    active = ((torch.arange(HIDDEN) + neurons) % HIDDEN < kinds) & (neurons % 1000 < 1000 * union)
    with torch.no_grad():
        run.gate.copy_(torch.where(active, 1.0, -1.0))
    ways = []
    for _ in range(3):
        ways.append(too_dense(run.choice, run.x, run.gate, runs))
        run.choice.begin_step()
    assert run.choice.union == pytest.approx(union, abs=0.02)
    assert ways == [True, dense, dense]
    assert (run.choice.capacity == INTERMEDIATE) == by_columns


def test_where_runs_count_no_density_pays_by_itself():
    """As kernels that keep pairs know no runs, and where the union is not known nothing speaks for columns."""
    run = Run()
    with torch.no_grad():
        run.gate[1:] = -1.0
    for _ in range(3):
        assert too_dense(run.choice, run.x, run.gate, runs=True)
        run.choice.begin_step()
    assert not too_dense(run.choice, run.x, run.gate)


# In a patched block, which takes its tensors for a GPU's


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(dispatch_key, "device_class", lambda kind, index=None: ("cuda", "9.0"))
    for module in (choose, api, block_calls):  # in float32, too
        monkeypatch.setattr(module, "training_problem", lambda key: None)


def patched_model(density=0.005, backend="auto"):
    """A small Llama on the CPU kernels whose every block has about this density."""
    model = hf_twell.sparsify(tiny_llama(intermediate_size=688), backend=backend)
    for layer in model.model.layers:
        gate = layer.mlp.gate_proj.weight.data
        gate[torch.rand(len(gate)) >= 2 * density] = 0
    return model.train()


def watch(monkeypatch) -> list:
    """The capacity of each call of the operator from now on."""
    calls, fused = [], api.ffn
    monkeypatch.setattr(api, "ffn", lambda *a, **k: calls.append(k["capacity"]) or fused(*a, **k))
    return calls


def train(block, x, steps):
    for _ in range(steps):
        block(x).square().sum().backward()
        with torch.no_grad():
            for weight in block.parameters():
                weight -= 0.0 * weight.grad
                weight.grad = None


@needs_cpu_kernels
@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_block_moves_over_and_evaluation_is_left_alone(monkeypatch):
    block, calls, x = patched_model().model.layers[0].mlp, watch(monkeypatch), torch.randn(4, 16, 32)
    with torch.no_grad():
        block.eval()(x)
    assert calls == [None], "nothing is known yet, which means plain matmuls in training alone"
    calls.clear()
    train(block.train(), x, 1)
    assert calls == []
    assert block.twell_state.on_kernels is False
    train(block, x, 2)
    assert calls == [64, 64]
    assert block.twell_state.on_kernels is True
    with torch.no_grad():  # as re-entrant checkpointing runs it
        block(x)
        assert len(calls) == 3
        samples = count_samples(monkeypatch)
        block.eval()
        for _ in range(5):
            block(x)
    assert samples == []


@needs_cpu_kernels
@pytest.mark.usefixtures("as_on_a_gpu")
def test_where_nothing_learns_there_is_no_choice(monkeypatch):
    block, calls = patched_model().model.layers[0].mlp, watch(monkeypatch)
    block.requires_grad_(False)(torch.randn(4, 16, 32))
    assert (len(calls), block.twell_state.on_kernels) == (1, None)
    block(torch.randn(4, 16, 32, requires_grad=True))
    assert (len(calls), block.twell_state.on_kernels) == (1, False)


@needs_cpu_kernels
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("backend", "expected"), [("cpu", 3), ("reference", 0)])
def test_a_backend_asked_for_by_name_is_taken_at_every_density(monkeypatch, backend, expected):
    block, calls = patched_model(0.5, backend).model.layers[0].mlp, watch(monkeypatch)
    train(block, torch.randn(4, 16, 32), 3)
    assert len(calls) == expected


@needs_cpu_kernels
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_goes_the_way_of_its_forward(monkeypatch, use_reentrant):
    block, calls = patched_model().model.layers[0].mlp, watch(monkeypatch)
    x = torch.randn(4, 16, 32, requires_grad=True)
    for expected in (0, 2, 4):
        checkpoint(block, x, use_reentrant=use_reentrant).sum().backward()
        assert len(calls) == expected
        with torch.no_grad():
            block.gate_proj.weight += 0


@needs_cpu_kernels
def test_text_generated_in_a_step_goes_as_outside_of_it_where_no_kernels_train(monkeypatch):
    """Also where runs count, which only training does."""
    monkeypatch.setattr(dispatch_key, "device_class", lambda kind, index=None: ("cuda", "8.0"))
    model, batch = patched_model().model, {"input_ids": torch.zeros(1, 16, dtype=torch.long)}
    block, x = model.layers[0].mlp, torch.randn(1, 16, 32)
    penalty, keys = L1Penalty(model, 1.0, term="count", share=8), []
    penalty.begin_step([batch])
    with torch.no_grad():
        with penalty.micro_batch(batch):
            keys.append(block_calls.settle(block, x, block._read_weights(), reports=False)[0])
        keys.append(block_calls.settle(block.eval(), x, block._read_weights(), reports=False)[0])
    assert keys[0] == keys[1]


@needs_cpu_kernels
@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_compiled_block_keeps_the_choice_it_was_traced_with(monkeypatch):
    model = patched_model()
    block, x = model.model.layers[0].mlp, torch.randn(4, 16, 32)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(["hf_twell" in str(node.target) for node in graph.graph.nodes].count(True))
        return graph

    for traced in (0, 1):
        compiled = torch.compile(block, fullgraph=True, backend=backend)
        with torch._dynamo.config.patch(error_on_recompile=True):
            train(compiled, x, 3)
        assert graphs == [0, 1][: traced + 1]
        torch._dynamo.reset()
        train(block, x, 2)


@needs_cpu_kernels
@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_log_says_how_many_layers_have_moved_over(tmp_path):
    """Frozen blocks, whose weights' versions never change: the callback says when a step begins."""
    model = patched_model()
    model.model.layers[1].mlp.gate_proj.weight.data = torch.randn(688, 32)
    for layer in model.model.layers:
        layer.mlp.requires_grad_(False)
    args = TrainingArguments(
        str(tmp_path), max_steps=3, logging_steps=1, use_cpu=True, report_to=[], save_strategy="no",
        per_device_train_batch_size=4, gradient_accumulation_steps=2, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=one_step.rows(), data_collator=one_step.pad)
    trainer.add_callback(SparsityCallback(trainer, l1_weight=0.01))
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["twell/layers_on_kernels"] for row in rows] == [0, 2, 2]
    assert [row["twell/layer_01/on_kernels"] for row in rows] == [0, 0, 0]
    assert [row["twell/layer_02/on_kernels"] for row in rows] == [0, 1, 1]


def test_the_log_says_nothing_where_there_is_no_choice(tmp_path):
    _, logs = one_step.trainer_gradient()
    assert not [key for key in logs if "kernels" in key]


# In a compiled model, whose blocks change all at once


class Together:
    """Blocks of a compiled model, and the densities that their steps count."""

    def __init__(self, layers=2):
        self.model = ModelChoice()
        self.blocks = [Block(layer, INTERMEDIATE, TrainingChoice()) for layer in range(layers)]
        self.sampled = self.moved = 0

    def steps(self, *densities: float, unions=None, tokens=TOKENS, count=STEPS) -> tuple[bool, ...]:
        """Which blocks go to the kernels after so many steps."""

        def density():
            self.sampled += 1
            return torch.tensor(densities)

        def union():
            return None if unions is None else torch.tensor(unions)

        for _ in range(count):
            self.moved += self.model.end_step(self.blocks, tokens, density, union)
        return tuple(block.choice.sparse for block in self.blocks)

    def capacities(self):
        return tuple(block.choice.capacity for block in self.blocks)


def test_compiled_blocks_follow_their_mean_all_together():
    run = Together()
    assert run.steps(0.001, 2 * LIMIT) == (False, False)
    assert run.steps(0.001, 1.9 * LIMIT) == (True, True)
    assert run.steps(LIMIT, limit("kCudaTrainingBack") * LIMIT) == (True, True), "not dense enough to move back"
    assert run.steps(LIMIT, 1.6 * LIMIT) == (False, False)
    assert run.steps(LIMIT, limit("kCudaTrainingBack") * LIMIT) == (False, False)
    assert run.sampled == 5, "one in eight steps"
    assert run.moved == 1
    assert run.steps(0.001, 0.001) == (True, True)
    assert run.moved == 1, "told once"
    assert run.steps(0.0, 0.0, tokens=8) == (False, False)


def test_a_few_dense_layers_do_not_keep_a_compiled_model_from_the_kernels():
    assert Together(3).steps(0.001, 0.001, 0.9) == (True,) * 3
    assert Together(3).steps(0.001, 0.9, 0.9) == (False,) * 3


def test_compiled_blocks_at_the_limit_go_to_the_kernels_as_others_do(monkeypatch):
    monkeypatch.setitem(limits.read(), "kCudaTrainingLimits", ((math.inf, 2**-5),))
    assert Together().steps(2**-5, 2**-5) == (True, True)


def test_compiled_blocks_whose_runs_count_follow_the_mean_of_their_unions(monkeypatch):
    monkeypatch.setitem(limits.read(), "kCudaTrainingUnionLimits", ((8, 0.0, 0.0, 0.0), (math.inf, 0.4, 0.1, 0.4)))
    run, dense = Together(), (0.1, 0.1)
    assert run.steps(0.001, 0.001, unions=(0.3, 0.6)) == (False, False)
    assert run.steps(*dense, unions=(0.3, 0.45)) == (True, True)
    assert run.steps(*dense, unions=(0.4, 0.45)) == (True, True), "not so much above that they move back"
    assert run.steps(*dense, unions=(0.4, 0.5)) == (False, False)
    assert run.steps(*dense, unions=(0.4, 0.45)) == (False, False)
    assert run.steps(0.001, 0.001, unions=(0.001, 0.001), tokens=8) == (False, False)
    assert run.capacities() == (None, None), "they keep columns, which have none"


def test_the_step_after_decides_in_every_mode(monkeypatch):
    monkeypatch.setattr(Sample, "arrived", lambda sample: pytest.fail("depends on time"))
    run = Together()
    assert run.steps(0.001, 0.001, count=1) == (False, False)
    assert run.steps(1.0, 1.0, count=1) == (True, True)


def test_a_capacity_that_a_graph_was_made_for_is_kept_while_it_fits(monkeypatch):
    monkeypatch.setitem(limits.read(), "kCudaTrainingLimits", ((math.inf, 0.03),))
    run = Together()
    run.steps(0.015, 0.003)  # L0 of 31 and 6
    assert run.capacities() == (64, 64)
    run.steps(0.024, 0.003)  # 49
    assert run.capacities() == (64, 64)
    run.steps(0.026, 0.022)  # 53 and 45: both are sized anew
    assert run.capacities() == (128, 128)
    run.steps(0.001, 0.001)
    run.steps(0.9, 0.9)
    run.steps(0.001, 0.001)
    assert run.capacities() == (128, 128)


class FallsSilent(TrainerCallback):
    """Most neurons of all layers, dense until then, are shut after this step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            for layer in model.model.layers:
                layer.mlp.gate_proj.weight.data[3:] = 0


def train_until_silent(
    folder, compiled: bool, callbacks=(), steps=2 * STEPS, kind=Trainer, model=None, falls=FallsSilent, **arguments
):
    """The log of a run that starts dense and is at 0.4 % after the fourth step; kernels in each graph it compiled."""
    model, graphs, compile_model = model or tiny_llama(intermediate_size=688), [], torch.compile
    hf_twell.sparsify(model)

    def backend(graph, inputs):
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]  # of checkpoints, too
        graphs.append(sum("hf_twell.ffn" in str(node.target) for part in parts for node in part.graph.nodes))
        return aot_eager(graph, inputs)

    args = TrainingArguments(
        str(folder), max_steps=steps, logging_steps=1, use_cpu=True, report_to=[], save_strategy="no",
        per_device_train_batch_size=4, gradient_accumulation_steps=2, optim="sgd", learning_rate=0.05,
        disable_tqdm=True, torch_compile=compiled, **arguments,
    )  # fmt: skip
    words = torch.randint(3, 96, (64, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in words]
    trainer = kind(model, args, default_data_collator, train_dataset=data)
    trainer.add_callback(SparsityCallback(trainer, l1_weight=0.01))
    for callback in (falls(4), *callbacks):
        trainer.add_callback(callback)
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda model, **options: compile_model(model, backend=backend))
        trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row], graphs


@pytest.mark.slow
@needs_cpu_kernels
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", [Trainer, PackedTrainer])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiled_model_moves_over_at_once_and_the_log_says_so(tmp_path, monkeypatch, caplog, checkpointing, kind):
    rows, graphs = train_until_silent(tmp_path, compiled=True, kind=kind, gradient_checkpointing=checkpointing)
    assert caplog.text.count("the compiled model goes over to kernels") == 1
    # The ninth step counts less, the tenth decides.
    assert [row["twell/layers_on_kernels"] for row in rows] == [0] * 10 + [3] * 6
    assert [row["twell/layer_01/on_kernels"] for row in rows] == [0] * 10 + [1] * 6
    if kind is Trainer:
        assert graphs == [0, 3], "compiled for each way, all layers at once"
    else:
        assert (sum(graphs), graphs[-1]) == (1, 1), "a recipe compiles one layer"
    monkeypatch.undo()
    caplog.clear()
    plain, _ = train_until_silent(tmp_path, compiled=False)
    assert "goes over to kernels" not in caplog.text
    for mine, theirs in zip(rows, plain, strict=True):
        for key in ("loss", "grad_norm", "twell/density", "twell/l1"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-4), (mine["step"], key)
    assert not any("kernels" in key for row in plain for key in row)


class FallsUnevenlySilent(FallsSilent):
    """Layer by layer twice as many neurons are left, each active for about half of the tokens."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            for index, layer in enumerate(model.model.layers):
                layer.mlp.gate_proj.weight.data[56 * 2**index :] = 0


@pytest.mark.slow
@needs_cpu_kernels
@pytest.mark.usefixtures("as_on_a_gpu")
def test_layers_of_a_recipe_move_over_by_a_graph_for_each_capacity(tmp_path, monkeypatch):
    """More than the eight that PyTorch makes of one function, after which it leaves layers eager."""
    monkeypatch.setitem(limits.read(), "kCudaTrainingLimits", ((math.inf, 0.3),))
    model = tiny_llama(intermediate_size=4096, num_hidden_layers=8)
    model.model.embed_tokens.requires_grad_(False)  # the first layer is another graph: it gives no gradient back
    falls = FallsUnevenlySilent
    rows, graphs = train_until_silent(tmp_path, True, kind=PackedTrainer, model=model, falls=falls, steps=12)
    assert [row["twell/layers_on_kernels"] for row in rows] == [0] * 10 + [8] * 2
    assert graphs.count(1) == 7, "64, 128, ... 4096, which two layers have"
    assert set(graphs) == {0, 1}, "one layer each"


class WakesUp(TrainerCallback):
    """About a hundred neurons of each layer are active after one of these steps, and half of all after the other."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        woken = {15: 200, 31: None}
        if state.global_step in woken:
            for layer in model.model.layers:
                rows = slice(woken[state.global_step])
                layer.mlp.gate_proj.weight.data[rows] = layer.mlp.up_proj.weight.data[rows]


@pytest.mark.slow
@needs_cpu_kernels
@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_compiled_model_gets_more_capacity_and_goes_back(tmp_path, monkeypatch):
    monkeypatch.setitem(limits.read(), "kCudaTrainingLimits", ((math.inf, 0.2),))
    rows, graphs = train_until_silent(tmp_path, compiled=True, callbacks=[WakesUp()], steps=6 * STEPS)
    assert [row["twell/layers_on_kernels"] for row in rows] == [0] * 10 + [3] * 24 + [0] * 14
    assert graphs == [0, 3, 3], "for another capacity; plain matmuls are compiled already"


@pytest.mark.slow
@needs_cpu_kernels
@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_hand_written_loop_follows_too_and_layers_compiled_one_by_one(monkeypatch):
    model = patched_model()
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    penalty, batch = L1Penalty(model, 0.0), {"input_ids": torch.arange(64).view(4, 16)}
    ways = []
    for _ in range(4):
        for micro_batch in penalty.micro_batches([batch]):
            model(**micro_batch).logits.square().mean().backward()
        ways.append([layer.mlp.twell_state.on_kernels for layer in model.model.layers])
    assert ways == [[False] * 3] * 2 + [[True] * 3] * 2


@pytest.mark.slow
@needs_cpu_kernels
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("least_run", [8, 9])
def test_a_compiled_model_whose_runs_count_moves_over(monkeypatch, least_run):
    """By the union that its steps count, where runs are long; and the step's gradient is the same either way."""
    monkeypatch.setitem(limits.read(), "kCudaTrainingUnionLimits", ((math.inf, 0.4, 0.1, 0.4),))
    monkeypatch.setitem(limits.read(), "kCudaTrainingLeastRun", least_run)
    model, batch = patched_model(), {"input_ids": torch.arange(64).view(4, 16)}
    torch._dynamo.reset()
    compiled, penalty = torch.compile(model, backend="aot_eager"), L1Penalty(model, 0.5, term="count", share=8)
    ways, gradients = [], []
    for _ in range(4):
        for micro_batch in penalty.micro_batches([batch]):
            compiled(**micro_batch).logits.square().mean().backward()
        gradients.append(one_step.flat_gradient(model))
        model.zero_grad()
        ways.append([layer.mlp.twell_state.on_kernels for layer in model.model.layers])
    assert ways == [[False] * 3] * 2 + [[least_run == 8] * 3] * 2
    assert (gradients[3] - gradients[0]).norm() <= 1e-5 * gradients[0].norm()


@pytest.mark.slow
@needs_cpu_kernels
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("backend", ["cpu", "auto"])
def test_compiled_blocks_that_have_no_choice(tmp_path, monkeypatch, backend):
    """A backend by name is never compiled anew; where no kernels train, nothing is logged."""
    if backend == "auto":
        monkeypatch.undo()
    model, batch = patched_model(backend=backend), {"input_ids": torch.arange(64).view(4, 16)}
    torch._dynamo.reset()
    compiled, penalty = torch.compile(model, backend="aot_eager"), L1Penalty(model, 0.0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            for micro_batch in penalty.micro_batches([batch]):
                compiled(**micro_batch).logits.square().mean().backward()
    assert {layer.mlp.twell_state.on_kernels for layer in model.model.layers} == {True if backend == "cpu" else None}


# The operator


@needs_cpu_kernels
def test_capacity_changes_no_result():
    case = make_case(70, 40, 172, 0.06, torch.float32, biases=True)
    expected = run(api.ffn, case, torch.float32, backend="cpu")
    for capacity in (1, 7, 172, 100_000):
        for name, value in run(api.ffn, case, torch.float32, backend="cpu", capacity=capacity).items():
            torch.testing.assert_close(value, expected[name])
    with pytest.raises(ValueError, match="capacity=0; give a number of neurons of at least 1"):
        api.ffn(**case, capacity=0)


@pytest.mark.parametrize(("intermediate", "capacity"), [(8, 8), (1376, 64), (5632, 128), (8192, 192), (14336, 352)])
def test_the_default_capacity_on_a_gpu(intermediate, capacity):
    assert saved_capacity("cuda", intermediate) == capacity


@needs_cpu_kernels
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("by_columns", [True, False])
def test_shapes_without_data(device, gated, by_columns):
    tokens, hidden, intermediate, capacity = (3, 100), 40, 172, 16

    def empty(*shape, **options):
        return torch.empty(*shape, dtype=torch.bfloat16, device=device, **options)

    with FakeTensorMode(allow_non_fake_inputs=False):
        x, w_up = empty(*tokens, hidden), empty(intermediate, hidden)
        w_down = empty(intermediate, hidden).t() if by_columns else empty(hidden, intermediate)
        w_gate, bias = w_up if gated else None, empty(intermediate)
        tally = torch.empty(1 + intermediate, device=device)
        arguments = (x, w_up, w_down, w_gate, bias, empty(hidden), bias if gated else None, None, None)
        y, report, state = torch.ops.hf_twell.ffn(*arguments, tally, capacity)
        assert (y.shape, y.dtype, y.device.type) == (x.shape, x.dtype, device)
        assert (report.shape, report.dtype) == ((173,), torch.float32)
        assert state.dtype == torch.uint8
        entries = 3 * 192  # 172 rounded up: less than 256 + 20 * 16
        pairs = 3 * 128 * capacity * 2
        expected = 3 * (32 + 32 + 32) + 18 * entries + pairs * (2 if gated else 1)  # 6 groups of entries take 24 of 32
        if device == "cpu":
            expected = 4 * 300 + 2 * 300 * 16 * (3 if gated else 2)
        assert state.shape == (expected,)
        y, report, state = torch.ops.hf_twell.ffn(*arguments, None, 0)
        assert report.numel() == state.numel() == 0
        assert torch.ops.hf_twell.ffn(empty(0, hidden), *arguments[1:], None, capacity)[2].numel() == 0
        gradients = torch.ops.hf_twell.ffn_backward(
            y, state, x, w_up, w_down, w_gate, bias, bias if gated else None, None, None, capacity, 0b1111111
        )
        assert [g.shape for g in gradients[:3]] == [x.shape, w_up.shape, w_down.shape]
        assert gradients[2].stride() == w_down.stride()
        assert gradients[3].shape == (w_up.shape if gated else (0,))
        assert [g.numel() for g in gradients[4:]] == [172, 40, 172, 0]


@needs_cpu_kernels
@pytest.mark.parametrize("asked", [None, 32])
@pytest.mark.parametrize("share", [None, 64])
def test_where_runs_count_a_gpu_keeps_columns_whatever_is_asked(share, asked):
    """By a capacity of F, as kernels that keep pairs know no runs."""
    capacities = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.hf_twell.ffn.default:
                capacities.append(args[10])
            return function(*args, **(kwargs or {}))

    def empty(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16, device="cuda")

    key = CallKey("cuda", "9.0", torch.bfloat16, torch.bfloat16, TOKENS, HIDDEN, INTERMEDIATE, training=True)
    with FakeTensorMode(), Watch():
        x, w_up, w_down = empty(1, TOKENS, HIDDEN), empty(INTERMEDIATE, HIDDEN), empty(HIDDEN, INTERMEDIATE)
        runs = None if share is None else runs_of({"inputs_embeds": x}, share)
        terms = {"count_scale": torch.ones((), device="cuda"), "runs": runs}
        api.ffn(x, w_up, w_down, **terms, capacity=asked, key=key._replace(runs=share is not None), way="kernels")
    assert capacities == [(asked or saved_capacity("cuda", INTERMEDIATE)) if share is None else INTERMEDIATE]


@pytest.mark.parametrize(
    ("dtype", "capability", "message"),
    [
        (torch.float32, "9.0", r"in torch\.float32; its training kernels take bfloat16 and float16"),
        (torch.bfloat16, "8.0", "on a GPU of compute capability 8.0; its training kernels need 9.0"),
    ],
)
def test_training_that_cuda_kernels_do_not_take_is_refused_by_name(dtype, capability, message):
    asked = CallKey("cuda", capability, dtype, dtype, 3, 8, 4, training=True)
    with pytest.raises(ValueError, match=f"backend 'cuda' cannot compute this: gradients are wanted {message}"):
        api._kernels_take(asked, "cuda")
    assert api._kernels_take(asked._replace(training=False), "cuda")
    api._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="plain PyTorch") as caught:
        assert not any(api._kernels_take(asked, "auto") for _ in range(3))
    (warning,) = [str(entry.message) for entry in caught]
    assert re.match(f"hf_twell trains with plain PyTorch: gradients are wanted {message}", warning)
    assert "torch.no_grad()" in warning


@pytest.mark.parametrize("set_up", ["evaluation", "compiling", "by name"])
def test_fallbacks_that_are_no_surprise_are_not_told(set_up):
    x, w = torch.zeros(3, 8, dtype=torch.bfloat16), torch.zeros(4, 8, dtype=torch.bfloat16)
    asked = CallKey("cuda", "8.0", x.dtype, w.dtype, 3, 8, 4, training=set_up != "evaluation")
    api._warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if set_up == "by name":
            api.ffn(x, w, w.t().contiguous().requires_grad_(), backend="reference")
        else:
            taken = api._kernels_take(asked._replace(compiled=set_up == "compiling"), "auto")
            assert taken == (set_up == "evaluation")
