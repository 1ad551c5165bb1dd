"""What is measured of mixtures of experts, against a count by hand: token by token, expert by expert."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hf_twell import measure_sparsity, sparsify, unpatch
from hf_twell.blocks.architectures import find_ffns
from hf_twell.models.cards import sparsity_section
from tests.mixtures import by_hand, mixture

pytestmark = pytest.mark.numeric

EXPERTS, PER_TOKEN, WIDTH = 6, 2, 40
BLOCKS = ["0 experts", "0 shared_expert", "1 experts", "1 shared_expert"]


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 96, (3, 70), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def by_hand_h(model, layer: int) -> tuple[dict, dict]:
    """{token: {(expert, neuron): h}} and {token: experts} of a layer's non-padding tokens; a token is (row, place)."""
    seen = []
    experts = model.model.layers[layer].mlp.experts
    handle = experts.register_forward_pre_hook(lambda _, args: seen.append(args))
    model(**batch())
    handle.remove()
    (x, index, _), mask = seen[0], batch()["attention_mask"]
    h, own = {}, {}
    for place, (x_D, experts_K) in enumerate(zip(x, index.tolist(), strict=True)):
        token = divmod(place, mask.shape[1])
        if mask[token]:
            own[token] = experts_K
            h[token] = {}
            for expert in experts_K:
                gate, up = F.linear(x_D, experts.gate_up_proj[expert]).chunk(2)
                values = experts.act_fn(gate) * up
                h[token] |= {(expert, neuron): value for neuron, value in enumerate(values.tolist())}
    return h, own


def test_measured_as_by_hand():
    model = mixture()
    twin = by_hand(model)
    report = measure_sparsity(sparsify(model), [batch()])
    assert report["tokens"] == 160
    assert model.config.twell["density"] == [round(layer["density"], 6) for layer in report["layers"]]
    for index, layer in enumerate(report["layers"]):
        h, own = by_hand_h(twin, index)
        active = {token: {key for key, value in values.items() if value} for token, values in h.items()}
        assert layer["name"] == f"model.layers.{index}.mlp.experts"
        assert (layer["experts"], layer["experts_per_token"]) == (EXPERTS, PER_TOKEN)
        assert layer["intermediate_size"] == PER_TOKEN * WIDTH
        l0 = sum(map(len, active.values())) / len(h)
        assert layer["l0"] == pytest.approx(l0)
        assert layer["density"] == pytest.approx(l0 / (PER_TOKEN * WIDTH))
        l1 = sum(abs(value) for values in h.values() for value in values.values()) / len(h)
        assert layer["l1"] == pytest.approx(l1, rel=1e-5)
        came = [sum(expert in experts for experts in own.values()) for expert in range(EXPERTS)]
        assert layer["expert_tokens"] == came
        fired = set().union(*active.values())
        dead = [WIDTH - sum(key[0] == expert for key in fired) for expert in range(EXPERTS)]
        assert layer["expert_dead"] == [dead[expert] / WIDTH if came[expert] else None for expert in range(EXPERTS)]
        share = sum(d * c for d, c in zip(dead, came, strict=True)) / sum(came) / WIDTH
        assert layer["dead"] == pytest.approx(share)
        assert layer["dead_neurons"] == sum(d for d, c in zip(dead, came, strict=True) if c)
        for run in (16, 64):
            shares = []
            for row in range(3):
                for start in range(0, 70 - run + 1, run):
                    tokens = [(row, start + place) for place in range(run)]
                    if all(token in h for token in tokens):
                        used = len(set().union(*(active[token] for token in tokens)))
                        shares.append(used / len({expert for token in tokens for expert in own[token]}) / WIDTH)
            assert layer["unions"][str(run)] == pytest.approx(sum(shares) / len(shares)), run
        assert layer["unions"]["128"] is None
    assert measure_sparsity(unpatch(model), [batch()]) == report, "of a stock model with ReLU as well"


def test_llama_4_by_what_its_own_activation_computes():
    """It has all tokens for each expert, and zeros where a token does not come to one."""
    model, seen = mixture("llama4_text"), []
    twin, mask = by_hand(model), batch()["attention_mask"].bool()
    twin.model.layers[1].feed_forward.experts.act_fn.register_forward_hook(lambda _, __, y: seen.append(y))
    with torch.no_grad():
        twin(**batch())
    active = seen[0][:, mask.flatten()] > 0
    layer = measure_sparsity(sparsify(model), [batch()])["layers"][1]
    assert (layer["name"], layer["intermediate_size"]) == ("model.layers.1.feed_forward.experts", PER_TOKEN * WIDTH)
    assert layer["l0"] == pytest.approx(active.sum().item() / 160)
    assert layer["expert_tokens"] == active.any(-1).sum(1).tolist()
    came = [count > 0 for count in layer["expert_tokens"]]
    dead = (~active.any(1)).float().mean(-1).tolist()
    assert layer["expert_dead"] == pytest.approx([d if c else None for d, c in zip(dead, came, strict=True)])


def test_an_expert_that_few_tokens_reach_is_hardly_dead():
    """And one that none reaches not at all."""
    model = sparsify(mixture())
    router = model.model.layers[0].mlp.gate.weight
    router.data[4] = -100 * router.data[:4].sum(0)
    router.data[5] = 0
    layer = measure_sparsity(model, [batch()])["layers"][0]
    tokens, dead = layer["expert_tokens"], layer["expert_dead"]
    for count, share in zip(tokens, dead, strict=True):
        assert (share is None) == (count == 0)
    assert layer["reached_experts"] == sum(count > 0 for count in tokens)
    mean = sum(count * share for count, share in zip(tokens, dead, strict=True) if count) / sum(tokens)
    assert layer["dead"] == pytest.approx(mean)


def test_a_shared_expert_is_a_layer_of_its_own():
    model = mixture("qwen2_moe")
    truth = measure_sparsity(by_hand(model), [batch()])
    sparsify(model)
    report = measure_sparsity(model, [batch()])
    assert report == truth
    assert [layer["name"].rpartition(".")[2] for layer in report["layers"]] == ["experts", "shared_expert"] * 2
    assert [layer["intermediate_size"] for layer in report["layers"]] == [48, 16] * 2
    assert len(model.config.twell["density"]) == 4
    assert [ffn.module.twell.activity[0] for ffn in find_ffns(model)] == model.config.twell["density"]
    sparsify(model)
    assert len(model.config.twell["density"]) == 4, "a second call keeps it"
    card = sparsity_section(report, 2)
    assert [layer["label"] for layer in report["layers"]] == BLOCKS
    assert [line.split(" | ")[0].removeprefix("| ") for line in card.strip().splitlines()[-5:-1]] == BLOCKS
    with pytest.raises(ValueError, match="of 2 layers, the model has 3"):
        sparsity_section(report, 3)


def test_a_dense_models_negative_gates():
    """What the swap to ReLU would silence: the energy of neurons whose gate is negative."""
    model = mixture()
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        norms = torch.linalg.vector_norm(experts.down_proj, dim=1)
    h, _ = by_hand_h(model, 0)
    everything = sum((value * norms[key].item()) ** 2 for values in h.values() for key, value in values.items())
    relu = by_hand(model)
    relu.model.layers[0].mlp.experts.act_fn = nn.Threshold(0.0, 0.0)
    positive_keys, _ = by_hand_h(relu, 0)
    positive = sum(
        (value * norms[key].item()) ** 2
        for token, values in h.items()
        for key, value in values.items()
        if positive_keys[token][key]
    )
    layer = measure_sparsity(model, [batch()])["layers"][0]
    assert layer["negative_share"] == pytest.approx(1 - positive / everything, rel=1e-4)
    assert layer["density"] > 0.99
