"""`measure_sparsity` against a count by hand, on real text and on everything that could make it lie."""

import json
import lzma
import pickle

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, BatchEncoding, GPTNeoXConfig, GPTNeoXForCausalLM

from hf_twell import measure_sparsity, sparsify, unpatch
from hf_twell.blocks.architectures import find_ffns
from hf_twell.blocks.modeling import sparse_ffns
from hf_twell.convert.entry import record_density
from hf_twell.train.penalty import L1Penalty
from tests.conftest import one_of, shared_path, tiny_llama
from tests.paths import DEMO

pytestmark = pytest.mark.numeric


def batches() -> list[dict]:
    """Two batches padded on different sides, the second with a row that is all padding."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, 96, (5, 9), generator=generator)
    right, left = torch.ones(2, 9, dtype=torch.long), torch.ones(3, 9, dtype=torch.long)
    right[1, 4:] = 0
    left[0, :6] = 0
    left[2] = 0
    return [{"input_ids": rows[:2], "attention_mask": right}, {"input_ids": rows[2:], "attention_mask": left}]


@torch.no_grad()
def count_by_hand(model, batches) -> list[dict]:
    """Per layer: mean active neurons and mean |h| of every real token, and how many neurons no token used."""
    model.eval()
    sites, rows = find_ffns(model), []
    for batch in batches:
        inputs = []
        handles = [
            site.module.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0]))
            for site in sites
        ]
        model(**batch)
        for handle in handles:
            handle.remove()
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        rows.append([x[mask] for x in inputs])
    results = []
    for site, layer in zip(sites, zip(*rows, strict=True), strict=True):
        x, ffn = torch.cat(layer), site.module
        up = site.linear("up")(x)
        h = site.activation(up) if site.form.gate is None else site.activation(ffn.gate_proj(x)) * up
        active, l1 = h != 0, h.double().abs().sum(1).mean().item()
        l0, dead = active.sum(1).double().mean().item(), int((~active.any(0)).sum())
        results.append({"l0": l0, "l1": l1, "dead_neurons": dead})
    return results


def assert_matches(report, by_hand):
    for layer, truth in zip(report["layers"], by_hand, strict=True):
        assert layer["l0"] == pytest.approx(truth["l0"], abs=1e-9)
        assert layer["l1"] == pytest.approx(truth["l1"], rel=1e-5)
        assert layer["dead_neurons"] == truth["dead_neurons"]
        assert layer["density"] == layer["l0"] / layer["intermediate_size"]
        assert layer["dead"] == layer["dead_neurons"] / layer["intermediate_size"]
    for key in ("l0", "density", "l1", "dead"):
        assert report[key] == pytest.approx(sum(layer[key] for layer in report["layers"]) / len(report["layers"]))


@pytest.mark.parametrize("kind", ["dense", "sparse", "one layer", "unpatched"])
def test_count(kind):
    model = tiny_llama()
    if kind != "dense":
        sparsify(model, layers=[1] if kind == "one layer" else None)
    if kind == "unpatched":
        unpatch(model)
    report = measure_sparsity(model, batches())
    assert report["tokens"] == 9 + 4 + 3 + 9
    assert [layer["name"] for layer in report["layers"]] == [f"model.layers.{i}.mlp" for i in range(3)]
    assert_matches(report, count_by_hand(model, batches()))
    if kind == "dense":
        assert report["density"] == 1.0, "SiLU is zero nowhere"
    else:
        assert 0.3 < report["density"] < 0.7
        truth = measure_sparsity(unpatch(model), batches())
        assert report["l1"] == pytest.approx(truth["l1"], rel=1e-6)
        assert {**report, "l1": 0, "layers": 0} == {**truth, "l1": 0, "layers": 0}


def test_non_gated():
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 52, "num_hidden_layers": 2}
    model = sparsify(GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_attention_heads=4)))
    assert_matches(measure_sparsity(model, batches()), count_by_hand(model, batches()))


def test_real_text(stories, stories_model):
    tokenizer = AutoTokenizer.from_pretrained(stories)
    with lzma.open(shared_path("data/text/tinystories.txt.xz"), "rt") as file:
        text = file.read(2000)
    batch = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
    assert isinstance(batch, BatchEncoding)
    sparsify(stories_model)
    report = measure_sparsity(stories_model, [batch])
    assert_matches(report, count_by_hand(stories_model, [batch]))
    assert 60 < report["l0"] < 110
    assert report["layers"][0]["intermediate_size"] == 172


def test_unions_are_means_over_layers():
    model = sparsify(tiny_llama())
    report = measure_sparsity(model, [torch.randint(3, 96, (2, 70), generator=torch.Generator().manual_seed(0))])
    assert report["unions"]["128"] is None, "no run of 70 tokens is that long"
    for run in ("16", "64"):
        shares = [layer["unions"][run] for layer in report["layers"]]
        assert report["unions"][run] == pytest.approx(sum(shares) / 3)
    assert report["density"] < report["unions"]["16"] < report["unions"]["64"] <= 1


def test_dead_neurons():
    model = sparsify(tiny_llama(mlp_bias=True))
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.bias[:7] = -1e6
    assert [layer["dead_neurons"] for layer in measure_sparsity(model, batches())["layers"]][1] >= 7


def test_kinds_of_batches():
    model = sparsify(tiny_llama())
    ids = batches()[0]["input_ids"]
    truth = measure_sparsity(model, [{"input_ids": ids}])
    assert truth["tokens"] == 18
    same = [
        [ids],
        (row for row in ids.split(1)),
        [{"input_ids": ids, "labels": ids, "use_cache": True}],
        [{"input_ids": ids, "attention_mask": None}],
        [{"inputs_embeds": model.get_input_embeddings()(ids).detach()}],
        [ids, ids[:0], ids[:, :0], {"input_ids": ids, "attention_mask": torch.zeros_like(ids)}],
        torch.utils.data.DataLoader(ids, batch_size=2),
    ]
    for given in same:
        report = measure_sparsity(model, given)
        assert report["tokens"] == truth["tokens"]
        assert report["l0"] == pytest.approx(truth["l0"], abs=1e-9)


@pytest.mark.parametrize(
    "given",
    [
        [],
        iter(()),
        [torch.zeros(0, 4, dtype=torch.long)],
        [{"input_ids": torch.ones(1, 4, dtype=torch.long), "attention_mask": torch.zeros(1, 4)}],
    ],
    ids=["none", "empty iterator", "empty batch", "all padding"],
)
def test_no_tokens(given):
    with pytest.raises(ValueError, match="no tokens"):
        measure_sparsity(sparsify(tiny_llama()), given)


@pytest.mark.parametrize(
    "given",
    [{"input_ids": torch.ones(2, 4, dtype=torch.long)}, torch.ones(2, 4, dtype=torch.long), ["a text"], [[1, 2]]],
    ids=["one mapping", "one tensor", "text", "list"],
)
def test_what_is_no_batch(given):
    with pytest.raises(ValueError, match=r"Put a single batch into a list"):
        measure_sparsity(sparsify(tiny_llama()), given)


@pytest.mark.parametrize("options", [{}, {"return_tensors": "np"}])
def test_a_tokenizers_output_without_tensors(options):
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    model = sparsify(tiny_llama())
    batch = tokenizer("hello", **options)
    for given in (batch, {"input_ids": batch["input_ids"]}):
        with pytest.raises(ValueError, match='not a tensor; call the tokenizer with return_tensors="pt"'):
            measure_sparsity(model, [given])
        with pytest.raises(ValueError, match='not a tensor; call the tokenizer with return_tensors="pt"'):
            next(L1Penalty(model, 1e-3).micro_batches([given]))
    with pytest.raises(ValueError, match=r"input_ids has shape \(3,\); expected \(batch, sequence\)"):
        measure_sparsity(model, [{"input_ids": torch.ones(3, dtype=torch.long)}])


def test_a_model_that_cannot_be_read():
    with pytest.raises(ValueError, match="from_pretrained"):
        measure_sparsity(nn.Linear(2, 2), batches())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_h_that_is_not_finite(value):
    model = sparsify(tiny_llama())
    ids = torch.tensor([[5, 6, 7, 8]])
    model.get_input_embeddings().weight.data[8] = value
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp: h is not finite"):
        measure_sparsity(model, [ids])


def test_an_h_that_is_infinite_alone():
    model = sparsify(tiny_llama(mlp_bias=True))
    for linear in (model.model.layers[2].mlp.gate_proj, model.model.layers[2].mlp.up_proj):
        linear.bias.data[3] = 1e30  # no NaN in this block, and none comes after it
    with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp: h is not finite"):
        measure_sparsity(model, batches())


@pytest.mark.parametrize("shape", [(2, 5), (2, 12), (9, 2), (1, 9)])
def test_a_mask_of_another_shape(shape):
    batch = {"input_ids": torch.ones(2, 9, dtype=torch.long), "attention_mask": torch.ones(shape)}
    with pytest.raises(ValueError, match=r"attention_mask has shape .*, the batch \(2, 9\)"):
        measure_sparsity(sparsify(tiny_llama()), [batch])


def test_prompt_tuning_is_refused():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ValueError, match=r"sees 26 positions where the batch has 18; .* measure the base model"):
        measure_sparsity(peft.get_peft_model(sparsify(tiny_llama()), config), batches()[:1])


def state(model):
    return [(module.training, len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]


def test_model_stays_as_it_was():
    model = sparsify(tiny_llama()).train()
    model.model.layers[1].eval()  # as a frozen part is kept
    before, whole = state(model), pickle.dumps(model)
    measure_sparsity(model, batches())
    assert state(model) == before
    assert len(model.config.twell["density"]) == 3, "the one thing that it keeps"
    record_density(model.config, sparse_ffns(model), None)
    assert pickle.dumps(model) == whole
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert torch.is_grad_enabled()


def test_model_stays_as_it_was_when_a_batch_fails():
    model = sparsify(tiny_llama()).train()
    before = state(model)
    with pytest.raises(IndexError):
        measure_sparsity(model, [*batches(), {"input_ids": torch.full((1, 3), 1000)}])
    assert state(model) == before

    def interrupted():
        yield from batches()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_sparsity(model, interrupted())
    assert state(model) == before


@pytest.mark.parametrize("how", one_of("blocks", ["wrapped", "blocks"]))
def test_compiled_code_is_counted(how):
    torch._dynamo.reset()
    model = sparsify(tiny_llama(num_hidden_layers=1)).eval()
    truth, compiled = measure_sparsity(model, batches()), model
    if how == "wrapped":
        compiled = torch.compile(model, backend="eager")
    else:
        model.model.layers[0].mlp.compile(backend="eager")
    with torch.no_grad():
        for batch in batches():
            compiled(**batch, use_cache=False)
    assert measure_sparsity(compiled, batches())["l0"] == pytest.approx(truth["l0"], abs=1e-9)


def test_adapters_count():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(sparsify(tiny_llama()), config)
    report = measure_sparsity(model, batches())
    merged = measure_sparsity(model.merge_and_unload(), batches())
    assert report["l0"] == pytest.approx(merged["l0"], abs=0.1)
    assert report["l1"] == pytest.approx(merged["l1"], rel=1e-3)
    assert report["l1"] != pytest.approx(measure_sparsity(sparsify(tiny_llama()), batches())["l1"], rel=1e-2)


def test_plain_data(capsys):
    report = measure_sparsity(sparsify(tiny_llama()), batches(), progress=True)
    assert json.loads(json.dumps(report)) == report
    captured = capsys.readouterr()
    assert not captured.out, "standard output belongs to the user"
    assert "measuring sparsity" in captured.err
