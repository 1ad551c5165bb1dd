"""Each layer's density and unions in the `twell` entry of a config: measured, saved, gone once the model is trained."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_twell import L1Penalty, SparsityCallback, TwellLlamaForCausalLM, measure_sparsity, sparsify
from hf_twell.blocks.modeling import sparse_ffns
from hf_twell.convert.entry import check_entry
from hf_twell.dispatch.activity import Activity, stored_activity
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


def activity(model) -> list[Activity | None]:
    """What each layer's sparse block knows: density and union of 128."""
    return [ffn.twell.activity for ffn in sparse_ffns(model)]


def half_dead(**options) -> LlamaForCausalLM:
    """A sparse model whose unions stay below 1."""
    model = sparsify(tiny_llama(), **options)
    for ffn in sparse_ffns(model):
        ffn.gate_proj.weight.data[::2] = 0
    return model


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
    pairs = zip(entry["density"], entry["unions"]["128"], strict=True)
    of_layers = [Activity(density, union=union) for density, union in pairs]
    assert activity(model) == of_layers
    model.save_pretrained(tmp_path)
    loaded = sparsify(load.from_pretrained(tmp_path), layers=[1])
    assert loaded.config.twell["density"] == pytest.approx([layer["density"] for layer in layers], abs=1e-6)
    assert (loaded.config.twell["unions"], loaded.config.twell["layers"]) == (expected, [1])
    assert (activity(loaded), known(loaded)) == (of_layers[1:2], {1: known(model)[1]})
    assert check_entry(loaded.config) == loaded.config.twell


def test_a_text_too_short_for_a_run_leaves_its_union_out_and_blocks_estimate_it():
    model = half_dead()
    measure_sparsity(model, [long_ids(70)])
    assert list(model.config.twell["unions"]) == ["16", "64"]
    unions = model.config.twell["unions"]["64"]
    assert all(each.union > of_64 > each.density for each, of_64 in zip(activity(model), unions, strict=True))
    measure_sparsity(model, [ids()[:1, :9]])
    assert "unions" not in model.config.twell, "they were of another text"
    assert [each.union for each in activity(model)] == [None] * 3


def test_an_entry_of_before_has_a_density_alone(tmp_path):
    model = sparsify(tiny_llama())
    model.config.twell["density"] = [0.1, 0.2, 0.3]
    model.save_pretrained(tmp_path)
    loaded = sparsify(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert loaded.config.twell == {"version": 1, "layers": None, "density": [0.1, 0.2, 0.3]}
    assert activity(loaded) == [Activity(0.1), Activity(0.2), Activity(0.3)]


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


@pytest.mark.parametrize(
    "unions", [[0.1, 0.2, 0.3], {"64": 0.1}, {"64": [0.1, 0.2]}, {"64": [0.1, 0.2, 1.5]}, {"few": [0.1] * 3}]
)
def test_unions_that_cannot_be_true_are_refused(unions):
    model = sparsify(tiny_llama())
    model.config.twell |= {"density": [0.1, 0.2, 0.3], "unions": unions}
    with pytest.raises(ValueError, match=r"unions in the config's twell entry.*as the density has \(3\)"):
        sparsify(model)


def test_null_counts_as_not_measured():
    config = LlamaConfig(hidden_act="relu", num_hidden_layers=1)
    config.twell = {"version": 1, "layers": None, "density": None}
    assert check_entry(config) == config.twell


def trained(folder, layers=None, length=40, **term) -> Trainer:
    """A trainer that has made four steps with these options of SparsityCallback, and saved its model."""
    args = TrainingArguments(str(folder / "out"), max_steps=4, logging_steps=1, use_cpu=True, report_to=[])
    rows = [{"input_ids": row, "labels": row} for row in long_ids(4 * length).view(4, length)]
    trainer = Trainer(half_dead(layers=layers), args, train_dataset=rows)
    trainer.add_callback(SparsityCallback(trainer, **term))
    trainer.train()
    trainer.save_model(folder / "saved")
    return trainer


@pytest.mark.parametrize("layers", [None, [0]])
def test_training_stores_that_of_its_last_steps(layers, tmp_path):
    """With four steps, that of the last one; a few layers' would leave the others' unknown."""
    trainer = trained(tmp_path, layers, l1_weight=1.0)
    entry = json.loads((tmp_path / "saved" / "config.json").read_text())["twell"]
    row = next(row for row in trainer.state.log_history if row["step"] == 4)
    logged = [row[f"twell/layer_{layer:02d}/density"] for layer in layers or range(3)]
    assert entry.get("density") == (None if layers else pytest.approx(logged, abs=1e-6))
    assert ("density measured" in folder_card(tmp_path / "saved", "me/x")) == (layers is None)


TARGETS = [{"target_density": 0.2}, {"target_union": 0.6}]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: next(iter(target)))
def test_training_with_share_stores_the_union_of_so_many_tokens_too(target, tmp_path):
    """In the config, for the choice, in both cards and after loading; until it is measured."""
    trainer = trained(tmp_path, length=160, term="count", share=64, warmup_steps=0, **target)
    entry = json.loads((tmp_path / "saved" / "config.json").read_text())["twell"]
    row = next(row for row in trainer.state.log_history if row["step"] == 4)
    logged = [row[f"twell/layer_{layer:02d}/union_64"] for layer in range(3)]
    assert entry["unions"] == {"64": pytest.approx(logged, abs=1e-6)}
    expected = stored_activity(entry["density"], entry["unions"])
    assert all(known.union > of_64 for known, of_64 in zip(expected, entry["unions"]["64"], strict=True))
    loaded = sparsify(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))
    for model in (trainer.model, loaded):
        assert (activity(model), model.config.twell) == (expected, entry)
    trainer.create_model_card(model_name="me/x")
    cells = [f"{100 * union:.1f} %" for union in [*entry["unions"]["64"], sum(entry["unions"]["64"]) / 3]]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| layer | active neurons per token (L0) | of | density | union of 64 tokens | dead |" in card
    assert [line.split(" | ")[4] for line in card.partition("## Sparsity")[2].splitlines()[6:10]] == cells
    for page in (card, folder_card(tmp_path / "saved", "me/x")):
        assert f"| union of 64 tokens, measured | {cells[-1]} |" in page
    measure_sparsity(loaded, [long_ids()])
    assert list(loaded.config.twell["unions"]) == ["16", "64", "128"]
    assert loaded.config.twell["unions"]["64"] != entry["unions"]["64"]


def test_a_run_of_another_length_has_its_own_name_and_training_without_share_no_union(tmp_path):
    entry = trained(tmp_path / "few", term="count", share=20, target_density=0.2).model.config.twell
    assert list(entry["unions"]) == ["20"]
    assert "union of 20 tokens" in folder_card(tmp_path / "few" / "saved", "me/x")
    entry = trained(tmp_path / "short", length=76, term="count", share=64, target_density=0.2).model.config.twell
    assert list(entry["unions"]) == ["64"]
    entry = trained(tmp_path / "shorter", length=84, term="count", share=64, target_density=0.2).model.config.twell
    assert "density" in entry
    assert "unions" not in entry, "more than a fifth of the tokens stood in runs of 20"
    assert "unions" not in trained(tmp_path / "none", term="count", target_density=0.2).model.config.twell
