"""What the `twell` entry says was measured is gone once somebody trains the model, by whatever trainer."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM, GenerationConfig, Trainer, TrainingArguments, default_data_collator

from hf_twell import load_adapter, measure_sparsity, save_adapter, sparsify
from hf_twell.blocks.modeling import sparse_ffns
from hf_twell.convert.entry import ACTIVITY
from hf_twell.models.hub import folder_card
from tests.conftest import ids, tiny_llama
from tests.convert.test_own_type import dense
from tests.mixtures import mixture

peft = pytest.importorskip("peft")


def measured(model: nn.Module) -> nn.Module:
    """A sparse model in training mode that knows its activity, as one does that was loaded."""
    sparsify(model)
    measure_sparsity(model, [torch.randint(3, 59, (1, 70), generator=torch.Generator().manual_seed(0))])
    assert knows(model)
    return model.train()


def knows(model: nn.Module) -> bool:
    """Whether the model's config says what was measured, as all of its blocks do, or none."""
    says = {key in model.config.twell for key in ACTIVITY}
    says |= {ffn.twell.activity is not None for ffn in sparse_ffns(model)}
    assert len(says) == 1
    return says.pop()


def learn(model: nn.Module) -> None:
    model(input_ids=ids() % 59, labels=ids() % 59).loss.backward()


def with_lora(model: nn.Module, **options) -> nn.Module:
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))


def told(folder) -> dict:
    return json.loads((folder / "config.json").read_text())["twell"]


@pytest.mark.parametrize("adapted", [None, ["up_proj"], ["q_proj"]])
def test_transformers_trainer_alone(adapted, tmp_path):
    measured(tiny_llama()).save_pretrained(tmp_path / "sparse")
    loaded = model = sparsify(AutoModelForCausalLM.from_pretrained(tmp_path / "sparse"))
    assert knows(model)
    if adapted:
        model = with_lora(model, target_modules=adapted)
    options = {"max_steps": 2, "use_cpu": True, "report_to": [], "save_steps": 1, "eval_steps": 1}
    rows = [{"input_ids": row, "labels": row} for row in ids().repeat(4, 1)]
    args = TrainingArguments(str(tmp_path / "out"), eval_strategy="steps", eval_on_start=True, **options)
    trainer = Trainer(model, args, default_data_collator, train_dataset=rows, eval_dataset=rows)
    trainer.evaluate()
    assert knows(model)
    trainer.train()
    assert not knows(model)
    if adapted:
        model = model.merge_and_unload()
    else:
        assert not told(tmp_path / "out" / "checkpoint-1").keys() & set(ACTIVITY)
    assert model is loaded
    model.save_pretrained(tmp_path / "trained")
    assert told(tmp_path / "trained") == {"version": 1, "layers": None}
    unknown = "| density | not known; `hf_twell.measure_sparsity` measures it |"
    assert [unknown in folder_card(tmp_path / name, "me/x") for name in ("sparse", "trained")] == [False, True]
    measured(model.requires_grad_())
    sparsify(model, layers=[1])
    assert knows(model), "what is measured anew stays"
    learn(model)
    assert not knows(model)


def test_what_does_not_train_keeps_it():
    model = measured(tiny_llama())
    with torch.no_grad():
        model(ids())
    model.eval()
    model(ids()).logits.sum().backward()
    model.generate(ids(), generation_config=GenerationConfig(max_new_tokens=3, pad_token_id=0, eos_token_id=None))
    model.train().requires_grad_(False)
    model(ids())
    model.lm_head.requires_grad_()
    learn(model)
    assert knows(model), "in training mode, but no neuron's h can change"
    model.model.norm.requires_grad_()
    learn(model)
    assert knows(model)
    model.model.layers[2].post_attention_layernorm.weight.requires_grad_()
    learn(model)
    assert not model.config.twell.keys() & set(ACTIVITY)
    assert [ffn.twell.activity is None for ffn in sparse_ffns(model)] == [False, False, True]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model = measured(tiny_llama())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    learn(model)
    assert not knows(model)


def test_other_forms():
    for model in (mixture("qwen2_moe"), dense("qwen3_5")):
        learn(measured(model))
        assert not knows(model)


def test_a_layer_that_is_sparse_alone():
    model = measured(tiny_llama())
    sparsify(model, layers=[2])
    learn(model)
    assert not knows(model)


@pytest.mark.parametrize("made", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_go_by_a_config_of_their_own(made):
    model = measured(tiny_llama())
    other = made(model)
    assert other.config is not model.config
    learn(other)
    assert (knows(other), knows(model)) == (False, True)
    other = made(model)
    learn(model)
    assert (knows(other), knows(model)) == (True, False)


def test_a_copied_block_goes_by_the_models_config():
    model = with_lora(measured(tiny_llama()), target_modules=["q_proj"], modules_to_save=["mlp"])
    learn(model)
    assert not model.config.twell.keys() & set(ACTIVITY)
    assert not knows(model.merge_and_unload())


def test_in_a_wrapper(tmp_path):
    model = measured(tiny_llama())
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        learn(nn.parallel.DistributedDataParallel(model))
    finally:
        torch.distributed.destroy_process_group()
    assert not knows(model)


def test_an_adapter_on_a_measured_base_is_not_what_was_measured(tmp_path):
    model = measured(tiny_llama())
    model.save_pretrained(tmp_path / "base")
    model = with_lora(sparsify(AutoModelForCausalLM.from_pretrained(tmp_path / "base")), target_modules=["q_proj"])
    save_adapter(model, tmp_path / "adapter")
    assert knows(model), "an adapter that has learned nothing changes nothing"
    assert not knows(load_adapter(tmp_path / "adapter"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole", "in place", "layers"])
def test_compiled(how):
    """No graph breaks, and a model is traced anew once; the code that its layers share is traced anew twice."""
    torch._dynamo.reset()
    model = measured(tiny_llama(use_cache=False))
    counter = CompileCounter()
    options = {"fullgraph": True, "backend": counter}
    target = torch.compile(model, **options) if how == "whole" else model
    if how == "in place":
        model.compile(**options)
    if how == "layers":
        for layer in model.model.layers:
            layer.compile(**options)
    frames = []
    for _ in range(3):
        learn(target)
        frames.append(counter.frame_count)
    assert not knows(model)
    assert frames == ([2, 3, 3] if how == "layers" else [1, 2, 2])
    measure_sparsity(model, [ids(70)])
    learn(target)
    assert "density" not in model.config.twell, "a graph that was there before"
