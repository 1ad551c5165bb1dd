"""Each layer's density and unions in the `twell` entry of a config: measured, saved, gone once the model is trained."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from hf_twell import L1Penalty, SparsityCallback, TwellLlamaForCausalLM, measure_sparsity, sparsify
from hf_twell.blocks.modeling import sparse_ffns
from hf_twell.convert.entry import check_entry
from hf_twell.dispatch.activity import Activity
from hf_twell.dispatch.choose import choices_by_tokens
from hf_twell.dispatch.key import HOPPER, CallKey
from hf_twell.models.adapters import RECORD, save_adapter
from hf_twell.models.hub import folder_card
from tests.conftest import ids, logits, tiny_llama


def measured(model) -> list[float]:
    return [layer["density"] for layer in measure_sparsity(model, [ids()])["layers"]]


def known(model) -> dict[int, dict | None]:
    """What each layer's sparse block knows of its density, for compiled evaluation."""
    return {ffn.twell.layer: ffn.twell.choices for ffn in sparse_ffns(model)}


def activity(model) -> list[tuple | None]:
    """What each layer's sparse block knows: density, union of 64 and of 128."""
    return [ffn.twell.activity for ffn in sparse_ffns(model)]


def long_ids(length: int = 130) -> torch.Tensor:
    return torch.randint(3, 96, (1, length), generator=torch.Generator().manual_seed(0))


def answers_of(model, density) -> list:
    weight = sparse_ffns(model)[0].up_proj.weight
    key = CallKey("cuda", HOPPER, weight.dtype, weight.dtype, 1, *reversed(weight.shape))
    return choices_by_tokens([(key, Activity(share)) for share in density])


def test_a_density_alone_sets_the_answers():
    model = sparsify(tiny_llama())
    assert "density" not in model.config.twell
    expected = measured(model)
    assert len(set(expected)) == 3
    assert [known(model)[layer] for layer in range(3)] == answers_of(model, expected) != [None] * 3


@pytest.mark.parametrize("load", [AutoModelForCausalLM, TwellLlamaForCausalLM])
def test_it_is_saved_with_unions_and_outlives_loading_and_another_choice_of_layers(load, tmp_path):
    model = sparsify(tiny_llama())
    assert activity(model) == [None] * 3
    layers = measure_sparsity(model, [long_ids()])["layers"]
    expected = {run: pytest.approx([layer["unions"][run] for layer in layers], abs=1e-6) for run in ("16", "64", "128")}
    entry = model.config.twell
    assert entry["unions"] == expected
    of_layers = list(zip(entry["density"], entry["unions"]["64"], entry["unions"]["128"], strict=True))
    assert activity(model) == of_layers
    model.save_pretrained(tmp_path)
    loaded = sparsify(load.from_pretrained(tmp_path), layers=[1])
    assert loaded.config.twell["density"] == pytest.approx([layer["density"] for layer in layers], abs=1e-6)
    assert (loaded.config.twell["unions"], loaded.config.twell["layers"]) == (expected, [1])
    assert (activity(loaded), known(loaded)) == (of_layers[1:2], {1: known(model)[1]})
    assert check_entry(loaded.config) == loaded.config.twell


def test_a_text_too_short_for_a_run_leaves_its_union_out():
    model = sparsify(tiny_llama())
    measure_sparsity(model, [long_ids(70)])
    assert list(model.config.twell["unions"]) == ["16", "64"]
    assert all(of_64 > density and of_128 is None for density, of_64, of_128 in activity(model))
    measure_sparsity(model, [ids()[:1, :9]])
    assert "unions" not in model.config.twell, "they were of another text"
    assert all(each[1:] == (None, None) for each in activity(model))


def test_an_entry_of_before_has_a_density_alone(tmp_path):
    model = sparsify(tiny_llama())
    model.config.twell["density"] = [0.1, 0.2, 0.3]
    model.save_pretrained(tmp_path)
    loaded = sparsify(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert loaded.config.twell == {"version": 1, "layers": None, "density": [0.1, 0.2, 0.3]}
    assert activity(loaded) == [(0.1, None, None), (0.2, None, None), (0.3, None, None)]


def test_a_dense_model_gets_none():
    dense = tiny_llama()
    measured(dense)
    assert not hasattr(dense.config, "twell")


def test_a_step_of_training_takes_it_out():
    model = sparsify(tiny_llama())
    measure_sparsity(model, [long_ids()])
    batch = {"input_ids": ids(), "labels": ids()}
    for inputs in L1Penalty(model, 1e-3).micro_batches([batch]):
        model(**inputs).loss.backward()
    assert model.config.twell == {"version": 1, "layers": None}
    assert known(model) == dict.fromkeys(range(3))
    assert activity(model) == [None] * 3


def test_layers_that_are_cut_off_keep_what_they_know():
    model = sparsify(tiny_llama())
    measured(model)
    before = known(model)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
    assert known(model) == {layer: before[layer] for layer in range(2)}
    measured(model)
    assert None not in known(model).values()


def test_an_adapters_record_has_none(tmp_path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(sparsify(tiny_llama()), LoraConfig(target_modules=["q_proj"]))
    measure_sparsity(model, [long_ids()])
    assert model.config.twell.keys() >= {"density", "unions"}
    save_adapter(model, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())[RECORD] == {
        "version": 1,
        "layers": None,
    }


@pytest.mark.parametrize("load", [AutoModelForCausalLM, TwellLlamaForCausalLM])
@pytest.mark.parametrize("cut", ["before saving", "by an argument"])
def test_that_of_layers_cut_off_counts_as_not_measured(load, cut, tmp_path):
    model, options = sparsify(tiny_llama()), {}
    measure_sparsity(model, [long_ids()])
    if cut == "before saving":
        model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
    else:
        options = {"num_hidden_layers": 2}
    model.save_pretrained(tmp_path)
    loaded = sparsify(load.from_pretrained(tmp_path, **options).eval())
    assert loaded.config.twell == {"version": 1, "layers": None}
    assert known(loaded) == dict.fromkeys(range(2))
    expected = measured(loaded)
    assert loaded.config.twell["density"] == pytest.approx(expected, abs=1e-6)
    if cut == "before saving":
        assert sparsify(model).config.twell == {"version": 1, "layers": None}
        torch.testing.assert_close(logits(loaded), logits(model.eval()))


@pytest.mark.parametrize(
    "density", [0.1, [0.1, 0.2, 1.5], [0.1, 0.2, "0.3"], [0.1, 0.2, True], [0.1, -0.1], {}, [0.1, 0.2, torch.nan]]
)
def test_one_that_cannot_be_true_is_refused(density):
    model = sparsify(tiny_llama())
    model.config.twell["density"] = density
    with pytest.raises(ValueError, match=r"density in the config's twell entry.*for each of 3 layers"):
        sparsify(model)


@pytest.mark.parametrize("unions", [[0.1, 0.2, 0.3], {"64": 0.1}, {"64": [0.1, 0.2]}, {"64": [0.1, 0.2, 1.5]}])
def test_unions_that_cannot_be_true_are_refused(unions):
    model = sparsify(tiny_llama())
    model.config.twell |= {"density": [0.1, 0.2, 0.3], "unions": unions}
    with pytest.raises(ValueError, match=r"unions in the config's twell entry.*as the density has \(3\)"):
        sparsify(model)


def test_null_counts_as_not_measured():
    config = LlamaConfig(hidden_act="relu", num_hidden_layers=1)
    config.twell = {"version": 1, "layers": None, "density": None}
    assert check_entry(config) == config.twell


@pytest.mark.parametrize("layers", [None, [0]])
def test_training_stores_that_of_its_last_steps(layers, tmp_path):
    """With four steps, that of the last one; a few layers' would leave the others' unknown."""
    model = sparsify(tiny_llama(), layers=layers)
    args = TrainingArguments(str(tmp_path / "out"), max_steps=4, logging_steps=1, use_cpu=True, report_to=[])
    trainer = Trainer(
        model, args, train_dataset=[{"input_ids": row, "labels": row} for row in long_ids(160).view(4, 40)]
    )
    trainer.add_callback(SparsityCallback(trainer, l1_weight=1.0))
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    entry = json.loads((tmp_path / "saved" / "config.json").read_text())["twell"]
    row = next(row for row in trainer.state.log_history if row["step"] == 4)
    logged = [row[f"twell/layer_{layer:02d}/density"] for layer in layers or range(3)]
    assert entry.get("density") == (None if layers else pytest.approx(logged, abs=1e-6))
    assert ("density measured" in folder_card(tmp_path / "saved", "me/x")) == (layers is None)
