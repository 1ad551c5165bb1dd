"""Every way of generating gives with the custom classes what the stock dense ReLU model gives."""

import copy

import pytest
import torch

from tests.models.test_custom_models import FAMILIES, config_of, relu_twin

pytestmark = pytest.mark.numeric

NEW = 6
EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    """A custom model on its default backend, and the stock model that it must equal."""
    family = FAMILIES[request.param]
    torch.manual_seed(0)
    model = family[0](config_of(family, attn_implementation="eager")).eval()
    twin = relu_twin(model, family[1])
    for each in (model, twin):
        each.set_attn_implementation("eager")  # the one that shows its attentions
        each.generation_config.eos_token_id = None
    return model, twin


def ids(rows=2, length=9) -> torch.Tensor:
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(0))


def generate(model, inputs, **options):
    torch.manual_seed(0)
    return model.generate(inputs, max_new_tokens=NEW, **{"do_sample": False, **options})


def assert_same(ours, theirs):
    """Tensors in any nesting of outputs, caches left out."""
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    elif isinstance(theirs, (tuple, list)):
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert theirs is None or ours == theirs


SAMPLE = {"do_sample": True, "top_k": 10, "top_p": 0.7, "temperature": 0.7}
BEAMS = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 2.0}
MODES = {
    "greedy": {},
    "processors": {"repetition_penalty": 1.2, "bad_words_ids": [[1, 5]], "remove_invalid_values": True},
    "sample": {**SAMPLE, "num_return_sequences": 2},
    "beams": BEAMS,
    "beams sampled": {**SAMPLE, **BEAMS},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "dynamic cache": {"cache_implementation": "dynamic"},
}


@pytest.mark.parametrize("mode", MODES)
def test_all_outputs(pair, mode):
    ours, theirs = (generate(model, ids(), **MODES[mode], **EVERYTHING) for model in pair)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert ours.keys() == theirs.keys()
    for key in ours.keys() - {"past_key_values"}:
        assert_same(ours[key], theirs[key])
    if "num_beams" not in MODES[mode]:
        assert len(ours.scores) == len(ours.logits) == len(ours.attentions) == len(ours.hidden_states) == NEW
        assert len(ours.attentions[0]) == 3
        assert len(ours.hidden_states[0]) == 4


@pytest.mark.parametrize("how", ["prompt lookup", "itself", "another model", "sampled"])
def test_speculative_decoding(pair, how):
    """A draft changes the speed and not the text."""
    model, twin = pair
    prompt = ids(1, 4).repeat(1, 4)  # with something to look up
    options = {
        "prompt lookup": {"prompt_lookup_num_tokens": 3},
        "itself": {"assistant_model": copy.deepcopy(model)},
        "another model": {"assistant_model": type(model)(copy.deepcopy(twin.config)).eval()},
        "sampled": {"assistant_model": copy.deepcopy(model), **SAMPLE},
    }[how]
    out = generate(model, prompt, **options)
    if how == "sampled":
        assert out.shape == (1, 16 + NEW)
    else:
        assert torch.equal(out, generate(twin, prompt))
        stop = out[0, 18].item()
        stopped = generate(model, prompt, eos_token_id=stop, **options)
        assert torch.equal(stopped, out[:, : (out[0, 16:] == stop).int().argmax() + 17]), "no token after the last one"


@pytest.mark.slow
def test_compiled_with_a_static_cache(pair):
    """One graph for the prompt and one for the tokens after it; the second call compiles nothing."""
    model = copy.deepcopy(pair[0])
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    truth = generate(pair[1], ids())
    assert torch.equal(generate(model, ids(), cache_implementation="static", disable_compile=True), truth)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(generate(model, ids(), cache_implementation="static", disable_compile=True), truth)
    torch._dynamo.reset()
