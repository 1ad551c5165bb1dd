"""What the dense parent adds is the gradient of the objective as it is defined, in every set-up."""

import functools
import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from hf_twell import SparsityCallback, sparsify
from hf_twell.train import divergence
from hf_twell.train.distillation import Distillation
from tests import one_step
from tests.conftest import TINY, tiny_llama

pytestmark = pytest.mark.numeric

LOGITS, LAYERS = 0.6, 0.7
ALONE = {"logits": 1.0}


def captured(model, batch, **options):
    """Logits and each block's outputs."""
    outputs = []
    mlps = [layer.mlp for layer in model.model.layers]
    handles = [mlp.register_forward_hook(lambda _, args, output: outputs.append(output)) for mlp in mlps]
    result = model(**batch, **options)
    for handle in handles:
        handle.remove()
    return result, outputs


@pytest.fixture(scope="module")
def truth():
    """The definition by plain autograd, over all rows at once: gradient, KL and the layers' error."""
    model, batch = sparsify(tiny_llama()).train(), one_step.pad(one_step.rows())
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        theirs, targets = captured(one_step.parent(), batch)
    mine, outputs = captured(model, batch, num_items_in_batch=one_step.LABELS)
    log_p, log_q = (each.logits[mask].log_softmax(-1) for each in (mine, theirs))
    kl = F.kl_div(log_p, log_q, log_target=True, reduction="none").sum(-1).mean()
    errors = [
        (y[mask] - t[mask]).square().sum(-1).mean() / t[mask].square().sum(-1).mean()
        for y, t in zip(outputs, targets, strict=True)
    ]
    error = sum(errors) / len(errors)
    ((1 - LOGITS) * mine.loss + LOGITS * kl + LAYERS * error).backward()
    return one_step.flat_gradient(model), kl.item(), error.item()


COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


@pytest.mark.parametrize(
    ("layout", "arguments"),
    [
        ("padded", {}),
        ("padding_free", {}),
        ("padded", {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        ("padded", {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}),
        pytest.param("padded", COMPILED, marks=pytest.mark.slow),
        pytest.param("padding_free", {**COMPILED, "gradient_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_gradient_and_figures(truth, layout, arguments):
    distil = {"logits": LOGITS, "layers": LAYERS}
    gradient, logs = one_step.trainer_gradient(layout=layout, l1_weight=0.0, distil=distil, **arguments)
    expected, kl, error = truth
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()
    assert logs["twell/kl"] == pytest.approx(kl, rel=1e-5)
    assert logs["twell/layer_error"] == pytest.approx(error, rel=1e-5)


@pytest.mark.slow
def test_layers_that_accelerate_compiles_one_by_one_learn_alike(truth, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    test_gradient_and_figures(truth, "padded", COMPILED)


@pytest.mark.slow
def test_layers_compiled_one_by_one_share_their_graphs(monkeypatch, tmp_path):
    """One that is compiled for each layer is none after the eighth, where PyTorch gives up and leaves them eager."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    graphs = []
    for layers in (2, 4):
        torch.compiler.reset()
        counters.clear()
        model, parent = sparsify(tiny_llama(num_hidden_layers=layers)), tiny_llama(num_hidden_layers=layers)
        args = tf.TrainingArguments(str(tmp_path), **one_step.ONE_STEP, **COMPILED)
        trainer = tf.Trainer(model, args, train_dataset=one_step.rows()[:1])
        options = {"target_density": 0.1, "term": "count", "distillation": Distillation(model, parent, logits=1.0)}
        trainer.add_callback(SparsityCallback(trainer, **options))
        trainer.train()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize("layout", ["padded", "padding_free"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_task_loss_that_teaches_nothing_is_logged_and_no_more(layout, accumulation):
    """`logits=1`: the same gradient and log as by the model's own loss, which a loss function of the user's brings."""
    found, logs = one_step.trainer_gradient("Trainer", layout, accumulation, l1_weight=0.0, distil=ALONE)
    taken = []

    class OwnLoss(tf.Trainer):
        def compute_loss(self, *args, **options):
            taken.append(self.compute_loss_func)
            return super().compute_loss(*args, **options)

    expected, others = one_step.trainer_gradient(OwnLoss, layout, accumulation, l1_weight=0.0, distil=ALONE)
    assert set(taken) == {None}
    assert (found - expected).norm() <= 1e-6 * expected.norm()
    assert logs["loss"] == pytest.approx(others["loss"], abs=1e-4)
    assert logs["twell/kl"] == pytest.approx(others["twell/kl"], rel=1e-6)


def test_no_task_loss_is_spared_in_evaluation_and_after(tmp_path):
    model = sparsify(tiny_llama())
    args = tf.TrainingArguments(str(tmp_path), **one_step.ONE_STEP)
    trainer = tf.Trainer(model, args, one_step.pad, train_dataset=one_step.rows(), eval_dataset=one_step.rows())
    expected = trainer.evaluate()["eval_loss"]
    teacher = Distillation(model, one_step.parent(), **ALONE)
    callback = SparsityCallback(trainer, 0.0, distillation=teacher)
    trainer.add_callback(callback)
    assert teacher._gives_loss_of is trainer
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    callback.detach()
    assert trainer.compute_loss_func is None


@functools.cache
def by_logits() -> tuple[torch.Tensor, dict]:
    """By the logits alone, all rows at once: gradient and log. No fixture, as those of a module find no kernels."""
    return one_step.trainer_gradient(l1_weight=0.0, distil={"logits": LOGITS})


def test_accumulation_does_not_change_what_the_logits_teach():
    """Only the layers' error is relative to a micro-batch's own outputs."""
    whole, logs = by_logits()
    for accumulation in (2, 4):
        gradient, parts = one_step.trainer_gradient(accumulation=accumulation, l1_weight=0.0, distil={"logits": LOGITS})
        assert (gradient - whole).norm() <= 1e-5 * whole.norm()
        assert parts["twell/kl"] == pytest.approx(logs["twell/kl"], rel=1e-5)
        assert parts["loss"] == pytest.approx(logs["loss"], abs=1e-5), "the logged loss stays the task loss"


def logits_made_and_kept(kind, distil) -> tuple[list[str], int]:
    """Of one training step: operators that made a tensor as large as all logits or larger, and those autograd kept."""
    large = len(one_step.LENGTHS) * max(one_step.LENGTHS) * TINY["vocab_size"]
    made, kept = [], {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
            if isinstance(result, torch.Tensor) and result.numel() >= large:
                made.extend([func.name()] if result.untyped_storage().data_ptr() not in given else [])
            return result

    def keep(tensor):
        if tensor.numel() >= large:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with Watch(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        one_step.trainer_gradient(kind, l1_weight=0.0, distil=distil)
    return made, len(kept)


@pytest.mark.parametrize("share", [LOGITS, 1.0])
def test_distilling_logits_costs_one_tensor_of_them_kept_and_one_made(monkeypatch, share):
    """Beside what a loss of the trainer's own takes; beside nothing where it is Transformers' causal one."""
    monkeypatch.setattr(divergence, "CHUNK", 20 * TINY["vocab_size"])
    plain, kept = logits_made_and_kept("Trainer", {"logits": 0.0, "layers": 1.0})
    made, kept_too = logits_made_and_kept(one_step.OwnLoss, {"logits": share})
    assert kept_too == kept + 1
    assert sorted(made) == sorted([*plain, "aten::empty_like"])
    of_loss = ["aten::_log_softmax", "aten::nll_loss_backward", "aten::_log_softmax_backward_data"]
    made, kept_too = logits_made_and_kept("Trainer", {"logits": share})
    assert kept_too == 1
    assert sorted([*made, *of_loss]) == sorted([*plain, "aten::empty_like"])


def test_logits_are_let_go_of_before_the_layers_go_back(tmp_path):
    model, made, left = sparsify(tiny_llama()), [], []
    trainer = one_step.make_trainer(tmp_path, model=model)
    trainer.add_callback(SparsityCallback(trainer, 0.0, distillation=Distillation(model, one_step.parent())))
    model.lm_head.register_forward_hook(lambda _, args, logits: made.append(weakref.ref(logits)))
    model.model.norm.weight.register_hook(lambda gradient: left.extend(logits() for logits in made))
    trainer.train()
    assert left == [None]


@pytest.mark.parametrize("chunk", [1, 5 * 96 + 7, 10**9])
def test_the_size_of_chunks_changes_no_gradient(monkeypatch, chunk):
    whole, logs = by_logits()
    monkeypatch.setattr(divergence, "CHUNK", chunk)
    gradient, parts = one_step.trainer_gradient(l1_weight=0.0, distil={"logits": LOGITS})
    assert (gradient - whole).norm() <= 1e-6 * whole.norm()
    assert parts["twell/kl"] == pytest.approx(logs["twell/kl"], rel=1e-6)


def test_a_loss_of_transposed_logits_is_taught_too():
    """Its gradient comes in another memory order."""
    gradients, ids = [], torch.arange(3, 47).view(2, 22)
    for transposed in (False, True):
        model = sparsify(tiny_llama()).train()
        teacher = Distillation(model, one_step.parent(), logits=LOGITS)
        with teacher.micro_batch({"input_ids": ids}, torch.tensor(1 / ids.numel())):
            logits = model(input_ids=ids).logits
            given = (logits.transpose(1, 2), ids) if transposed else (logits.flatten(0, 1), ids.flatten())
            F.cross_entropy(*given).backward()
        gradients.append(one_step.flat_gradient(model))
    assert (gradients[1] - gradients[0]).norm() <= 1e-5 * gradients[0].norm()


def test_a_parent_that_is_the_model_teaches_nothing(tmp_path):
    model, parent = sparsify(tiny_llama()), sparsify(tiny_llama())
    before = {name for name, _ in model.named_parameters()}
    trainer = one_step.make_trainer(tmp_path, model=model, weight_decay=0.0)
    keep = one_step.KeepGradient()
    trainer.add_callback(keep)
    both = Distillation(model, parent, logits=1.0, layers=1.0)
    trainer.add_callback(SparsityCallback(trainer, 0.0, distillation=both))
    trainer.train()
    assert trainer.state.log_history[0]["twell/kl"] == pytest.approx(0, abs=1e-6)
    assert keep.gradient.abs().max() < 1e-6
    assert not any(weights.requires_grad for weights in parent.parameters())
    assert not any(module.training for module in parent.modules())
    assert {name for name, _ in model.named_parameters()} == before, "the parent is no part of the model"


def taught(teacher, model, batch, scale) -> torch.Tensor:
    """The gradient of a step of one batch."""
    model.zero_grad()
    with teacher.micro_batch(batch, torch.tensor(scale)):
        model(**batch, num_items_in_batch=one_step.LABELS).loss.backward()
    return one_step.flat_gradient(model)


def test_nothing_of_a_micro_batch_is_left_after_it():
    model, parent, seen = sparsify(tiny_llama()).train(), one_step.parent(), []
    batch = one_step.pad(one_step.rows())
    model(**batch).loss.backward()
    alone = one_step.flat_gradient(model)
    teacher = Distillation(model, parent, logits=LOGITS, layers=LAYERS)
    parent.model.register_forward_hook(lambda _, args, output: seen.append(output.past_key_values))
    for module in (parent.model.norm, parent.model.layers[0].mlp):
        module.register_forward_hook(lambda _, args, output: seen.append(weakref.ref(output)))
    taught(teacher, model, batch, 1.0)
    model.zero_grad()
    gc.collect()
    block, hidden, cache = seen
    assert block() is hidden() is cache is None
    model(**batch).loss.backward()
    assert torch.equal(one_step.flat_gradient(model), alone)


def test_a_parent_that_others_run_keeps_nothing_of_it():
    """As who scores it on held-out text in the middle of a training."""
    model, parent, seen = sparsify(tiny_llama()).train(), one_step.parent(), []
    teacher = Distillation(model, parent, layers=LAYERS)
    parent.model.layers[0].mlp.register_forward_hook(lambda _, args, output: seen.append(weakref.ref(output)))
    batch = one_step.pad(one_step.rows())
    before = taught(teacher, model, batch, 1.0)
    with torch.no_grad():
        parent(**batch)
    breaks_off = parent.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        taught(teacher, model, batch, 1.0)
    breaks_off.remove()
    with torch.no_grad():
        parent(**batch)
    gc.collect()
    assert [output() for output in seen] == [None] * len(seen)
    assert torch.equal(taught(teacher, model, batch, 1.0), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_figures_of_half_precision_are_reckoned_in_full(dtype):
    """Outputs of some thousands, whose squares would overflow in fp16."""
    model, parent = sparsify(tiny_llama()).train(), one_step.parent()
    for each in (model, parent):
        for layer in each.model.layers:
            layer.mlp.down_proj.weight.data *= 1000
        each.to(dtype)
    batch = {"input_ids": torch.arange(3, 47).view(2, 22)}
    with torch.no_grad():
        (mine, outputs), (theirs, targets) = (captured(each, batch) for each in (model, parent))
    assert min(target.abs().max() for target in targets) > 1000
    kl = F.kl_div(*(each.logits.double().log_softmax(-1) for each in (mine, theirs)), log_target=True, reduction="none")
    squares = [
        ((y - t).square().sum() / t.square().sum())
        for y, t in ((y.double(), t.double()) for y, t in zip(outputs, targets, strict=True))
    ]
    teacher = Distillation(model, parent, logits=LOGITS, layers=LAYERS)
    with teacher.micro_batch(batch, torch.tensor(1 / 44)):
        model(**batch).logits.sum().backward()
    report = teacher.report()
    assert report["twell/kl"] == pytest.approx(kl.sum(-1).mean().item(), rel=1e-4)
    assert report["twell/layer_error"] == pytest.approx(torch.stack(squares).mean().item(), rel=1e-4)


def test_the_parent_reads_what_the_model_reads_without_labels():
    model, parent, seen = sparsify(tiny_llama()).train(), one_step.parent(), {}
    parent.model.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    ids = torch.arange(3, 47).view(2, 22)
    batch = {"input_ids": ids, "position_ids": torch.arange(22)[None], "max_length_q": 22}  # a number of the collator
    labels = {"labels": ids, "shift_labels": ids, "num_items_in_batch": 44}
    teacher = Distillation(model, parent)
    with teacher.micro_batch({**batch, **labels}, torch.tensor(1 / 44)):
        model(**batch).logits.sum().backward()
    assert set(seen) == {*batch, "use_cache"}
    learns = teacher.micro_batch(batch, torch.ones(()))
    with pytest.raises(ValueError, match="needs those of the model"), learns, torch.no_grad():
        model(**batch)


def test_what_padding_holds_is_no_matter():
    """Some attention makes NaN of rows without a token."""
    batch, gradients, reports = one_step.pad(one_step.rows()), [], []
    padding = (batch["attention_mask"] == 0).unsqueeze(-1)
    for spoiled in (False, True):
        model, parent = sparsify(tiny_llama()).train(), one_step.parent()
        if spoiled:
            for module in (parent.model.norm, parent.model.layers[-1].mlp):
                module.register_forward_hook(lambda _, args, output: output.masked_fill(padding, torch.nan))
        teacher = Distillation(model, parent, logits=LOGITS, layers=LAYERS)
        gradients.append(taught(teacher, model, batch, 1 / sum(one_step.LENGTHS)))
        reports.append(teacher.report())
    torch.testing.assert_close(*gradients)
    assert reports[0] == pytest.approx(reports[1])
    empty = {**batch, "attention_mask": torch.zeros_like(batch["attention_mask"])}
    empty["labels"] = torch.full_like(batch["labels"], -100)
    assert taught(teacher, model, empty, 1.0).isfinite().all()
    assert teacher.report() == {"twell/layer_error": 0.0}, "of this batch alone"


def test_a_detached_parent_is_free():
    model, parent = sparsify(tiny_llama()), tiny_llama()
    both, alive = Distillation(model, parent, layers=1.0), weakref.ref(parent)
    both.detach()
    del both, parent
    gc.collect()
    assert alive() is None


def test_a_loss_without_logits_is_refused(tmp_path):
    """A fused output head multiplies by its weight and never calls it, so that nothing would be learned."""

    class FusedTrainer(tf.Trainer):
        def compute_loss(self, model, inputs, **options):
            hidden = self.model.model(**{key: inputs[key] for key in ("input_ids", "attention_mask")}).last_hidden_state
            logits = F.linear(hidden, self.model.lm_head.weight)
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())

    model = sparsify(tiny_llama())
    trainer = one_step.make_trainer(tmp_path, FusedTrainer, model)
    trainer.add_callback(SparsityCallback(trainer, 0.0, distillation=Distillation(model, tiny_llama())))
    with pytest.raises(ValueError, match="fused output head"):
        trainer.train()
    layers_alone = Distillation(model, one_step.parent(), logits=0.0, layers=1.0)
    trainer.add_callback(SparsityCallback(trainer, 0.0, distillation=layers_alone))
    trainer.train()


def test_models_that_do_not_fit_together_are_refused():
    model = sparsify(tiny_llama())
    for shares in ({"logits": 0.0}, {"logits": 1.5}, {"logits": -0.5, "layers": 1.0}, {"layers": -1.0}):
        with pytest.raises(ValueError, match="one of them above 0"):
            Distillation(model, tiny_llama(), **shares)
    sizes = {**TINY, "head_dim": 8}
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM changes its logits after the head \(final_logit_softcap"):
        Distillation(model, tf.Gemma2ForCausalLM(tf.Gemma2Config(**sizes)))
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM changes its logits"):
        Distillation(tf.Gemma2ForCausalLM(tf.Gemma2Config(**sizes)), model)
    with pytest.raises(ValueError, match=r"GraniteForCausalLM changes its logits after the head \(logits_scaling\)"):
        Distillation(model, tf.GraniteForCausalLM(tf.GraniteConfig(**TINY, logits_scaling=2.0)))
    Distillation(model, tf.GraniteForCausalLM(tf.GraniteConfig(**TINY, logits_scaling=1.0))).detach()
    with pytest.raises(ValueError, match=r"FalconH1ForCausalLM changes its logits .* \(lm_head_multiplier\)"):
        Distillation(model, tf.FalconH1ForCausalLM(tf.FalconH1Config(**TINY, lm_head_multiplier=2.0)))
    with pytest.raises(ValueError, match="LlamaForSequenceClassification has no output embeddings"):
        Distillation(model, tf.LlamaForSequenceClassification(tf.LlamaConfig(**TINY)))
    with pytest.raises(ValueError, match="output words"):
        Distillation(model, tiny_llama(vocab_size=97))
    with pytest.raises(ValueError, match="layers, hidden size"):
        Distillation(model, tiny_llama(num_hidden_layers=2), logits=0.0, layers=1.0)


def test_layers_that_teach_nothing_are_told_of():
    """Blocks that PEFT copies later are not those that the parent was to teach."""
    peft = pytest.importorskip("peft")
    model = sparsify(tiny_llama())
    both = Distillation(model, one_step.parent(), logits=0.0, layers=1.0)
    copied = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["mlp"]))
    batch = one_step.pad(one_step.rows())
    with both.micro_batch(batch, torch.ones(())):
        copied(**batch).loss.backward()
    with pytest.warns(UserWarning, match="distilled layers taught nothing"):
        assert "twell/layer_error" not in both.report()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both.report()  # of nothing
