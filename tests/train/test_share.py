"""The count term that neighbouring tokens share: one gradient and one union, however a step is cut up and laid out."""

import math

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.testing import CompileCounter

from hf_twell import L1Penalty, sparsify
from hf_twell.blocks.batches import runs_of
from hf_twell.dispatch import limits
from hf_twell.files.checkpoints import read_state
from hf_twell.ops import build, reference
from hf_twell.train.controller import DensityController
from tests import one_step
from tests.conftest import one_of, tiny_llama, training_rows
from tests.ffn_cases import Operators
from tests.kernels.test_cuda_training import _no_hopper
from tests.one_step import SHARE
from tests.train.test_target import SAVE_STEPS, STEPS, WARMUP_STEPS, make_trainer

pytestmark = pytest.mark.numeric

TERM = {"term": "count", "share": SHARE}
LAYOUTS = list(one_step.COLLATORS)
needs_cpu_kernels = pytest.mark.skipif(
    not build.status("cpu", build=True).available, reason=build.status("cpu", build=True).reason
)
BACKENDS = ["auto", pytest.param("cpu", marks=needs_cpu_kernels)]  # plain matmuls, and the kernels


@pytest.fixture(scope="module")
def truth():
    return one_step.shared_gradient()


def assert_same(gradient, union, truth):
    expected, expected_union = truth
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()
    assert union == pytest.approx(expected_union)


def test_the_term_is_most_of_the_gradient_and_its_runs_much_of_it(truth):
    assert one_step.trainer_gradient(l1_weight=None)[0].norm() < 0.5 * truth[0].norm()
    tokens_alone, _ = one_step.loop_gradient(1, term="count")
    assert (tokens_alone - truth[0]).norm() > 0.1 * truth[0].norm()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_hand_written_loop(truth, layout, micro_batches, backend):
    with Operators() as ran:
        gradient, report = one_step.loop_gradient(micro_batches, layout=layout, backend=backend, **TERM)
    assert_same(gradient, report[f"union_{SHARE}"], truth)
    by_kernels = len(report["layers"]) * micro_batches if backend == "cpu" else 0
    assert ran.names.count("hf_twell.ffn_backward.default") == by_kernels
    assert not any("activation" in name for name in ran.names), "kernels between plain matmuls know no runs"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("accumulation", one_of(2, [1, 2, 4]))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trainer(truth, layout, accumulation, backend):
    gradient, logs = one_step.trainer_gradient("Trainer", layout, accumulation, share=SHARE, backend=backend)
    assert_same(gradient, logs[f"twell/union_{SHARE}"], truth)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(truth, use_reentrant, backend):
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    gradient, logs = one_step.trainer_gradient(accumulation=2, share=SHARE, backend=backend, **options)
    assert_same(gradient, logs[f"twell/union_{SHARE}"], truth)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_blocks(truth, backend):
    def compiled(model):
        for layer in model.model.layers:
            layer.mlp.compile(fullgraph=True)
        return model

    gradient, report = one_step.loop_gradient(1, wrap=compiled, backend=backend, **TERM)
    assert_same(gradient, report[f"union_{SHARE}"], truth)


def sparse_model(backend="auto", density=0.05):
    """A small Llama of which about so many neurons of each token are active."""
    model = sparsify(tiny_llama(hidden_size=64, intermediate_size=1024), backend=backend)
    for layer in model.model.layers:
        gate = layer.mlp.gate_proj.weight.data
        gate[torch.rand(len(gate), generator=torch.Generator().manual_seed(3)) >= 2 * density] = 0
    return model.train()


def step(model, batches, wrap=lambda model: model) -> tuple[torch.Tensor, dict]:
    """A step's gradient and report."""
    penalty, forward = L1Penalty(model, one_step.L1_WEIGHT, **TERM), wrap(model)
    for batch in penalty.micro_batches(batches):
        forward(**batch, num_items_in_batch=one_step.LABELS).loss.backward()
    return one_step.flat_gradient(model), penalty.report()


@needs_cpu_kernels
@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_where_few_neurons_are_active_kernels_train_by_themselves(use_reentrant):
    """And the forward of a checkpoint goes their way, too."""
    batches = [one_step.pad(one_step.rows()[i : i + 4], side="left") for i in (0, 4)]
    expected, report = step(sparse_model("reference"), batches)
    model = sparse_model()
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with Operators() as ran:
        gradient, found = step(model, batches)
    assert_same(gradient, found[f"union_{SHARE}"], (expected, report[f"union_{SHARE}"]))
    assert found["layers"] == [pytest.approx(layer) for layer in report["layers"]]
    layers = len(found["layers"])
    assert ran.names.count("hf_twell.ffn_backward.default") == 2 * layers
    forwards = [ran.names.count(f"hf_twell.{name}.default") for name in ("ffn", "infer")]
    # Without gradients a reentrant checkpoint's first forward keeps nothing.
    assert forwards == [(2 if use_reentrant is None else 4) * layers - (2 * layers if use_reentrant else 0),
                        2 * layers if use_reentrant else 0]  # fmt: skip


@needs_cpu_kernels
def test_kernels_train_under_autocast():
    """As exact as plain matmuls are there, and nearer to these than both are to the truth."""
    batches = [one_step.pad(one_step.rows())]
    expected, report = step(sparse_model("reference", density=0.01), batches)
    found = {}
    for backend in ("reference", "auto"):
        with torch.autocast("cpu", torch.bfloat16), Operators() as ran:
            found[backend], _ = step(sparse_model(backend, density=0.01), batches)
    assert ran.names.count("hf_twell.ffn_backward.default") == len(report["layers"])
    error = (found["reference"] - expected).norm()
    assert (found["auto"] - expected).norm() <= 2 * error
    assert (found["auto"] - found["reference"]).norm() <= error


@pytest.mark.slow
@needs_cpu_kernels
def test_a_compiled_model_whose_density_nobody_knows_takes_plain_matmuls():
    """On a CPU, where the operator follows it by itself, but not where runs count. Kernels by name it takes."""
    batches = [one_step.pad(one_step.rows())]
    expected, report = step(sparse_model("reference"), batches)
    for backend, kernels in (("auto", 0), ("cpu", 1)):
        graphs = []

        def count(graph, inputs, graphs=graphs):
            graphs.append(sum("hf_twell.ffn" in str(node.target) for node in graph.graph.nodes))
            return aot_eager(graph, inputs)

        torch._dynamo.reset()
        model = sparse_model(backend)
        gradient, found = step(model, batches, wrap=lambda model, count=count: torch.compile(model, backend=count))
        assert_same(gradient, found[f"union_{SHARE}"], (expected, report[f"union_{SHARE}"]))
        assert sum(graphs) == kernels * len(report["layers"])


# On a GPU, in bfloat16


def on_gpu(backend, dtype=torch.bfloat16):
    """Of weights that bfloat16 holds, in any type."""
    return sparsify(sparse_model().bfloat16().to("cuda", dtype), backend=backend)


def gpu_batches(size):
    batches = [one_step.pad(one_step.rows()[i : i + size], side="left") for i in range(0, 8, size)]
    return [{name: value.cuda() for name, value in batch.items()} for batch in batches]


@pytest.mark.gpu
@pytest.mark.skipif(bool(_no_hopper()), reason=_no_hopper())
@pytest.mark.parametrize("setting", ["eager", "reentrant", "not reentrant", "compiled"])
def test_kernels_train_on_a_gpu(setting):
    """As exact as plain matmuls in bfloat16 are."""
    batches, union = gpu_batches(4), f"union_{SHARE}"
    expected, _ = step(on_gpu("reference", torch.float32), batches)
    plain, report = step(on_gpu("reference"), batches)
    model = on_gpu("cuda")
    if "reentrant" in setting:
        model.gradient_checkpointing_enable({"use_reentrant": setting == "reentrant"})
    if setting == "compiled":
        torch._dynamo.reset()
        gradient, found = step(model, batches, wrap=torch.compile)
    else:
        with Operators() as ran:
            gradient, found = step(model, batches)
        assert ran.names.count("hf_twell.ffn_backward.default") == 2 * len(found["layers"])
    assert (gradient - expected).norm() <= 2 * (plain - expected).norm()
    assert found[union] == pytest.approx(report[union], rel=0.02), "gates near zero are rounded to either side"


@pytest.mark.gpu
@pytest.mark.skipif(bool(_no_hopper()), reason=_no_hopper())
@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_on_a_gpu_move_over_by_their_union(monkeypatch, compiled):
    monkeypatch.setitem(limits.read(), "kCudaTrainingUnionLimits", ((math.inf, 0.9, 0.0, 0.9),))
    monkeypatch.setitem(limits.read(), "kCudaTrainingLeastRun", SHARE)
    batches, model = gpu_batches(8), on_gpu("auto")  # 248 tokens, so that a sample has neighbours
    expected, _ = step(on_gpu("reference", torch.float32), batches)
    torch._dynamo.reset()
    forward = torch.compile(model) if compiled else model
    penalty, gradients, ways = L1Penalty(model, one_step.L1_WEIGHT, **TERM), [], []
    for _ in range(4):
        model.zero_grad()
        for batch in penalty.micro_batches(batches):
            forward(**batch, num_items_in_batch=one_step.LABELS).loss.backward()
        torch.cuda.synchronize()
        gradients.append(one_step.flat_gradient(model))
        ways.append({layer.mlp.twell_state.on_kernels for layer in model.model.layers})
    assert (ways[0], ways[-1]) == ({False}, {True})
    assert (gradients[-1] - expected).norm() <= 2 * (gradients[0] - expected).norm()


def test_a_compiled_block_is_compiled_once():
    """As regional compilation does it: layers share one graph, and every micro-batch goes through it."""
    model, counter = sparsify(tiny_llama()).train(), CompileCounter()
    for layer in model.model.layers:
        layer.mlp.compile(backend=counter, fullgraph=True)
    penalty = L1Penalty(model, 1.0, **TERM)
    for _ in range(2):
        batches = [{"input_ids": torch.randint(3, 96, (2, 20))} for _ in range(2)]
        for batch in penalty.micro_batches(batches):
            model(**batch).logits.sum().backward()
    assert counter.frame_count == 1
    assert penalty.report()[f"union_{SHARE}"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_nothing_waits_and_compiled_is_as_eager():
    """At a size at which Inductor fuses sums over tokens, runs and neurons."""
    batch, width = {"input_ids": torch.zeros(16, 1000, dtype=torch.long, device="cuda")}, 1024
    gate = (torch.randn(16, 1000, width, device="cuda", dtype=torch.bfloat16) - 1).requires_grad_()
    up = torch.randn_like(gate)
    unions, tally = reference.new_tally(1, "cuda"), reference.new_tally(1 + width, "cuda")
    scale = torch.tensor(0.1, device="cuda")

    def middle(gate, runs):
        active = reference.inject_count(gate.relu(), scale, None, runs, unions)
        return reference.inject_l1(active * up, None, None, tally)

    def step(middle) -> list[torch.Tensor]:
        gate.grad = None
        for each in (unions, tally):
            each.grad.zero_()
        middle(gate, runs_of(batch, 64)).backward(torch.ones_like(gate))
        return [gate.grad, unions.grad.clone(), tally.grad[1:].clone()]

    expected, compiled = step(middle), torch.compile(middle, fullgraph=True)
    step(compiled)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step(compiled)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    runs = [run for row in gate.detach().relu().unbind() for run in row.split(64)]
    assert expected[1].item() == pytest.approx(sum(len(run) * (run > 0).any(0).sum().item() for run in runs))
    torch.testing.assert_close(found[1:], expected[1:], rtol=1e-6, atol=0)
    # Eager rounds the slopes to bfloat16 along the way, compiled at the end.
    assert (found[0] - expected[0]).float().norm() <= 2**-7 * expected[0].float().norm()


def test_runs_begin_at_first_tokens_and_documents_and_cross_no_row():
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]])
    runs = runs_of({"input_ids": mask, "attention_mask": mask}, 2)
    assert listed(runs) == [[2, 3], [4, 5], [6], [7, 8], [9]]
    assert runs.run.tolist() == [8, 8, 0, 0, 1, 1, 2, 3, 3, 4, 8, 8, 8, 8]
    assert len(runs.tokens) == 2 * 4 + 1, "by the shape alone"
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 0]])
    packed = runs_of({"input_ids": positions, "position_ids": positions}, 4)
    assert listed(packed) == [[0, 1, 2], [3, 4, 5, 6], [7], [8], [9]]
    left = {"input_ids": mask, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    assert listed(runs_of(left, 2)) == listed(runs)
    whole = runs_of({"input_ids": torch.zeros(2, 4, dtype=torch.long)}, 4)
    assert listed(whole) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def listed(runs) -> list[list[int]]:
    found = [[place for place in run if place >= 0] for run in runs.tokens.tolist()]
    assert not found.pop(), "the last is of padding"
    return [run for run in found if run]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equally_strong_tokens_take_equal_parts_and_padding_none(dtype):
    active = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.5, 0.25], [1.0, torch.nan]], dtype=dtype, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0]])
    runs = runs_of({"input_ids": mask, "attention_mask": mask}, 4)
    unions, scale = reference.new_tally(1), torch.tensor(0.5)
    out = reference.inject_count(active[None], scale, mask.float(), runs, unions)
    out.backward(torch.zeros_like(out))
    value = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64, requires_grad=True)
    (strong, middle, weak) = torch.autograd.grad(torch.tanh(value / 0.2).sum(), value)[0].tolist()
    expected = [[strong + 3 * strong / 2, 0], [strong + 3 * strong / 2, 0], [middle, weak + 3 * weak], [0, 0]]
    # In the arithmetic of the block: 1 - tanh^2 near 1, a product and a quotient.
    size = torch.finfo(dtype).eps * 8 / 0.2
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(active.grad.double() / 0.5, expected, rtol=0, atol=size)
    assert unions.grad.tolist() == [3 * 2], "both neurons, for each of the run's three tokens"


@pytest.mark.slow
def test_unions_are_exact_under_autocast():
    model = sparsify(tiny_llama(), backend="reference").train()
    penalty, ids = L1Penalty(model, 0.0, **TERM), torch.arange(1024).view(16, 64) % 90 + 3
    seen = []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].unflatten(1, (-1, SHARE))))
    for micro_batch in penalty.micro_batches([{"input_ids": ids}]):
        with torch.autocast("cpu"):
            loss = model(**micro_batch).logits.sum()
        loss.backward()
    report = penalty.report()
    for layer, h in zip(report["layers"], seen, strict=True):
        assert layer[f"union_{SHARE}"] == pytest.approx((h != 0).any(2).double().mean().item(), abs=1e-9)


def test_a_union_is_steered_as_the_density_of_independent_tokens():
    """Also near 1, where it hardly moves."""
    unions, l1 = torch.tensor([0.999, 0.998, 0.98, 0.9, 0.6, 0.4, 0.27, 0.24]), torch.tensor([20.0])
    union = DensityController(0.25, steps=8, is_union=True)
    density = DensityController(-math.log1p(-0.25), steps=8)
    for step, seen in enumerate(unions):
        progress = min(1.0, (step + 1) / 4)
        weights = [
            controller.update(share.view(1), l1, progress)
            for controller, share in ((union, seen), (density, -(-seen).log1p()))
        ]
        torch.testing.assert_close(*weights, rtol=2e-4, atol=0)  # float32 near 1
        torch.testing.assert_close(-(-union.setpoint(progress)).log1p(), density.setpoint(progress), rtol=2e-4, atol=0)
    assert union.setpoint(1.0).item() == pytest.approx(0.25)
    assert union.missed() == {}


@pytest.mark.slow
def test_a_run_reaches_and_holds_a_union_and_resumes(tmp_path):
    options = {"target_union": 0.5, "term": "count", "share": 16, "layer_shares": "free", "warmup_steps": WARMUP_STEPS}
    whole = make_trainer(tmp_path, **options)
    whole.train()
    rows = training_rows(whole)
    late = [rows[step]["twell/union_16"] for step in range(STEPS - 40, STEPS + 1)]
    assert all(0.45 < union < 0.56 for union in late), late
    assert rows[STEPS]["twell/target"] == pytest.approx(0.5)
    layers = [rows[STEPS][f"twell/layer_{layer:02d}/union_16"] for layer in range(3)]
    assert sum(layers) / 3 == pytest.approx(late[-1])
    state = read_state(tmp_path / f"checkpoint-{SAVE_STEPS}")
    assert (state["target_union"], state["term"], state["share"]) == (0.5, "count", 16)
    assert "target_density" not in state
    resumed = make_trainer(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVE_STEPS}"))
    for step, row in training_rows(resumed).items():
        assert row == pytest.approx(rows[step], rel=1e-4, abs=1e-5), step


def test_a_run_that_goes_on_to_a_union_begins_its_path_anew(tmp_path):
    """What the checkpoint's controller knows is of densities."""
    options = {"term": "count", "share": 16, "warmup_steps": WARMUP_STEPS}
    first = make_trainer(tmp_path, target_density=0.1, **options)
    first.args.max_steps = first.args.save_steps = 2
    first.train()
    then = make_trainer(tmp_path, target_union=0.4, **options)
    then.args.max_steps = 3
    then.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    row = training_rows(then)[3]
    assert row["twell/target"] == pytest.approx(row["twell/union_16"], rel=0.05)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"term": "l1", "share": 64}, "share=64 goes with term='count' alone"),
        ({"term": "count", "share": 1}, "share=1; give a whole number of tokens of at least 2"),
        ({"term": "count", "share": True}, "share=True; give a whole number"),
    ],
)
def test_what_cannot_be_shared_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        L1Penalty(sparsify(tiny_llama()), 1.0, **options)
