"""From SiLU to ReLU by and by: what is saved on the way is no finished model."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from hf_twell import SparsityCallback, sparsify
from hf_twell.blocks.modeling import sparse_ffns
from hf_twell.convert.blending import Blend
from hf_twell.files.checkpoints import read_state
from hf_twell.models.loading import load_model
from tests import one_step
from tests.conftest import tiny_llama, training_rows

pytestmark = pytest.mark.numeric

IDS = torch.arange(3, 19).view(2, 8)
STEPS, BLEND_STEPS = 6, 4


def make_trainer(folder, **options) -> Trainer:
    model = tiny_llama()
    args = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=4, learning_rate=3e-3, logging_steps=1, save_steps=2,
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=one_step.rows(), data_collator=one_step.pad)
    blend = Blend(model)
    trainer.add_callback(SparsityCallback(trainer, **{"blend_steps": BLEND_STEPS, **options}, blend=blend))
    return trainer


@torch.no_grad()
def test_it_begins_at_the_parent_and_ends_at_relu():
    model = tiny_llama()
    dense = model(IDS).logits
    blend = Blend(model)
    assert torch.equal(model(IDS).logits, dense)
    blend.set(0.5)
    half = model(IDS).logits
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(IDS).logits.float(), half, atol=0.2, rtol=0.05)
    blend.set(1.5)  # a run that goes on long after its blend
    assert blend.share == 1
    relu = sparsify(tiny_llama(), backend="reference")
    torch.testing.assert_close(model(IDS).logits, relu(IDS).logits, atol=1e-5, rtol=1e-5)
    assert not torch.equal(half, dense)
    assert all(type(layer.mlp.act_fn) is nn.ReLU for layer in model.model.layers)
    assert (model.config.hidden_act, model.config.twell) == ("relu", relu.config.twell)
    with pytest.raises(ValueError, match="starts from a dense parent"):
        Blend(model)


def test_functions_blend_too_and_layers_may_be_chosen():
    """Models with code of their own may call a plain function."""
    model = tiny_llama()
    dense = model(IDS).logits
    for layer in model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.act_fn = nn.functional.silu
    blend = Blend(model, layers=[-1])
    torch.testing.assert_close(model(IDS).logits, dense)
    blend.set(1)
    torch.testing.assert_close(model(IDS).logits, sparsify(tiny_llama())(IDS).logits)
    assert [ffn.twell.layer for ffn in sparse_ffns(model)] == [2]


def test_a_checkpoint_on_the_way_is_no_finished_model(tmp_path):
    model = tiny_llama()
    blend = Blend(model)
    blend.set(0.25)
    with pytest.raises(ValueError, match="unfinished"):
        sparsify(model)
    model.save_pretrained(tmp_path)
    assert "0.2500" in AutoConfig.from_pretrained(tmp_path).twell["unfinished"]["activation"]
    with pytest.raises(KeyError, match=r"unfinished blend of silu and 0\.2500 relu"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"cannot load a model .* unfinished: .* silu blended with 0\.2500"):
        load_model(tmp_path)


@pytest.mark.parametrize("options", [{"l1_weight": 0.5}, {"target_density": 0.2}])
def test_a_run_blends_then_regularises_and_resumes_on_the_way(tmp_path, options):
    whole = make_trainer(tmp_path, **options)
    whole.train()
    rows = training_rows(whole)
    assert [row["twell/blend"] for row in rows.values()] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    assert [row["twell/l1_weight"] > 0 for row in rows.values()][:BLEND_STEPS] == [False] * BLEND_STEPS
    if "l1_weight" in options:
        assert rows[BLEND_STEPS + 1]["twell/l1_weight"] == 0.5, "from the first step of ReLU on"
    else:
        callback = next(each for each in whole.callback_handler.callbacks if isinstance(each, SparsityCallback))
        assert callback.controller.steps == STEPS - BLEND_STEPS
        assert [step for step, row in rows.items() if "twell/target" in row] == [BLEND_STEPS + 1, STEPS]
    assert rows[STEPS]["twell/l1_weight"] > 0
    assert rows[1]["twell/density"] == pytest.approx(1.0, abs=0.01), "the parent's activation is dense"
    assert rows[STEPS]["twell/density"] < 0.7

    assert read_state(tmp_path / "checkpoint-2")["blend_steps"] == BLEND_STEPS
    resumed = make_trainer(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for step, row in training_rows(resumed).items():
        assert row == pytest.approx(rows[step], abs=1e-6), step
    assert AutoConfig.from_pretrained(tmp_path / "checkpoint-6").hidden_act == "relu"


def test_the_warm_up_begins_after_the_blend(tmp_path):
    trainer = make_trainer(tmp_path, l1_weight=2.0, warmup_steps=2)
    callback = next(each for each in trainer.callback_handler.callbacks if isinstance(each, SparsityCallback))
    for weights in (
        [callback.weight_at(step) for step in range(7)],
        [2 * callback.progress(step) for step in range(7)],
    ):
        assert weights == [0, 0, 0, 0, 0, 1, 2]


def test_a_blend_of_no_steps_takes_one(tmp_path):
    trainer = make_trainer(tmp_path, l1_weight=2.0, blend_steps=0)
    trainer.args.max_steps = 2
    trainer.train()
    assert [row["twell/l1_weight"] for row in training_rows(trainer).values()] == [0, 2]


def test_a_blend_that_would_not_end_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, l1_weight=0.0)
    trainer.args.max_steps = BLEND_STEPS
    with pytest.raises(ValueError, match="leaves none"):
        trainer.train()
