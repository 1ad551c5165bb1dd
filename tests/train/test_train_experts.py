"""The terms of sparse training in mixtures of experts, compared with their definition by plain autograd."""

import functools
import sys
import tempfile

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Trainer

from hf_twell import L1Penalty, SparsityCallback, measure_sparsity, sparsify
from hf_twell.blocks.architectures import find_ffns
from hf_twell.ops import experts, reference
from tests.conftest import in_two_processes, leave
from tests.mixtures import by_hand, mixture
from tests.one_step import LABELS, LENGTHS, KeepGradient, flat_gradient, make_trainer, pad, rows

pytestmark = pytest.mark.numeric

WEIGHT, SHARE = 3.0, 8


def smooth(active: torch.Tensor) -> torch.Tensor:
    return torch.tanh(active / 0.2)


def terms_of(site, term: str, mask: torch.Tensor):
    """A hook that computes one block's term from what it is called with, token by token and expert by expert."""

    def experts_hook(module, args):
        total, of_runs = 0.0, {}
        for token, own in enumerate(inputs_of(module, args)):
            row, place = divmod(token, mask.shape[1])
            if not mask[row, place]:
                continue
            for expert, x_D, w in own:
                gate, up = F.linear(x_D, w).chunk(2)
                active = gate.relu()
                total = total + ((active * up).abs().sum() if term == "l1" else smooth(active).sum())
                of_runs.setdefault((row, place // SHARE), {}).setdefault(expert, []).append(active)
        if term == "share":
            for (row, run), each in of_runs.items():
                length = min(SHARE, LENGTHS[row] - run * SHARE)
                strongest = sum(smooth(torch.stack(actives).amax(0)).sum() for actives in each.values())
                total = total + length * strongest
        site.terms.append(total / mask.sum())

    def dense_hook(module, args):
        gate, up = module.gate_proj(args[0]).relu(), module.up_proj(args[0])
        values = (gate * up).abs() if term == "l1" else smooth(gate)
        values = values.flatten(0, -2) * mask.view(-1, 1)
        total = values.sum()
        if term == "share":
            for row, length in enumerate(LENGTHS):
                for run in gate.view(*mask.shape, -1)[row, :length].split(SHARE):
                    total = total + len(run) * smooth(run.amax(0)).sum()
        site.terms.append(total / mask.sum())

    return experts_hook if hasattr(site.module, "gate_up_proj") else dense_hook


def inputs_of(module, args) -> list[list[tuple]]:
    """Of each token its experts, what each gets of it, and that expert's gate and up."""
    if len(args) == 3:
        x, index, _ = args
        return [[(e, x_D, module.gate_up_proj[e]) for e in own] for x_D, own in zip(x, index.tolist(), strict=True)]
    by_expert = args[0].unflatten(0, (module.num_experts, -1))  # Llama 4's: all tokens, times their scores
    return [
        [(e, x_D, module.gate_up_proj[e].T) for e, x_D in enumerate(x_ED) if x_D.any()] for x_ED in by_expert.unbind(1)
    ]


class Block:
    def __init__(self, module, terms):
        self.module, self.terms = module, terms


@functools.cache
def truth(name: str, term: str) -> torch.Tensor:
    """Task loss + weight x the mean over blocks of the term, over all rows at once."""
    model, batch, terms = by_hand(mixture(name)).train(), pad(rows()), []
    for site in find_ffns(model):
        site.module.register_forward_pre_hook(terms_of(Block(site.module, terms), term, batch["attention_mask"]))
    loss = model(**batch, num_items_in_batch=LABELS).loss
    (loss + WEIGHT * sum(terms) / len(terms)).backward()
    return flat_gradient(model)


def trained(name: str, term: str, accumulation: int = 1, processes: int = 1, **arguments) -> tuple:
    """The gradient of a real Trainer's step, and its log row."""
    arguments["per_device_train_batch_size"] = len(LENGTHS) // accumulation // processes
    arguments["gradient_accumulation_steps"] = accumulation
    trainer = make_trainer(tempfile.mkdtemp(), model=sparsify(mixture(name)), **arguments)
    keep = KeepGradient()
    trainer.add_callback(keep)
    chosen = {"l1_weight": WEIGHT} if term == "l1" else {"target_density": 0.25, "term": "count"}
    chosen |= {"share": SHARE} if term == "share" else {}
    callback = SparsityCallback(trainer, **chosen)
    callback.penalty.l1_weight = WEIGHT
    trainer.add_callback(callback)
    trainer.train()
    return keep.gradient, trainer.state.log_history[0]


def assert_same(gradient, wanted):
    assert (gradient - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("name", ["olmoe", "qwen2_moe", "qwen3_moe", "llama4_text"])
@pytest.mark.parametrize("term", ["l1", "count"])
def test_the_trainers_step_is_the_definitions(name, term):
    for accumulation in (1, 4):
        gradient, logs = trained(name, term, accumulation)
        assert_same(gradient, truth(name, term))
    report = measure_sparsity(sparsify(mixture(name)), [pad(rows())])
    for key in ("l0", "density", "l1", "dead"):
        assert logs[f"twell/{key}"] == pytest.approx(report[key], rel=1e-5), key
    mixed = ["_experts", "_shared_expert"]
    parts = {"qwen2_moe": [mixed] * 2, "llama4_text": [["_feed_forward"], mixed] * 2}.get(name, [[""], [""]])
    parts = [(layer, part) for layer, of_layer in enumerate(parts) for part in of_layer]
    for (layer, part), figures in zip(parts, report["layers"], strict=True):
        assert logs[f"twell/layer_{layer:02d}{part}/dead"] == pytest.approx(figures["dead"], rel=1e-5)
        assert logs[f"twell/layer_{layer:02d}{part}/l0"] == pytest.approx(figures["l0"], rel=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_once(reentrant):
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    gradient, logs = trained("qwen2_moe", "l1", 2, **options)
    assert_same(gradient, truth("qwen2_moe", "l1"))
    assert logs["twell/l0"] == pytest.approx(trained("qwen2_moe", "l1")[1]["twell/l0"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["olmoe", "llama4_text"])
def test_a_compiled_model_learns_the_same(name):
    """In one graph, where bfloat16 goes by the grouped matmul."""
    results = []
    for compiled in (False, True):
        model = sparsify(mixture(name)).train()
        forward = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        penalty = L1Penalty(model, WEIGHT)
        for batch in penalty.micro_batches([pad(rows())]):
            with torch.autocast("cpu", torch.bfloat16):
                forward(**batch, num_items_in_batch=LABELS).loss.backward()
        results.append((flat_gradient(model), penalty.report()["l0"]))
    (eager, l0), (compiled, of_compiled) = results
    assert (compiled - eager).norm() <= 1e-2 * eager.norm()
    assert of_compiled == pytest.approx(l0, rel=1e-2)


@pytest.mark.slow
def test_two_processes(tmp_path):
    output = tmp_path / "gradient.pt"
    in_two_processes("tests.train.test_train_experts", output)
    gradient, logs = torch.load(output)
    assert_same(gradient, truth("qwen2_moe", "l1"))
    assert logs["twell/dead"] == pytest.approx(trained("qwen2_moe", "l1")[1]["twell/dead"])


@pytest.mark.parametrize("sizes", [(6, 24, 32), (5, 7, 9)])  # by the grouped matmul, and expert by expert
@pytest.mark.parametrize("routing", ["spread", "all to one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_routed_is_the_reference(sizes, routing, dtype):
    """Result and all gradients."""
    number, width, hidden = sizes
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = 17
    x, gate_up, down = normal(tokens, hidden), normal(number, 2 * width, hidden) / 4, normal(number, hidden, width)
    index = torch.stack([torch.randperm(number, generator=generator)[:2] for _ in range(tokens)])
    if routing == "all to one":
        index = torch.tensor([[3, 1]]).expand(tokens, 2)
    weight = normal(tokens, 2).softmax(-1)
    results = []
    for kind in (dtype, dtype, torch.float64):
        leaves = [t.to(dtype).to(kind).requires_grad_() for t in (x, weight, gate_up, down)]
        compute = experts.experts if results else experts.routed
        y = compute(leaves[0], index, *leaves[1:])
        y.backward(torch.ones_like(y))
        results.append([y.detach().double(), *(leaf.grad.double() for leaf in leaves)])
    for mine, plain, wanted in zip(*results, strict=True):
        assert mine.shape == wanted.shape
        assert (mine - wanted).norm() <= 2 * (plain - wanted).norm() + 1e-6 * wanted.norm()


@pytest.mark.parametrize("width", [24, 7])
def test_no_tokens(width):
    gate_up, down = torch.randn(6, 2 * width, 32, requires_grad=True), torch.randn(6, 32, width, requires_grad=True)
    tally = reference.new_tally(6 + 1 + 6 * width)
    none, index = torch.zeros(0, 32), torch.zeros(0, 2, dtype=torch.long)
    y = experts.routed(none, index, torch.zeros(0, 2), gate_up, down, l1_scale=torch.ones(()), tally=tally)
    assert y.shape == (0, 32)
    y.sum().backward()
    for leaf in (gate_up, down, tally):
        assert not leaf.grad.any()


@pytest.mark.parametrize("name", ["olmoe", "qwen2_moe", "llama4_text"])
def test_a_count_that_neighbours_share(name):
    """Gradient, and the reported union: the mean over tokens of that of a token's run."""
    for accumulation in (1, 4):
        gradient, logs = trained(name, "share", accumulation)
        assert_same(gradient, truth(name, "share"))
    assert logs[f"twell/union_{SHARE}"] == pytest.approx(union_by_hand(name), rel=1e-5)


def union_by_hand(name: str) -> float:
    model, batch, unions = by_hand(mixture(name)), pad(rows()), []
    mask = batch["attention_mask"]

    def hook(module, args):
        total, active, own = 0.0, {}, {}
        if hasattr(module, "gate_proj"):
            inputs = [[(None, x_D, module.gate_proj.weight)] for x_D in args[0].reshape(-1, args[0].shape[-1])]
        else:
            inputs = [[(e, x_D, w.chunk(2)[0]) for e, x_D, w in each] for each in inputs_of(module, args)]
        for token, each in enumerate(inputs):
            at = divmod(token, mask.shape[1])
            own[at] = [expert for expert, _, _ in each]
            active |= {(at, expert): F.linear(x_D, w) > 0 for expert, x_D, w in each}
        for row, length in enumerate(LENGTHS):
            for run in torch.arange(length).split(SHARE):
                of = {}
                for place in run.tolist():
                    for expert in own[row, place]:
                        of.setdefault(expert, []).append(active[(row, place), expert])
                shares = [torch.stack(each).any(0).double().mean().item() for each in of.values()]
                total += len(run) * sum(shares) / len(shares)
        unions.append(total / sum(LENGTHS))

    for site in find_ffns(model):
        site.module.register_forward_pre_hook(hook)
    with torch.no_grad():
        model(**batch)
    return sum(unions) / len(unions)


def test_trains_with_a_target_and_saves(tmp_path):
    """A few steps: the density goes down, and what is saved loads as a stock model."""
    model = sparsify(mixture("qwen2_moe"))
    options = {"max_steps": 30, "logging_steps": 10, "learning_rate": 3e-3}
    trainer = make_trainer(tmp_path, model=model, term={"target_density": 0.1, "warmup_steps": 10}, **options)
    trainer.train()
    densities = [row["twell/density"] for row in trainer.state.log_history if "twell/density" in row]
    assert densities[-1] < 0.8 * densities[0]
    trainer.save_model(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(loaded(**pad(rows())).logits, model.eval()(**pad(rows())).logits)


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen2_moe", "qwen3_next"])
def test_a_checkpoints_experts_come_back(name, tmp_path):
    """Trainer gives the model a file's tensors by their names there, where each expert has its own."""
    options = {"max_steps": 4, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 2}

    def run(resume=None, **more):
        model, term = sparsify(mixture(name)), {"l1_weight": 0.1}
        trainer = make_trainer(
            tmp_path, functools.partial(Trainer, eval_dataset=rows()), model, pad, term, **options, **more
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model

    whole = run()
    assert_same_model(run(resume=tmp_path / "checkpoint-2"), whole)
    highest = {"metric_for_best_model": "eval_loss", "greater_is_better": True}  # so not that of the last step
    best = run(load_best_model_at_end=True, eval_strategy="steps", eval_steps=2, **highest)
    assert_same_model(best, AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2"))
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"other\""):
        best.load_state_dict({**best.state_dict(), "other": torch.zeros(1)})


def assert_same_model(model, wanted):
    tensors = wanted.state_dict()
    assert [key for key, tensor in model.state_dict().items() if not torch.equal(tensor, tensors[key])] == []


@pytest.mark.parametrize("chosen", [{"l1_weight": 1e-3, "revive_after": 100}])
def test_what_experts_do_not_have_is_refused(chosen, tmp_path):
    trainer = make_trainer(tmp_path, model=sparsify(mixture()))
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.experts holds routed experts"):
        SparsityCallback(trainer, **chosen)


if __name__ == "__main__":
    leave(trained("qwen2_moe", "l1", 2, processes=2), sys.argv[1])
