"""The task loss and the parent's divergence: one gradient, that of their formula, however a trainer counts and scales.

Run under torchrun, or with "fsdp2" by accelerate, it writes the gradients of two processes to the file named as its
argument.
"""

import functools
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from accelerate.state import AcceleratorState

from hf_twell import SparsityCallback, sparsify
from hf_twell.train import divergence
from hf_twell.train.distillation import Distillation
from tests import one_step
from tests.conftest import TINY, finished, fsdp2, in_two_processes, leave, tiny_llama
from tests.one_step import OwnLoss
from tests.paths import ROOT
from tests.rounding import rounding

pytestmark = pytest.mark.numeric

SHARES = [0.3, 0.5, 1.0]
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


@pytest.fixture(autouse=True)
def several_parts(monkeypatch):
    """Of the 248 tokens of all rows, padding included, the last part is smaller."""
    monkeypatch.setattr(divergence, "CHUNK", 50 * TINY["vocab_size"])


class Uncounted(tf.Trainer):
    """One that does not count the step's labels: the loss is then the mean over micro-batches of their means."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs)


class UncountedOwnLoss(Uncounted, OwnLoss):
    pass


def task_loss(logits, labels):
    """Summed over labels, by the definition."""
    return -logits[:, :-1].log_softmax(-1).gather(2, labels[:, 1:, None].clamp(min=0))[labels[:, 1:] >= 0].sum()


@functools.cache
def definition(share, micro_batches=None):
    """Gradient, task loss and KL in float64 by plain autograd. The loss is the mean over all labels, or with
    `micro_batches` of so many micro-batches' means."""
    model, parent = sparsify(tiny_llama(), backend="reference").double().train(), one_step.parent().double()
    rows, loss, kl = one_step.rows(), 0.0, 0.0
    size = len(rows) // (micro_batches or 1)
    for start in range(0, len(rows), size):
        batch = one_step.pad(rows[start : start + size])
        labels, mask = batch.pop("labels"), batch["attention_mask"].bool()
        with torch.no_grad():
            log_q = parent(**batch).logits[mask].log_softmax(-1)
        logits = model(**batch).logits
        count = one_step.LABELS if micro_batches is None else micro_batches * (labels[:, 1:] >= 0).sum()
        loss += task_loss(logits, labels) / count
        kl += (log_q.exp() * (log_q - logits[mask].log_softmax(-1))).sum() / sum(one_step.LENGTHS)
    ((1 - share) * loss + share * kl).backward()
    return one_step.flat_gradient(model).float(), loss.item(), kl.item()


def distilled(kind="Trainer", share=0.5, layout="padded", accumulation=1, **options):
    return one_step.trainer_gradient(kind, layout, accumulation, l1_weight=0.0, distil={"logits": share}, **options)


def assert_defined(found, expected) -> None:
    gradient, loss, kl = expected
    assert (found[0] - gradient).norm() <= 1e-5 * gradient.norm()
    assert found[1]["loss"] == pytest.approx(loss, rel=1e-5)
    assert found[1]["twell/kl"] == pytest.approx(kl, rel=1e-5)


@pytest.mark.parametrize("kind", ["Trainer", OwnLoss])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    ("layout", "accumulation", "arguments"),
    [
        ("padded", 1, {}),
        ("padded left", 2, {}),
        ("padding_free", 4, {}),
        ("padded", 2, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}),
    ],
)
def test_gradient_and_log_are_those_of_the_formula(kind, share, layout, accumulation, arguments):
    assert_defined(distilled(kind, share, layout, accumulation, **arguments), definition(share))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "share"), [*(("Trainer", share) for share in SHARES), (OwnLoss, 0.5)])
def test_compiled_they_are_too(kind, share):
    assert_defined(distilled(kind, share, accumulation=2, **COMPILED), definition(share))


@pytest.mark.parametrize("kind", [Uncounted, UncountedOwnLoss])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_trainer_that_counts_no_labels_averages_micro_batches(kind, accumulation):
    found = distilled(kind, 0.5, accumulation=accumulation, train_sampling_strategy="sequential")
    assert_defined(found, definition(0.5, accumulation))


@pytest.mark.slow
def test_two_processes(tmp_path):
    """Trainer multiplies the loss by their number where it counts all labels, and else leaves that to the average."""
    output = tmp_path / "gradients.pt"
    in_two_processes("tests.train.test_distilled_loss", output)
    results = torch.load(output)
    assert len(results) == 8
    for (share, accumulation, averaged, own), (gradient, logs) in results.items():
        if averaged:
            expected, loss, _ = definition(share)
            assert logs["loss"] == pytest.approx(loss, rel=1e-5)
        else:
            expected = results[share, accumulation, averaged, not own][0]
        assert (gradient - expected).norm() <= 1e-5 * expected.norm(), (share, accumulation, averaged, own)


IN_BFLOAT16 = {"bf16": True, "backend": "reference"}  # by matmuls on every processor


@pytest.mark.slow
def test_fsdp2_in_bfloat16(tmp_path):
    """At most twice as far from the formula, in float64, as one process in bfloat16 is."""
    output = tmp_path / "gradients.pt"
    done = finished(sys.executable, *fsdp2("bf16"), __file__, output, "fsdp2", cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    results = torch.load(output)
    assert results.pop("wrapped") == "FSDP"
    assert len(results) == 4
    for (share, own), (gradient, logs) in results.items():
        expected, loss, _ = definition(share)  # KL is logged of one process's tokens
        one, _ = distilled(OwnLoss if own else "Trainer", share, **IN_BFLOAT16)
        error, of_one = (gradient - expected).norm(), (one - expected).norm()
        assert error <= 2 * of_one < 0.2 * expected.norm(), (share, own)
        assert logs["loss"] == pytest.approx(loss, rel=2**-7)  # two roundings to 8 bits, of logits and of the loss


def shifted_otherwise(features):
    """A collator whose `shift_labels` are not those that shifting would give."""
    batch = one_step.pad(features)
    return {**batch, "shift_labels": batch["labels"].roll(-2, 1)}


def test_labels_that_a_collator_shifted_are_taken(monkeypatch):
    monkeypatch.setitem(one_step.COLLATORS, "shifted", shifted_otherwise)
    (found, logs), (expected, others) = (distilled(kind, layout="shifted") for kind in ("Trainer", OwnLoss))
    assert (expected - definition(0.5)[0]).norm() > 0.1 * expected.norm()
    assert (found - expected).norm() <= 1e-6 * expected.norm()
    assert logs["loss"] == pytest.approx(others["loss"], rel=1e-6)


@pytest.mark.parametrize("collator", [one_step.pad, shifted_otherwise])
@pytest.mark.parametrize("share", SHARES)
def test_evaluation_gives_the_task_loss_alone(share, collator, tmp_path):
    """That of the trainer without a teacher, in the middle of a training and after it."""
    args = tf.TrainingArguments(str(tmp_path), **one_step.ONE_STEP, eval_strategy="steps", eval_steps=1)
    model = sparsify(tiny_llama())
    trainer = tf.Trainer(model, args, collator, train_dataset=one_step.rows(), eval_dataset=one_step.rows())
    callback = SparsityCallback(trainer, 0.0, distillation=Distillation(model, one_step.parent(), logits=share))
    trainer.add_callback(callback)
    trainer.train()
    found = [next(row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row)]
    found.append(trainer.evaluate()["eval_loss"])
    callback.detach()
    assert found == pytest.approx([trainer.evaluate()["eval_loss"]] * 2, rel=1e-6)


def test_evaluation_gives_it_too_where_a_training_broke_off(tmp_path):
    """In the middle of a micro-batch, as Ctrl-C does."""
    model = sparsify(tiny_llama())
    trainer = one_step.make_trainer(tmp_path, model=model, collator=shifted_otherwise)
    trainer.eval_dataset = one_step.rows()
    expected = trainer.evaluate()["eval_loss"]
    trainer.add_callback(SparsityCallback(trainer, 0.0, distillation=Distillation(model, one_step.parent())))
    breaks_off = model.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as kept:
        trainer.train()
    breaks_off.remove()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6), kept


def test_a_callback_may_evaluate_within_a_micro_batch(tmp_path):
    trainer, found = one_step.make_trainer(tmp_path), []
    trainer.eval_dataset = one_step.rows()
    expected = trainer.evaluate()["eval_loss"]

    class Evaluates(tf.TrainerCallback):
        def on_step_begin(self, args, state, control, **others):
            found.append(trainer.evaluate()["eval_loss"])

    trainer.add_callback(Evaluates)
    trainer.add_callback(SparsityCallback(trainer, 0.0, distillation=Distillation(trainer.model, one_step.parent())))
    trainer.train()
    assert found == pytest.approx([expected], rel=1e-6)


def test_a_teacher_of_two_trainers_leaves_the_first_its_loss(tmp_path):
    first = one_step.make_trainer(tmp_path, label_smoothing_factor=0.1)
    second = one_step.make_trainer(tmp_path, model=first.model)
    teacher = Distillation(first.model, one_step.parent())
    for trainer in (first, second):
        teacher.join(trainer)
    batch = one_step.pad(one_step.rows())
    for trainer, replaced in ((first, False), (second, True)):
        with teacher.micro_batch(batch, torch.ones(()), trainer=trainer):
            assert (trainer.compute_loss_func is not None) == replaced
            outputs = first.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            if replaced:
                trainer.compute_loss_func(outputs, batch["labels"])


def test_another_head_than_the_teacher_was_given_is_refused(tmp_path):
    trainer = one_step.make_trainer(tmp_path)
    trainer.add_callback(SparsityCallback(trainer, 0.0, distillation=Distillation(trainer.model, one_step.parent())))
    trainer.model.set_output_embeddings(torch.nn.Linear(TINY["hidden_size"], TINY["vocab_size"], bias=False))
    with pytest.raises(ValueError, match="did not call the output head that it had"):
        trainer.train()


def own_loss(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


class AddsToItsLoss(tf.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        return output | {"loss": output.loss + 100}


EXTRA_LOSSES = ["output_router_logits", "z_loss_coefficient"]  # of configs: of routers, and of the logits' size


OTHERS = ["label_smoothing_factor", "compute_loss_func", "compute_loss", "patched", "loss_function", "forward"]


@pytest.mark.parametrize("change", [*OTHERS, *EXTRA_LOSSES])
def test_another_loss_stays_the_trainers(change, tmp_path):
    model = sparsify(tiny_llama())
    kind = OwnLoss if change == "compute_loss" else tf.Trainer
    smoothing = {"label_smoothing_factor": 0.1} if change == "label_smoothing_factor" else {}
    trainer = one_step.make_trainer(tmp_path, kind, model, **smoothing)
    if change == "compute_loss_func":
        trainer.compute_loss_func = own_loss
    if change == "patched":
        trainer.compute_loss = trainer.compute_loss
    if change == "forward":
        model.__class__ = AddsToItsLoss
    if change == "loss_function":
        model.loss_function = lambda logits, labels, **options: F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    if change in EXTRA_LOSSES:
        setattr(model.config, change, 1)
    before, teacher = trainer.compute_loss_func, Distillation(model, one_step.parent())
    teacher.join(trainer)
    batch = one_step.pad(one_step.rows())
    with teacher.micro_batch(batch, torch.ones(()), trainer=trainer):
        assert trainer.compute_loss_func is before
        model(**batch)


def test_a_loss_that_takes_its_place_later_is_refused(tmp_path):
    trainer = one_step.make_trainer(tmp_path)
    trainer.add_callback(SparsityCallback(trainer, 0.0, distillation=Distillation(trainer.model, one_step.parent())))
    trainer.compute_loss_func = own_loss
    with pytest.raises(ValueError, match="another loss than when the distillation joined"):
        trainer.train()


def test_a_teacher_goes_on_to_a_trainer_with_a_loss_of_its_own(tmp_path):
    trainer = one_step.make_trainer(tmp_path)
    teacher = Distillation(trainer.model, one_step.parent())
    for kind in (tf.Trainer, OwnLoss):
        trainer = one_step.make_trainer(tmp_path, kind, trainer.model)
        callback = SparsityCallback(trainer, 0.0, distillation=teacher)
        trainer.add_callback(callback)
        trainer.train()
        callback.detach()


def test_text_without_labels_is_refused(tmp_path):
    def unlabelled(features):
        return {key: value for key, value in one_step.pad(features).items() if key != "labels"}

    trainer = one_step.make_trainer(tmp_path, collator=unlabelled)
    trainer.add_callback(SparsityCallback(trainer, 0.0, distillation=Distillation(trainer.model, one_step.parent())))
    with pytest.raises(ValueError, match="no labels"):
        trainer.train()


def test_smoothed_labels_are_taught_beside_the_parent():
    """By the logits' own gradient, into which the divergence's is mixed."""
    gradients = [distilled(share=share, label_smoothing_factor=0.1)[0] for share in (1e-9, 0.25, 1.0)]
    expected = 0.75 * gradients[0] + 0.25 * gradients[2]
    assert (gradients[1] - expected).norm() <= 1e-5 * expected.norm()


class Step:
    """The gradient of the logits of one micro-batch, beside the logits themselves and the parent's."""

    def __init__(self, folder, share, dtype, backend=None, scale=1.0, confident=False, labels=True):
        model, parent, kept = sparsify(tiny_llama()).to(dtype).train(), one_step.parent().to(dtype), []
        if confident:  # of some words that come, as trained models are, so that p - 1 is small
            for each in (model, parent):
                each.lm_head.weight.data *= 40
        trainer = one_step.make_trainer(folder, model=model)
        teacher = Distillation(model, parent, logits=share)
        teacher.join(trainer)
        teacher._backend = backend
        self.batch, theirs = one_step.pad(one_step.rows()), []
        self.labels = self.batch.pop("labels")
        if confident:
            with torch.no_grad():
                self.labels[:, 1:] = torch.where(
                    self.labels[:, 1:] < 0, -100, model(**self.batch).logits[:, :-1].argmax(-1)
                )
        if not labels:
            self.labels.fill_(-100)
        model.lm_head.register_forward_hook(lambda _, args, logits: (logits.retain_grad(), kept.append(logits))[2:])
        parent.lm_head.register_forward_hook(lambda _, args, logits: theirs.append(logits))
        tokens = sum(one_step.LENGTHS)
        with teacher.micro_batch(self.batch, torch.tensor(scale / tokens), trainer=trainer):
            loss = trainer.compute_loss_func(model(**self.batch), self.labels, one_step.LABELS if labels else None)
            (scale * loss).backward()
        self.gradient, self.logits, self.theirs = kept[0].grad, kept[0].detach(), torch.cat(theirs)
        self.model, self.loss, self.report = model, loss.item(), teacher.report()

    def expected(self, share):
        """In float64, (B, S, V)."""
        logits, mask = self.logits.double().requires_grad_(), self.batch["attention_mask"].bool()
        log_p, log_q = logits.log_softmax(-1), self.theirs.double().view_as(logits).log_softmax(-1)
        kl = (log_q.exp() * (log_q - log_p)).sum(-1)[mask].sum() / mask.sum()
        loss = task_loss(logits, self.labels) / one_step.LABELS
        ((1 - share) * loss + share * kl).backward()
        return logits.grad, loss.item(), kl.item()


def assert_rounded_once(step, share, dtype) -> None:
    """From float32 to the logits' dtype, so that no sum of two rounded gradients loses what their difference is."""
    gradient, loss, kl = step.expected(share)
    assert step.gradient.dtype == dtype
    assert step.loss == pytest.approx(loss, rel=1e-5)
    assert step.report["twell/kl"] == pytest.approx(kl, rel=1e-5)
    # What is rounded to float32 are logarithms of probabilities, as large as logits, and probabilities of at most 1.
    in_float32 = rounding(4, max(1, step.logits.abs().max().item()) / one_step.LABELS)
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    allowed = (torch.finfo(dtype).eps * gradient.abs()).clamp(min=least) / 2 + in_float32
    assert ((step.gradient.double() - gradient).abs() / allowed).max() <= 1


@pytest.mark.parametrize("confident", [False, True])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_is_rounded_once(dtype, share, confident, tmp_path):
    assert_rounded_once(Step(tmp_path, share, dtype, confident=confident), share, dtype)


@pytest.mark.slow
@pytest.mark.codegen
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_inductor_rounds_once_too(share, tmp_path):
    step = Step(tmp_path, share, torch.bfloat16, backend="inductor", confident=True)
    assert_rounded_once(step, share, torch.bfloat16)


@pytest.mark.parametrize("share", SHARES)
def test_a_scaled_loss_scales_the_whole_gradient(share, tmp_path):
    """As the gradient scaler of fp16 does, by a power of two."""
    plain, scaled = (one_step.flat_gradient(Step(tmp_path, share, torch.float32, scale=s).model) for s in (1, 2**10))
    torch.testing.assert_close(scaled / 2**10, plain, rtol=1e-6, atol=1e-9)


def test_without_labels_the_parent_teaches_alone(tmp_path):
    """The mean over none is NaN, as in Transformers, and its gradient zero."""
    half, whole = (Step(tmp_path, share, torch.float32, labels=False) for share in (0.5, 1.0))
    assert half.loss != half.loss
    torch.testing.assert_close(half.gradient, 0.5 * whole.gradient)


@pytest.mark.parametrize("share", SHARES)
def test_what_the_model_makes_of_padding_is_no_matter(share):
    """Attention may make NaN of a row without a token, of the model's as of the parent's."""
    head, hidden, labels_T = (
        torch.nn.Linear(8, 50, bias=False).requires_grad_(False),
        torch.randn(2, 4, 8),
        torch.arange(8),
    )
    labels_T[0] = -100
    weight, made = torch.ones(2, 4), torch.randn(2, 4, 50)
    weight[0, 0] = 0
    found = []
    for padding in (0.0, torch.nan):
        logits = made.clone()
        logits[0, 0] = padding
        logits.requires_grad_()
        sums = torch.zeros(2, requires_grad=True)
        read = hidden.masked_fill(weight.unsqueeze(-1) == 0, padding)
        batch = SimpleNamespace(hidden=read, weight=weight, head=head, share=share, scale=torch.tensor(0.1))
        divergence.DistilledLoss.apply(logits, sums, labels_T, torch.tensor(7), batch, None).backward()
        assert not logits.grad[0, 0].any()
        found.append((logits.grad, sums.grad))
    torch.testing.assert_close(*found)


if __name__ == "__main__":
    results = {}
    if sys.argv[2:] == ["fsdp2"]:
        for share, own in itertools.product((0.5, 1.0), (False, True)):
            results[share, own] = distilled(OwnLoss if own else "Trainer", share, processes=2, **IN_BFLOAT16)
        leave({**results, "wrapped": AcceleratorState().distributed_type.value}, sys.argv[1])
    for share, accumulation, averaged in ((0.3, 1, True), (0.5, 2, True), (0.5, 2, False), (1.0, 1, True)):
        for own in (False, True):
            options = {"processes": 2, "average_tokens_across_devices": averaged}
            found = distilled(OwnLoss if own else "Trainer", share, accumulation=accumulation, **options)
            results[share, accumulation, averaged, own] = found
    leave(results, sys.argv[1])
