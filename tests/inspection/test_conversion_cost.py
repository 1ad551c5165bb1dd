"""What a conversion would cost a dense model: the share of negative gates and the losses, against plain loops."""

import json
import math
import pickle
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaForSequenceClassification

from hf_twell import measure_sparsity, sparsify, unpatch
from hf_twell.blocks.architectures import find_ffns
from hf_twell.cli import main
from hf_twell.inspection.conversion_cost import DENSITIES, conversion_cost
from hf_twell.inspection.known_conversions import in_words, known_conversions
from hf_twell.inspection.passages import windows
from hf_twell.inspection.report.findings import conversion_sentence, increase
from hf_twell.inspection.report.page import render
from tests.conftest import ids, shared_path, tiny_llama
from tests.measure.test_measurement import state
from tests.paths import DEMO, HELDOUT

VOCAB = 3072  # of the demo model's tokenizer


def ungated(**changes) -> GPTNeoXForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 52, "num_hidden_layers": 2}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**{**sizes, "num_attention_heads": 4, "initializer_range": 0.2, **changes}))


MODELS = {"llama": tiny_llama, "gelu": lambda **c: tiny_llama(hidden_act="gelu", **c), "ungated": ungated}


@pytest.fixture
def text(tmp_path) -> Path:
    """Several documents of different lengths, so that windows are padded."""
    path = tmp_path / "text.txt"
    path.write_text("\n<|endoftext|>\n".join(["The cell is small.", HELDOUT.read_text()[:700], "A plant grows in it."]))
    return path


def blocks(model, input_ids) -> list[tuple]:
    """(z, h, Wd) of each block: what its activation gets, what its down projection gets, and that one's weight."""
    seen, handles = {}, []
    sites = find_ffns(model)
    for site in sites:
        first, down = site.linear("first"), site.linear("down")
        handles.append(first.register_forward_hook(lambda m, _, z: seen.__setitem__(m, z)))
        handles.append(down.register_forward_pre_hook(lambda m, args: seen.__setitem__(m, args[0])))
    model(input_ids=input_ids)
    for handle in handles:
        handle.remove()
    return [(seen[site.linear("first")], seen[site.linear("down")], site.linear("down").weight) for site in sites]


@pytest.mark.numeric
@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_the_negative_share_is_the_formula(kind):
    model = MODELS[kind]().eval()
    truth = []
    for z, h, weight in blocks(model, ids(5)):
        negative = everything = 0.0
        for token in range(10):
            for j in range(52):
                energy = (h[token // 5, token % 5, j].item() * weight[:, j].double().norm().item()) ** 2
                everything += energy
                negative += energy if z[token // 5, token % 5, j] <= 0 else 0
        truth.append(negative / everything)
    report = measure_sparsity(model, [ids(5)])
    assert [layer["negative_share"] for layer in report["layers"]] == pytest.approx(truth, rel=1e-5)
    assert report["negative_share"] == pytest.approx(sum(truth) / len(truth), rel=1e-5)
    assert all(0.001 < share < 0.5 for share in truth)


@pytest.mark.numeric
def test_the_negative_share_knows_no_padding_and_no_batches():
    model, whole = tiny_llama(), ids(9)
    truth = measure_sparsity(model, [whole])
    wide = torch.cat([whole, whole], 1)
    mask = torch.ones_like(wide)
    mask[:, 9:] = 0
    for given in ([{"input_ids": wide, "attention_mask": mask}], list(whole.split(1))):
        assert measure_sparsity(model, given)["negative_share"] == pytest.approx(truth["negative_share"], rel=1e-5)


def test_relu_leaves_no_negative_share():
    model = sparsify(tiny_llama())
    for same in (model, unpatch(model)):
        report = measure_sparsity(same, [ids()])
        assert report["negative_share"] == 0
        assert [layer["negative_share"] for layer in report["layers"]] == [0, 0, 0]


def test_the_share_is_unknown_where_the_weight_cannot_be_read():
    accelerate = pytest.importorskip("accelerate")
    report = measure_sparsity(accelerate.cpu_offload(tiny_llama(), execution_device="cpu"), [ids()])
    assert report["negative_share"] is None


@torch.no_grad()
def loss_by_hand(model, tokenizer, path, change) -> float:
    """Nats per token, a window at a time; `change(z, h, weight)` makes the h that each block goes on with."""
    total, count, handles = 0.0, 0, []
    for site in find_ffns(model):
        kept = {}
        first, down = site.linear("first"), site.linear("down")
        handles.append(first.register_forward_hook(lambda _, args, z, kept=kept: kept.update(z=z)))
        handles.append(
            down.register_forward_pre_hook(lambda m, args, kept=kept: change(kept["z"], args[0], m.weight.double()))
        )
    for window in windows(tokenizer, [path], 64):
        logits = model(torch.tensor([window])).logits[0, :-1]
        total += F.cross_entropy(logits, torch.tensor(window[1:]), reduction="sum").item()
        count += len(window) - 1
    for handle in handles:
        handle.remove()
    return total / count


def strongest(count):
    def change(z, h, weight):
        for row in h[0]:
            scores = [abs(value) * weight[:, j].norm().item() for j, value in enumerate(row.tolist())]
            limit = sorted(scores)[-count]
            row[torch.tensor(scores) < limit] = 0
        return h

    return change


@pytest.mark.numeric
@pytest.mark.parametrize("kind", MODELS)
def test_the_losses_are_those_of_a_loop(kind, tokenizer, text):
    model = MODELS[kind](vocab_size=VOCAB, num_hidden_layers=1, max_position_embeddings=64).eval()
    cost = conversion_cost(model, tokenizer, [text], densities=[0.25, 0.1])
    assert cost["context"] == 64
    assert cost["tokens"] == sum(map(len, windows(tokenizer, [text], 64)))
    act = find_ffns(model)[0].activation

    def relu(z, h, weight):
        return torch.where(z > 0, h / act(z) * z, 0)

    losses = [cost[key] if key == "loss" else cost[key]["loss"] for key in ("loss", "relu")]
    losses += [row["loss"] for row in cost["oracle"]]
    changes = [lambda z, h, weight: h, relu, strongest(13), strongest(6)]  # ceil(0.1 * 52)
    truth = [loss_by_hand(model, tokenizer, text, change) for change in changes]
    assert losses == pytest.approx(truth, rel=1e-5)
    assert len({round(loss, 4) for loss in losses}) == 4
    for row in (cost["relu"], *cost["oracle"]):
        assert row["increase"] == row["loss"] / cost["loss"] - 1
    swapped = unpatch(sparsify(model))
    assert cost["relu"]["loss"] == pytest.approx(conversion_cost(swapped, tokenizer, [text], densities=[])["loss"])


def test_all_neurons_cost_nothing(tokenizer, text):
    cost = conversion_cost(tiny_llama(vocab_size=VOCAB), tokenizer, [text], densities=[1.0])
    assert cost["oracle"] == [{"density": 1.0, "loss": cost["loss"], "increase": 0}]


def test_the_first_tokens_are_read(tokenizer, text):
    model = tiny_llama(vocab_size=VOCAB)
    assert conversion_cost(model, tokenizer, [text], max_tokens=50, densities=[])["tokens"] == 50
    whole = conversion_cost(model, tokenizer, [text, HELDOUT], context=100, densities=[])
    assert (whole["tokens"], whole["context"]) == (4096, 100)


def test_fewer_neurons_cost_a_trained_model_more(stories_model, stories):
    text = shared_path("data/text/tinystories.txt.xz")
    cost = conversion_cost(stories_model, AutoTokenizer.from_pretrained(stories), [text], max_tokens=512)
    losses = [cost["loss"], *(row["loss"] for row in cost["oracle"])]
    assert losses == sorted(losses)
    assert [row["density"] for row in cost["oracle"]] == list(DENSITIES)
    assert cost["oracle"][0]["increase"] < 0.05
    assert cost["oracle"][-1]["increase"] > 1
    assert cost["relu"]["increase"] > 1, "it was trained for long"


def test_the_model_stays_as_it_was(tokenizer, text):
    model = tiny_llama(vocab_size=VOCAB).train()
    model.model.layers[1].eval()
    before, whole = state(model), pickle.dumps(model)
    conversion_cost(model, tokenizer, [text])
    assert state(model) == before
    assert pickle.dumps(model) == whole
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("calls", [1, 2, 4])
def test_the_model_stays_as_it_was_after_an_error(calls, tokenizer, text):
    """In the dense pass, that with ReLU, or one of the oracle's."""
    model, left = tiny_llama(vocab_size=VOCAB), [calls]

    def interrupt(_module, _args):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    model.register_forward_pre_hook(interrupt)
    before = state(model.train())
    with pytest.raises(KeyboardInterrupt):
        conversion_cost(model, tokenizer, [text], max_tokens=100)
    assert state(model) == before
    with pytest.raises(ZeroDivisionError):
        measure_sparsity(model, (1 / 0 for _ in range(1)))
    assert state(model) == before


def classifier(**changes):
    return LlamaForSequenceClassification(tiny_llama(**changes).config)


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (classifier, {}, "LlamaForSequenceClassification has no language modelling head"),
        (tiny_llama, {"densities": [0.0]}, "density 0.0: give a share"),
        (tiny_llama, {"densities": [0.5, 1.5]}, "density 1.5: give a share"),
        (tiny_llama, {"max_tokens": 1}, "no token to score"),
        (tiny_llama, {"context": 999}, "context=999"),
    ],
)
def test_refused(make, options, says, tokenizer, text):
    with pytest.raises(ValueError, match=says):
        conversion_cost(make(vocab_size=VOCAB), tokenizer, [text], **options)


def test_an_adapted_model_is_refused(tokenizer, text):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_llama(vocab_size=VOCAB), peft.LoraConfig(target_modules=["down_proj"]))
    with pytest.raises(ValueError, match="has an adapter"):
        conversion_cost(model.base_model.model, tokenizer, [text])


@pytest.fixture(scope="module")
def inspected(tmp_path_factory) -> dict:
    """The JSON of the command, of the dense demo model."""
    output = tmp_path_factory.mktemp("inspected") / "figures.json"
    text = output.with_name("text.txt")
    text.write_text(HELDOUT.read_text()[:1200])
    assert main(["inspect", str(DEMO / "model"), "--text", str(text), "--output", str(output), "--tokens", "120"]) == 0
    return json.loads(output.read_text())


def test_the_command_says_it(inspected, capsys):
    from hf_twell.cli.inspect import summary

    cost = inspected["conversion"]
    assert cost.keys() == {"tokens", "context", "loss", "relu", "oracle", "known", "nearest"}
    assert cost["tokens"] == 120
    assert cost["nearest"] is None  # the demo model loses little by ReLU
    assert cost["known"] == json.loads(json.dumps(known_conversions(cost["relu"]["increase"])))
    assert all(0 < layer["negative_share"] < 0.5 for layer in inspected["layers"])
    printed = summary(inspected)
    assert "negative gates carry" in printed
    assert "Loss before any training, on the first 120 tokens:" in printed
    lines = [line.split()[:4] for line in printed.splitlines()]
    assert f"strongest 10 %  {cost['oracle'][3]['loss']:.4g}".split() in lines
    assert conversion_sentence(inspected) in printed
    page = render(inspected)
    assert "What a conversion would cost" in page
    assert "Loss with each token" in page
    sparse = {**inspected, "conversion": None}
    assert "conversion would cost" not in render(sparse)
    assert "Loss before any training" not in summary(sparse)


def test_the_conclusion(inspected):
    result = {**inspected, "layers": [{"negative_share": share} for share in (0.09, 0.26, 0.13)]}
    result["conversion"] = {"loss": 3.27, "relu": {"loss": 7.92, "increase": 1.422}, "oracle": []}
    said = conversion_sentence(result)
    assert "9.0 % to 26 % of a block's output energy (mean 16 %)" in said
    assert "from 3.27 to 7.92 (+142 %). That is much" in said
    assert said.endswith(in_words(1.422, []))
    result["conversion"]["relu"] = {"loss": 3.8, "increase": 0.16}
    said = conversion_sentence(result)
    assert "(+16 %). That is little: a short fine-tuning may do (docs/converting.md). " in said
    assert said.endswith(in_words(0.16, []))
    result["conversion"]["relu"] = {"loss": None, "increase": None}
    assert "overflow" in conversion_sentence(result)
    shown = ["n/a", "+0.8 %", "-2.0 %", "+9.9 %", "+40 %", "+1,200 %"]
    assert [increase(value) for value in (None, 0.008, -0.02, 0.099, 0.4, 12)] == shown


def test_losses_that_overflow_are_none(tokenizer, text):
    """As in float16: JSON has no form for them."""
    model, passes = tiny_llama(vocab_size=VOCAB), []

    def overflow(_module, _args, output):
        passes.append(output)
        if len(passes) == 2:  # with ReLU
            output.logits[:] = math.nan

    model.register_forward_hook(overflow)
    cost = conversion_cost(model, tokenizer, [text], max_tokens=30, densities=[0.5])
    assert len(passes) == 3
    assert cost["relu"] == {"loss": None, "increase": None}
    assert cost["oracle"][0]["loss"] > 1
    json.dumps(cost, allow_nan=False)
