"""What Transformers' own generation tests ask of a causal model, asked of the custom classes (see
`test_transformers_suite.py`), and more: that every way of generating gives what the stock dense ReLU model gives."""

import copy

import pytest
import torch
from transformers import StaticCache

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


def test_stops_row_by_row(pair):
    out = generate(pair[0], ids())
    stop = out[0, 10].item()
    stopped = generate(pair[0], ids(), eos_token_id=stop, pad_token_id=0)
    assert torch.equal(stopped, generate(pair[1], ids(), eos_token_id=stop, pad_token_id=0))
    assert (stopped[0, 11:] == 0).all()


def test_left_padding(pair):
    model, _ = pair
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), ids()], dim=1)
    mask = (torch.arange(14) >= 5).long().expand(2, -1)
    out = model.generate(padded, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out[:, 5:], generate(model, ids()))
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        shifted = model(input_ids=padded, attention_mask=mask, position_ids=positions).logits[:, 5:]
        torch.testing.assert_close(shifted, model(input_ids=ids()).logits, atol=1e-4, rtol=1e-4)


def test_goes_on_from_a_cache(pair):
    model, _ = pair
    whole = generate(model, ids())
    first = model.generate(ids(), max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    cache = first.past_key_values
    assert cache.get_seq_length() == 10
    assert [layer.keys.shape for layer in cache.layers] == [(2, 2, 10, 8)] * 3
    again = model.generate(first.sequences, past_key_values=cache, max_new_tokens=NEW - 2, do_sample=False)
    assert torch.equal(again, whole)


def test_static_cache_of_its_own(pair):
    model, _ = pair
    cache = StaticCache(config=model.config, max_cache_len=32)
    out = generate(model, ids(), past_key_values=cache, return_dict_in_generate=True)
    assert torch.equal(out.sequences, generate(model, ids()))
    assert all(layer.keys.shape == (2, 2, 32, 8) for layer in out.past_key_values.layers)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"cache_implementation": "static"}])
def test_from_embeddings(pair, options):
    model, _ = pair
    embeddings = model.get_input_embeddings()(ids()).detach()
    out = model.generate(inputs_embeds=embeddings, max_new_tokens=NEW, do_sample=False, **options)
    assert torch.equal(out, generate(model, ids(), **options)[:, 9:])


def test_from_nothing(pair):
    outs = [each.generate(max_new_tokens=NEW, do_sample=False, bos_token_id=1, pad_token_id=0) for each in pair]
    assert outs[0].shape == (1, 1 + NEW)
    assert torch.equal(*outs)


def test_parts_of_forward(pair):
    """Fewer logits, explicit positions, a mask of four dimensions, tuples: each gives the same numbers."""
    model, twin = pair
    with torch.no_grad():
        truth = twin(input_ids=ids()).logits
        square = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1).expand(2, 1, 9, 9)
        for ours, expected in (
            (model(input_ids=ids(), logits_to_keep=1).logits, truth[:, -1:]),
            (model(input_ids=ids(), logits_to_keep=torch.tensor([0, 4])).logits, truth[:, [0, 4]]),
            (model(input_ids=ids(), position_ids=torch.arange(9)[None]).logits, truth),
            (model(input_ids=ids(), attention_mask=square).logits, truth),
            (model(input_ids=ids(), return_dict=False)[0], truth),
        ):
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


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
