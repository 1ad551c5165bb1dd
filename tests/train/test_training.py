"""One optimizer step has one gradient, however it is cut into micro-batches, processes, layouts and checkpoints."""

import contextlib
import copy
import functools
import importlib.util
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_twell import L1Penalty, SparsityCallback, sparsify, unpatch
from hf_twell.blocks.batches import token_weight
from hf_twell.blocks.modeling import L1Inputs, sparse_ffns
from hf_twell.dispatch import limits
from hf_twell.models.modes import evaluation_mode
from hf_twell.ops import reference
from hf_twell.train.distillation import Distillation
from tests import one_step
from tests.conftest import in_two_processes, tiny_llama

pytestmark = pytest.mark.numeric

HAS_TRL = all(importlib.util.find_spec(name) for name in ("trl", "datasets"))
needs_trl = pytest.mark.skipif(not HAS_TRL, reason="needs trl and datasets")
KINDS = ["Trainer", pytest.param("SFTTrainer", marks=needs_trl)]


@pytest.fixture(scope="module")
def truth():
    return one_step.autograd_gradient()


def assert_same_gradient(gradient, truth):
    assert (gradient - truth).norm() <= 1e-5 * truth.norm()


@pytest.fixture(scope="module")
def task():
    """Gradient and log row without the L1 term."""
    return one_step.trainer_gradient(l1_weight=None)


def test_l1_is_most_of_the_gradient(truth, task):
    assert task[0].norm() < 0.5 * truth.norm()


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("layout", ["padded", "padding_free"])
@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_and_layout(truth, task, kind, layout, accumulation):
    gradient, logs = one_step.trainer_gradient(kind, layout, accumulation)
    assert_same_gradient(gradient, truth)
    assert logs["loss"] == pytest.approx(task[1]["loss"], abs=1e-5), "the logged loss must stay the task loss"


@functools.cache
def plain_l0(kind) -> float:
    _, logs = one_step.trainer_gradient(kind, accumulation=2)
    return logs["twell/l0"]


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing(truth, kind, use_reentrant):
    checkpointed, logs_checkpointed = one_step.trainer_gradient(
        kind,
        accumulation=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": use_reentrant},
    )
    assert_same_gradient(checkpointed, truth)
    assert logs_checkpointed["twell/l0"] == pytest.approx(plain_l0(kind)), "a recomputed token counts once"


@needs_trl
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("chosen", [{"l1_weight": 2e-4}, {"target_density": 0.07}])
def test_sft_trainer_saves_checkpoints_with_a_card_and_resumes(chosen, lora, tmp_path):
    """trl writes the card before each checkpoint, when the folder holds no model yet."""
    output = tmp_path / "deep" / "out"
    arguments = {"max_steps": 2, "save_steps": 1, "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True}

    def trainer():
        model = sparsify(tiny_llama())
        if lora:
            peft = pytest.importorskip("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["up_proj"]))
        made = one_step.sft_trainer(model, "padded", {"output_dir": str(output), **arguments})
        made.add_callback(SparsityCallback(made, **chosen))
        return made

    trainer().train()
    card = (output / "README.md").read_text()
    assert "hf_twell" in card
    if not lora:
        fact = "density aimed at | 7.00 % after" if "target_density" in chosen else "L1 term | 0.0002"
        assert fact in card
        assert "trained with an L1 term" in card
    shutil.rmtree(output / "checkpoint-2")
    resumed = trainer()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    assert (output / "checkpoint-2" / "twell_state.json").is_file()


def test_hand_written_loop(truth):
    assert_same_gradient(one_step.loop_gradient()[0], truth)


def test_layers_with_weights_of_their_own():
    weights = [0.5, 8.0, 2.0]
    gradient, report = one_step.loop_gradient(layer_weights=torch.tensor(weights))
    assert_same_gradient(gradient, one_step.autograd_gradient(weights))
    assert [layer["l1_weight"] for layer in report["layers"]] == weights
    assert report["l1_weight"] == sum(weights) / 3


@pytest.mark.slow
def test_two_processes(truth, tmp_path):
    kinds = ["Trainer", *(["SFTTrainer"] if HAS_TRL else [])]
    output = tmp_path / "gradients.pt"
    in_two_processes("tests.one_step", output, *kinds)
    results = torch.load(output, weights_only=False)
    assert len(results) == 6 * len(kinds)
    _, single = one_step.trainer_gradient()
    shared_truth, union = one_step.shared_gradient()
    for setup, (gradient, logs) in results.items():
        is_shared = setup[-1] is not None
        expected = shared_truth if is_shared else truth
        assert (gradient - expected).norm() <= 1e-5 * expected.norm(), setup
        assert logs["twell/l0"] == pytest.approx(single["twell/l0"]), setup
        if is_shared:
            assert logs[f"twell/union_{one_step.SHARE}"] == pytest.approx(union), setup


def test_report_matches_a_count_by_hand():
    model = sparsify(tiny_llama()).train()
    batch = one_step.pad(one_step.rows())
    mask = batch["attention_mask"].bool()
    seen = []
    penalty = L1Penalty(model, l1_weight=0.0)
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    for micro in penalty.micro_batches([batch]):
        model(**micro).loss.backward()
    report = penalty.report()
    assert report["tokens"] == sum(one_step.LENGTHS)
    for layer, h in zip(report["layers"], seen, strict=True):
        active = h[mask] != 0
        assert layer["l0"] == pytest.approx(active.sum(1).double().mean().item(), rel=1e-6)
        assert layer["l1"] == pytest.approx(h[mask].abs().sum(1).double().mean().item(), rel=1e-5)
        assert layer["dead"] == pytest.approx((~active.any(0)).double().mean().item(), abs=1e-6)
    assert penalty.report() is None, "a report starts a new window"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weighted", [False, True])
def test_counts_of_long_batches(dtype, weighted):
    """Neurons below zero count by their size; 3,000 tokens are more than 8 or 11 bits add one by one."""
    h = torch.zeros(2, 1500, 4, dtype=dtype)
    h[..., 0], h[..., 1], h[:, ::3, 2] = 1, -2, -0.5
    weight = torch.ones(2, 1500) if weighted else None
    if weighted:  # padding, of which some attention makes NaN
        h = torch.cat([h, torch.full((2, 3, 4), torch.nan, dtype=dtype)], dim=1)
        weight = torch.nn.functional.pad(weight, (0, 3))
    tally = reference.count(h, weight)
    assert tally.dtype == torch.float32
    assert tally.tolist() == [3000 + 6000 + 500, 3000, 3000, 1000, 0]


def test_nothing_is_left_outside_the_step():
    model = sparsify(tiny_llama()).train()
    batch = one_step.pad(one_step.rows())
    penalty = L1Penalty(model, l1_weight=one_step.L1_WEIGHT)
    model(**batch).loss.backward()
    before = one_step.flat_gradient(model)
    model.zero_grad()
    for _ in penalty.micro_batches([batch]):
        break
    model(**batch).loss.backward()
    assert torch.equal(one_step.flat_gradient(model), before)


def test_training_without_a_step_warns_once():
    model, batch = sparsify(tiny_llama()), {"input_ids": torch.arange(8).view(2, 4)}
    batch["labels"] = batch["input_ids"]
    penalty = L1Penalty(model, 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.eval()(**batch)
        with torch.no_grad():
            model.train()(**batch)
        assert not caught
        for _ in range(2):
            model(**batch).loss.backward()
    assert [str(item.message) for item in caught] == [
        "LlamaForCausalLM has an L1Penalty, but trains without the L1 term: no step was begun. Take each micro-batch "
        "from penalty.micro_batches([...]), or call begin_step and micro_batch"
    ]
    assert penalty.report() is None
    assert not model._forward_pre_hooks
    L1Penalty(model, 1.0).detach()
    assert not model._forward_pre_hooks, "nor where the term is not wanted any more"


def test_training_in_steps_does_not_warn():
    model, batch = sparsify(tiny_llama()).train(), {"input_ids": torch.arange(8).view(2, 4)}
    penalty, other = L1Penalty(model, 1.0), copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one, its_penalty in ((model, penalty), (other, L1Penalty(other, 1.0))):
            for each in its_penalty.micro_batches([batch]):
                one(**each).logits.sum().backward()
            one(**batch)
    assert not model._forward_pre_hooks
    assert not other._forward_pre_hooks


def test_loss_scaling_is_undone_by_the_scaler(truth):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    gradient, _ = one_step.loop_gradient(1, scaler=scaler)
    assert_same_gradient(gradient / 1024.0, truth)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"compiled": True}, {"training": False}], ids=["compiled", "evaluation mode"])
def test_a_compiled_model_and_one_in_evaluation_mode_count_too(truth, options):
    gradient, report = one_step.loop_gradient(1, **options)
    assert_same_gradient(gradient, truth)
    assert report["l0"] > 1


def test_a_new_callback_replaces_the_last_and_can_be_taken_off(tmp_path):
    trainer = one_step.make_trainer(tmp_path)
    SparsityCallback(trainer, l1_weight=2.0)  # never added
    trainer.add_callback(SparsityCallback(trainer, l1_weight=1.0))
    callback = SparsityCallback(trainer, l1_weight=7.0)
    with pytest.raises(ValueError, match="add_callback"):
        trainer.train()
    trainer.add_callback(callback)
    trainer.train()
    assert trainer.state.log_history[0]["twell/l1_weight"] == 7.0
    callback.detach()
    trainer.train()
    assert "twell/l0" not in trainer.state.log_history[0]
    SparsityCallback(trainer, l1_weight=1.0).detach()
    assert not trainer.model._forward_pre_hooks, "nothing warns of a term that is not wanted any more"
    with pytest.raises(ValueError, match="takes the trainer first"):
        SparsityCallback(trainer.model, 1.0)


def test_a_new_callback_keeps_what_it_brings(tmp_path):
    """The last one is detached first: it would take the new hook off again."""
    trainer = one_step.make_trainer(tmp_path)
    teacher = Distillation(trainer.model, one_step.parent(), logits=1.0)
    for _ in range(2):
        callback = SparsityCallback(trainer, 0.0, distillation=teacher)
        assert len(trainer.model._forward_pre_hooks) == 1, "which warns of a training without the term"
        assert teacher._gives_loss_of is trainer
    callback.detach()
    assert not trainer.model._forward_pre_hooks
    assert trainer.compute_loss_func is None


def test_a_trainer_without_the_callback_is_as_it_was(tmp_path):
    trainer = one_step.make_trainer(tmp_path)
    seen, log = [], trainer.log

    def own_log(logs, *args, **kwargs):
        seen.append(logs)
        log(logs, *args, **kwargs)

    trainer.log = own_log
    callbacks, attributes = list(trainer.callback_handler.callbacks), set(vars(trainer))
    for _ in range(2):
        callback = SparsityCallback(trainer, 0.0)
        trainer.add_callback(callback)
        replaced = set(vars(trainer)) - attributes
        assert replaced == {"get_batch_samples", "train", "save_model", "create_model_card"}
        trainer.train()
        attributes |= set(vars(trainer)) - replaced  # what a trainer gets as it trains
    assert all("twell/l0" in logs for logs in seen if "loss" in logs)
    callback.detach()
    assert trainer.log is own_log
    assert not vars(trainer).keys() & replaced
    assert trainer.callback_handler.callbacks == callbacks
    assert not any("on_log" in vars(callback) for callback in callbacks), "the console's"


def test_training_begins_with_weights_in_stock_order(tmp_path):
    """An evaluation before may have stored down_proj by columns."""
    model, orders = sparsify(tiny_llama()), []
    down = model.model.layers[0].mlp.down_proj.weight
    down.data = down.data.t().contiguous().t()

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            orders.append(down.is_contiguous())

    trainer = one_step.make_trainer(tmp_path, model=model, term={"l1_weight": 1e-3})
    trainer.add_callback(Watch())
    expected = down.detach().clone()
    assert not down.is_contiguous()
    trainer.train()
    assert orders == [True]
    assert not torch.equal(down, expected), "it was trained"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["train and eval", "evaluation_mode"])
def test_compiled_training_with_evaluations_between(monkeypatch, how):
    """An evaluation may store down_proj by columns, which a compiled forward cannot turn back."""
    monkeypatch.setitem(limits.read(), "kCpuColumnsBelow", 1.0)
    ids = torch.arange(3, 19).view(2, 8)

    def weights(evaluated: bool):
        torch.compiler.reset()
        model = sparsify(tiny_llama(num_hidden_layers=1)).train()
        down = model.model.layers[0].mlp.down_proj.weight
        compiled = torch.compile(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for step in range(3):
            compiled(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluated and step == 0:
                with evaluation_mode(model) if how == "evaluation_mode" else torch.no_grad():
                    model.eval()(ids)
                    assert not down.is_contiguous()
                if how == "train and eval":
                    model.train()
                assert down.is_contiguous()
        return torch.cat([weight.detach().flatten() for weight in model.parameters()])

    torch.testing.assert_close(weights(True), weights(False))


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_step_may_generate_text(backend):
    model = sparsify(tiny_llama(), backend=backend).train()
    batch = {"input_ids": torch.randint(1, 96, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    penalty, gradients = L1Penalty(model, 1e-2), []
    for generates in (False, True):
        model.zero_grad()
        for micro_batch in penalty.micro_batches([batch]):
            if generates:
                model.generate(batch["input_ids"][:, :3], max_new_tokens=4, do_sample=False)
            model(**micro_batch, labels=batch["input_ids"]).loss.backward()
        gradients.append(one_step.flat_gradient(model))
    assert torch.equal(*gradients)


def test_every_mark_but_zero_is_a_token():
    """As where a mask numbers the documents of a sequence."""
    mask = torch.tensor([[1, 1, 2, 3, 0]])
    assert token_weight({"attention_mask": mask}).tolist() == [[1, 1, 1, 1, 0]]


def test_masks_that_cannot_be_read_are_refused():
    model = sparsify(tiny_llama()).train()
    penalty = L1Penalty(model, l1_weight=1.0)
    batch = one_step.pad(one_step.rows())
    with pytest.raises(ValueError, match=r"\(batch, sequence\)"):
        penalty.begin_step([{**batch, "attention_mask": batch["attention_mask"][:, None, None]}])
    with pytest.raises(ValueError, match="begin_step"), L1Penalty(model, 1.0).micro_batch(batch):
        pass
    with pytest.raises(ValueError, match="input_ids"):
        penalty.begin_step([{"pixels": torch.ones(1)}])
    with pytest.raises(ValueError, match=r"input_ids has shape \(9,\)"):
        penalty.begin_step([{"input_ids": torch.ones(9, dtype=torch.long)}])
    with pytest.raises(ValueError, match="into a list"):
        next(penalty.micro_batches(batch))
    penalty.begin_step([batch])
    with penalty.micro_batch(batch), pytest.raises(ValueError, match="attention_mask"):
        model(input_ids=batch["input_ids"][:2])


class AtEvents(TrainerCallback):
    """Notes whether the term is on."""

    def __init__(self):
        self.on = []

    def on_step_end(self, args, state, control, model, **kwargs):
        self.on.append(any(ffn.twell_state.l1 for ffn in sparse_ffns(model)))

    on_substep_end = on_pre_optimizer_step = on_optimizer_step = on_evaluate = on_step_end


def test_the_term_is_on_for_micro_batches_alone(tmp_path):
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "eval_steps": 1}
    kind = functools.partial(Trainer, eval_dataset=one_step.rows()[:4], callbacks=[events := AtEvents()])
    one_step.make_trainer(tmp_path, kind, eval_strategy="steps", term={"l1_weight": 0.0}, **options).train()
    assert events.on == 5 * [False]


def test_a_trainer_that_takes_all_micro_batches_at_once_is_refused(tmp_path):
    """The term was off while it trained on them, and nothing told so."""
    trainer = one_step.make_trainer(tmp_path, term={"l1_weight": 0.0})
    lazily = trainer.get_batch_samples

    def at_once(*args):
        batches, num_items = lazily(*args)
        return list(batches), num_items

    trainer.get_batch_samples = at_once
    with pytest.raises(ValueError, match="Trainer takes a step's micro-batches out"):
        trainer.train()


def test_a_model_that_the_trainer_makes_anew_is_refused(tmp_path):
    """The L1 term would act on a model that is not trained."""
    args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[], save_strategy="no")
    trainer = Trainer(model_init=lambda: sparsify(tiny_llama()), args=args, train_dataset=one_step.rows())
    trainer.add_callback(SparsityCallback(trainer, 0.1))
    with pytest.raises(ValueError, match="model_init"):
        trainer.train()


@pytest.mark.parametrize("change", [unpatch, functools.partial(sparsify, layers=[0])])
def test_blocks_that_change_after_the_callback_are_said_to(tmp_path, change):
    trainer = one_step.make_trainer(tmp_path, term={"l1_weight": 1e-3})
    change(trainer.model)
    with pytest.raises(ValueError, match=r"has other sparse blocks than .*unpatch"):
        trainer.train()


def test_fp16_that_another_library_scales_is_refused(tmp_path, monkeypatch):
    trainer = one_step.make_trainer(tmp_path)
    monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", "fp16")  # as with DeepSpeed: without a scaler
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ValueError, match=r"DeepSpeed scales the loss itself, .* train in bf16"):
        SparsityCallback(trainer, 0.1)


def test_fp16_on_a_cpu_is_refused_for_that(tmp_path):
    trainer = one_step.make_trainer(tmp_path, fp16=True)
    with pytest.raises(ValueError, match=r"^fp16 needs a GPU, and this trainer is on cpu; train in float32 or bf16$"):
        SparsityCallback(trainer, 0.1)


def test_steps_without_tokens_report_nothing():
    model = sparsify(tiny_llama()).train()
    penalty = L1Penalty(model, 1e-3)
    ids = torch.ones(2, 9, dtype=torch.long)
    for batches in ([], [{"input_ids": ids, "attention_mask": torch.zeros_like(ids)}]):
        for batch in penalty.micro_batches(batches):
            model(**batch).logits.sum().backward()
            assert one_step.flat_gradient(model).isfinite().all()
        assert penalty.report() is None


def test_a_loop_that_runs_the_model_twice_is_told_before_the_optimizer_steps():
    model, batch = sparsify(tiny_llama()).train(), one_step.pad(one_step.rows())
    micro_batches = L1Penalty(model, 1.0).micro_batches([batch])
    (model(**next(micro_batches)).loss + model(**batch).loss).backward()
    with pytest.raises(ValueError, match="more than once"):
        next(micro_batches)


@pytest.mark.parametrize("no_grad", [False, True])
def test_a_loop_without_backward_inside_is_told(no_grad):
    """Counts come from backward: l0 0 and dead 1 would be reported of what was only run, or a step late."""
    model = sparsify(tiny_llama()).train()
    penalty = L1Penalty(model, 1.0)

    def losses():
        with torch.set_grad_enabled(not no_grad):
            return [model(**batch).loss for batch in penalty.micro_batches([one_step.pad(one_step.rows())])]

    for _ in range(2):
        with pytest.raises(ValueError, match=r"no backward came to the sparse blocks.*measure_sparsity"):
            losses()


@pytest.mark.parametrize("backwards", [0, 2])
def test_a_refused_first_step_is_in_no_report(backwards):
    """A notebook goes on with the same object after the loop is put right."""
    model, batch = sparsify(tiny_llama()).train(), one_step.pad(one_step.rows())

    def step(penalty, backwards):
        for inputs in penalty.micro_batches([batch]):
            for _ in range(backwards):
                model(**inputs).loss.backward()

    penalty, fresh = L1Penalty(model, 1.0), L1Penalty(model, 1.0)
    with pytest.raises(ValueError, match="first optimizer step"):
        step(penalty, backwards)
    step(penalty, 1)
    step(fresh, 1)
    assert penalty.report() == fresh.report()


@pytest.mark.parametrize("when", ["first", "last", "by hand"])
def test_a_step_that_broke_off_is_in_no_report(when):
    """Its tokens were counted in full, and diluted every figure."""
    model, rows = sparsify(tiny_llama()).train(), one_step.rows()
    batches = [one_step.pad(rows[:4]), one_step.pad(rows[4:])]
    penalty, fresh = L1Penalty(model, 1.0), L1Penalty(model, 1.0)

    def step(penalty, fails=None):
        micro_batches = penalty.micro_batches(batches)
        for number, batch in enumerate(micro_batches):
            model(**batch).loss.backward()
            if number == fails:
                raise MemoryError

    def step_by_hand():
        penalty.begin_step(batches)
        for batch in batches:
            with contextlib.suppress(MemoryError), penalty.micro_batch(batch):  # passes over the first
                model(**batch).loss.backward()
                if batch is batches[0]:
                    raise MemoryError

    if when == "by hand":
        step_by_hand()
    else:
        with pytest.raises(MemoryError):
            step(penalty, fails=0 if when == "first" else 1)
    assert penalty.report() is None
    step(penalty)
    step(fresh)
    assert penalty.report() == fresh.report()
    unchecked = L1Penalty(model, 1.0)
    for _ in unchecked.micro_batches(batches):
        break
    with pytest.raises(ValueError, match="no backward"):  # of the first whole step
        list(unchecked.micro_batches(batches))


def reports_of_one_rank(rank: int, folder: Path) -> None:
    """Of a step of which rank 1 loses a micro-batch, of a whole one, and of both."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    model, rows, reports = sparsify(tiny_llama()).train(), one_step.rows(), []
    penalty, mine = L1Penalty(model, 1.0), rows[4 * rank : 4 * rank + 4]
    batches = [one_step.pad(mine[:2]), one_step.pad(mine[2:])]
    for losing in ([True], [False], [False, True]):
        for loses in losing:
            penalty.begin_step(batches)
            for batch in batches:
                with contextlib.suppress(MemoryError), penalty.micro_batch(batch):
                    if loses and rank == 1 and batch is batches[1]:
                        raise MemoryError
                    model(**batch).loss.backward()
        reports.append(penalty.report())
    torch.save(reports, folder / f"{rank}.pt")


@pytest.mark.slow
def test_a_step_that_broke_off_on_one_rank_is_in_no_report_of_any(tmp_path):
    torch.multiprocessing.spawn(reports_of_one_rank, (tmp_path,), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    assert first == second
    broken, whole, both = first
    assert broken is None
    assert whole == both
    assert whole["tokens"] == sum(one_step.LENGTHS)


def test_a_penalty_takes_the_model_as_distributed_data_parallel_wraps_it(truth, tmp_path):
    """Which `accelerator.prepare` does where there is more than one process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        gradient, report = one_step.loop_gradient(wrap=nn.parallel.DistributedDataParallel)
    finally:
        torch.distributed.destroy_process_group()
    assert_same_gradient(gradient, truth)
    assert report["tokens"] == sum(one_step.LENGTHS)


def test_steps_that_nothing_ends_count_in_the_next_report():
    """As in a loop of `begin_step` and `micro_batch`."""
    model = sparsify(tiny_llama()).train()
    penalty, reports = L1Penalty(model, 1.0), []
    batches = [one_step.pad(one_step.rows()[:3]), one_step.pad(one_step.rows()[3:])]
    for steps in ([batches], [[batch] for batch in batches]):
        for step in steps:
            penalty.begin_step(step)
            for batch in step:
                with penalty.micro_batch(batch):
                    model(**batch).logits.sum().backward()
        reports.append(penalty.report())
    assert reports[0]["tokens"] == reports[1]["tokens"] == sum(one_step.LENGTHS)
    for one, other in zip(reports[0]["layers"], reports[1]["layers"], strict=True):
        assert one == pytest.approx(other, rel=1e-6)


def test_wrong_set_ups_are_refused(tmp_path):
    with pytest.raises(ValueError, match="sparsify"):
        L1Penalty(tiny_llama(), 1.0)
    for weight in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="l1_weight"):
            L1Penalty(sparsify(tiny_llama()), weight)
    trainer = one_step.make_trainer(tmp_path)
    trainer.args._n_gpu = 2  # what TrainingArguments finds on a machine of two GPUs, started as one process
    with pytest.raises(ValueError, match="accelerate launch"):
        SparsityCallback(trainer, 1.0)


@pytest.mark.parametrize("name", ["cp_size", "sp_size"])
def test_ranks_that_share_sequences_are_refused(name, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    state = accelerate.state.AcceleratorState()
    penalty = L1Penalty(sparsify(tiny_llama()), 1.0)
    monkeypatch.setitem(vars(state), "parallelism_config", accelerate.ParallelismConfig(**{name: 2}))
    with pytest.raises(ValueError, match=f"accelerate's {name}=2 cuts each sequence over 2 ranks"):
        L1Penalty(sparsify(tiny_llama()), 1.0)
    with pytest.raises(ValueError, match=f"{name}=2"):  # the Accelerator came after the penalty
        penalty.begin_step([{"input_ids": torch.ones(1, 3)}])


def test_the_report_comes_back_from_the_activations_device():
    """As where FSDP2 offloads parameters to the CPU, and with them the tallies."""
    block = sparsify(tiny_llama()).model.layers[0].mlp.to("meta")
    tally = torch.zeros(1 + 52, requires_grad=True)
    block.twell_state.l1 = L1Inputs(torch.ones(()), torch.ones(1, 3), tally)
    y = block(torch.ones(1, 3, 32, device="meta"))
    nodes = [y.grad_fn]
    for node in nodes:
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
    (to_tally,) = [n for n in nodes if any(getattr(p, "variable", None) is tally for p, _ in n.next_functions)]
    assert to_tally.name() == "ToCopyBackward0"


def test_layers_restrict_the_l1_term():
    model = sparsify(tiny_llama(), layers=[-1]).train()
    assert all(isinstance(layer.mlp.act_fn, nn.ReLU) for layer in model.model.layers)
    penalty = L1Penalty(model, l1_weight=1.0)
    for batch in penalty.micro_batches([one_step.pad(one_step.rows())]):
        model(**batch).loss.backward()
    assert [ffn.twell.layer for ffn in penalty.ffns] == [2]
    assert len(penalty.report()["layers"]) == 1
