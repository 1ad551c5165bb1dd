"""The learning rate that is proposed for a model's size, and what `SparsityCallback` says of one far from it."""

import json
import statistics

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hf_twell import SparsityCallback, sparsify
from hf_twell.recipe.yaml12 import read_yaml
from hf_twell.train import learning_rates
from hf_twell.train.learning_rates import MEASURED, proposal, proposed, rate_warning
from tests.conftest import tiny_llama
from tests.one_step import make_trainer
from tests.paths import ROOT

RECIPES = {
    "SmolLM2-135M": "smollm2-135m",
    "Qwen2.5-Coder-0.5B": "qwen2.5-coder-0.5b",
    "Qwen2.5-Coder-1.5B": "qwen2.5-coder-1.5b",
}


@pytest.mark.parametrize("name", MEASURED)
def test_a_measured_model_gets_its_own_rate_which_its_recipe_has(name):
    parameters, rate = MEASURED[name]
    assert proposed(parameters).rate == rate
    recipe = read_yaml((ROOT / "recipes" / f"{RECIPES[name]}.yaml").read_bytes(), name)
    assert recipe["training"]["learning_rate"] == rate


def test_of_the_larger_coder_the_measured_rate_lost_less():
    lines = (ROOT / "model_cards/qwen2.5-coder-1.5b/rows.jsonl").read_text().splitlines()
    rows: dict[str, dict] = {}
    for row in map(json.loads, lines):
        rows.setdefault(row["run"], {}).update(row)
    runs = [rows["union25"], rows["union25-2e-4"]]
    least = min(runs, key=lambda row: statistics.mean(row["losses"].values()))
    assert least["training"]["learning_rate"] == MEASURED["Qwen2.5-Coder-1.5B"][1]


@pytest.mark.parametrize(
    ("parameters", "rate", "is_guess"),
    [
        (1.1e8, 1.5e-3, False),
        (1.0e8, 1.5e-3, True),
        ((135e6 * 494e6) ** 0.5, 4.7e-4, False),  # halfway in the logarithm: sqrt(1.5e-3 * 1.5e-4)
        ((494e6 * 1.54e9) ** 0.5, 1.3e-4, False),
        (1.78e9, 1.2e-4, False),  # the 1.5B of a GGUF file
        (8e9, 1.2e-4, True),
    ],
)
def test_between_measured_sizes_the_rate_is_interpolated_and_beyond_them_a_guess(parameters, rate, is_guess):
    found = proposed(parameters)
    assert found.rate == rate
    assert ("a guess beyond the measured sizes" in found.why) == is_guess


def llama(**settings) -> LlamaForCausalLM:
    sizes = {"hidden_size": 896, "intermediate_size": 4480, "num_hidden_layers": 24, "vocab_size": 49_152}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**{**sizes, **settings}, num_attention_heads=8))


def test_for_whom_a_rate_is_proposed():
    model = llama()
    why = proposal(model, "adamw_torch_fused").why
    assert why.startswith(
        "for 454M parameters, by measured models (of the rates tried least was lost by SmolLM2-135M at"
    )
    assert proposal(model, "sgd") is None
    assert proposal(llama(num_hidden_layers=1, vocab_size=99), "adamw_torch") is None
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.requires_grad_(True)
    assert proposal(model, "adamw_torch") is not None
    model.model.layers[3].mlp.requires_grad_(False)
    assert proposal(model, "adamw_torch") is None
    with torch.device("meta"):
        mixture = MixtralForCausalLM(MixtralConfig(hidden_size=512, intermediate_size=2048, num_hidden_layers=8))
    assert proposal(mixture, "adamw_torch") is None
    peft = pytest.importorskip("peft")
    assert proposal(peft.get_peft_model(llama(), peft.LoraConfig(r=2)), "adamw_torch") is None


@pytest.mark.parametrize(("rate", "says"), [(4e-5, None), (3.7e-5, "is so low"), (3e-4, None), (3.1e-4, "may ruin")])
def test_a_rate_over_twice_or_under_a_quarter_of_the_proposed_one_is_told(rate, says):
    warning = rate_warning(rate, proposed(494e6), "learning_rate")
    assert (warning is None) if says is None else (says in warning and "write learning_rate=0.00015, or" in warning)


def test_of_models_larger_than_the_measured_ones_no_rate_is_too_low():
    assert rate_warning(1e-6, proposed(8e9), "learning_rate") is None
    assert "may ruin" in rate_warning(3e-4, proposed(8e9), "learning_rate")


def run(folder, caplog, rate=1e-2, parent_loss=2.0, l1_weight=1e-5, model=None, **options) -> list[str]:
    """What a step with the callback says of its learning rate."""
    caplog.clear()
    trainer = make_trainer(folder, model=model or sparsify(tiny_llama()), learning_rate=rate, **options)
    trainer.add_callback(SparsityCallback(trainer, l1_weight, parent_loss=parent_loss))
    trainer.train()
    trainer.train()
    return [record.getMessage() for record in caplog.records if "is proposed" in record.getMessage()]


def test_the_callback_tells_once_of_a_rate_far_from_the_proposed_one(tmp_path, caplog, monkeypatch):
    assert not run(tmp_path, caplog), "the model is small"
    monkeypatch.setattr(learning_rates, "SMALLEST_PRETRAINED", 0)
    (line,) = run(tmp_path, caplog)
    assert line.startswith("learning_rate 0.01 may ruin the model: 0.0015 is proposed for 0M parameters, a guess")
    (line,) = run(tmp_path, caplog, rate=1e-4)
    assert line.startswith("learning_rate 0.0001 is so low that the run may hardly learn: 0.0015 is proposed")
    assert not run(tmp_path, caplog, rate=1e-3)
    assert not run(tmp_path, caplog, optim="sgd")


def test_an_optimizer_of_the_users_has_rates_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(learning_rates, "SMALLEST_PRETRAINED", 0)
    trainer = make_trainer(tmp_path, model=sparsify(tiny_llama()))
    assert SparsityCallback(trainer, 1e-5).proposal is not None
    trainer.optimizer_cls_and_kwargs = (torch.optim.SGD, {"lr": 1.0})
    assert SparsityCallback(trainer, 1e-5).proposal is None
    trainer.optimizer_cls_and_kwargs = None
    trainer.__class__ = type("Own", (type(trainer),), {"create_optimizer": lambda self: None})
    assert SparsityCallback(trainer, 1e-5).proposal is None


def test_the_callback_says_nothing_of_a_model_that_is_untrained_or_was_sparse_before(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(learning_rates, "SMALLEST_PRETRAINED", 0)
    assert not run(tmp_path, caplog, parent_loss=None), "its parent's loss is that of chance"
    sparse = sparsify(tiny_llama())
    sparse.save_pretrained(tmp_path / "sparse")
    model = sparsify(type(sparse).from_pretrained(tmp_path / "sparse"))
    assert not run(tmp_path, caplog, parent_loss=None, model=model)
    assert run(tmp_path, caplog, model=model), "whose parent's loss was given"
