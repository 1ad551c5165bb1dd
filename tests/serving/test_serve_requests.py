"""`hf-twell serve` and whatever a client may send: an answer or a refusal in one line, and then the next answer."""

import json
import re
import time
import urllib.error
import urllib.request

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.servers import ROOT, Server, answering

pytest.importorskip("fastapi")
pytest.importorskip("hypothesis")
import hypothesis
from hypothesis import strategies as st
from pydantic import ValidationError

from hf_twell.serving.requests import ChatRequest, CompletionRequest, Message, Part

DEMO = ROOT / "recipes" / "demo" / "model"
CONTEXT = 24  # so that an answer is short where no request says how long
PROMPT = {"prompt": "The cell is", "max_tokens": 1}
PYTHONS_WORDS = ("object is not", "has no attribute", "NoneType", "unexpected keyword", "Traceback", "unhashable")
TEMPLATES_WORDS = "messages: the model's chat template cannot write them: "


@pytest.fixture(scope="module")
def server():
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32", max_position_embeddings=CONTEXT).eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role + message.content }}{% if message.tool_calls %}"
        "{% for call in message.tool_calls %}{{ call.function.arguments.x.y }}{% endfor %}{% endif %}{% endfor %}"
        "{% if tools %}{{ tools[0].function.parameters.type + '' }}{% endif %}{{ style + 'a' if style else '' }}"
    )
    with answering("demo", model, tokenizer) as server:
        yield server


WORDS = st.text(st.characters(exclude_categories=()), max_size=8)  # half characters, too
NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, 1, -1, 1e-320, 1e-7, 0.5, 1.0, 2, 1e308, 2**31, 2**63, 2**64, 10**4000, float("inf")]),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=6,
)


def fields_of(*kinds) -> st.SearchStrategy[str]:
    return st.sampled_from(sorted({name for kind in kinds for name in kind.model_fields})) | WORDS


def with_odd(fields: st.SearchStrategy[str], **usual: st.SearchStrategy) -> st.SearchStrategy[dict]:
    """Objects as they should be, but for a few of their fields."""
    usual = st.fixed_dictionaries({}, optional=usual)
    odd = st.dictionaries(fields, ANYTHING, max_size=2)
    return st.tuples(usual, odd).map(lambda both: {**both[0], **both[1]})


PARTS = with_odd(fields_of(Part), type=st.sampled_from(["text", "image_url", "file"]), text=WORDS)
CALLS = with_odd(
    st.sampled_from(["id", "function", "type", "x"]),
    function=st.fixed_dictionaries({"name": WORDS, "arguments": st.sampled_from(["{}", '{"x": 1}', "5", "{"])}),
)
MESSAGES = with_odd(
    fields_of(Message),
    role=st.sampled_from(["user", "assistant", "tool"]),
    content=st.one_of(WORDS, st.lists(PARTS, max_size=2)),
    tool_calls=st.lists(CALLS, max_size=2),
)
TOOLS = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.dictionaries(st.sampled_from(["name", "parameters"]), LEAVES)}
)
USUAL = {
    "max_tokens": st.integers(1, 4),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "stop": st.one_of(WORDS, st.lists(WORDS, max_size=3), st.sampled_from(["e", [" the", "<|endoftext|>"]])),
    "stream": st.booleans(),
    "logit_bias": st.dictionaries(st.integers(-1, 3100).map(str), st.floats(-101, 101), max_size=3),
    "generation_config": st.dictionaries(
        st.sampled_from(["temperature", "top_k", "do_sample", "repetition_penalty", "min_p", "num_beams"]), LEAVES
    ).map(json.dumps),
}
COMPLETIONS = with_odd(fields_of(CompletionRequest), prompt=st.one_of(WORDS, st.just("The cell is")), **USUAL)
CHATS = with_odd(
    fields_of(ChatRequest),
    messages=st.lists(MESSAGES, min_size=1, max_size=2),
    tools=st.lists(TOOLS, max_size=1),
    chat_template_kwargs=st.dictionaries(st.sampled_from(["style", "chat_template", "tokenize"]), LEAVES),
    **USUAL,
)
BODIES = st.one_of(
    st.tuples(st.just("/v1/completions"), COMPLETIONS.map(json.dumps).map(str.encode)),
    st.tuples(st.just("/v1/chat/completions"), CHATS.map(json.dumps).map(str.encode)),
    st.tuples(st.sampled_from(["/v1/completions", "/v1/chat/completions"]), ANYTHING.map(json.dumps).map(str.encode)),
    st.tuples(st.sampled_from(["/v1/completions", "/v1/chat/completions"]), st.binary(max_size=20)),
)


@pytest.mark.parametrize("examples", [80, pytest.param(400, marks=pytest.mark.slow)])
def test_any_body_is_answered_or_refused(server, examples):
    """Never by status 500, never too late, and the next request gets its answer."""
    _, expected = ask(server, "/v1/completions", json.dumps(PROMPT).encode())

    @hypothesis.settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @hypothesis.given(BODIES)
    def is_answered(asked):
        status, told = ask(server, *asked)
        assert status in (200, 400), told
        if status == 400:
            assert told.startswith(TEMPLATES_WORDS) or not any(words in told for words in PYTHONS_WORDS), told
            assert told.strip()
        assert ask(server, "/v1/completions", json.dumps(PROMPT).encode()) == (200, expected)

    is_answered()


def ask(server: Server, route: str, body: bytes) -> tuple[int, str]:
    """The status, and the text or the message; a stream that fails counts as 500."""
    request = urllib.request.Request(server.url + route, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            raw, streamed = answer.read().decode(), "event-stream" in answer.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        told = error.read().decode()
        return error.code, json.loads(told)["error"]["message"] if told.startswith("{") else told
    *events, end = [line.removeprefix("data: ") for line in raw.split("\n\n") if line] if streamed else [raw, "[DONE]"]
    assert end == "[DONE]"
    chunks = [json.loads(event) for event in events]
    if any("error" in chunk for chunk in chunks):
        return 500, raw
    choices = [chunk["choices"][0] for chunk in chunks]
    return 200, "".join(str(choice.get("text", choice.get("delta", choice.get("message")))) for choice in choices)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ('"max_tokens": Infinity', "max_tokens=Infinity; give a whole number of at least 1"),
        ('"max_tokens": null, "temperature": 1e-320', None),
        ('"temperature": NaN', "temperature=NaN; give a number from 0 to 2"),
        ('"temperature": 1e999', "temperature=Infinity; give a number from 0 to 2"),
        ('"frequency_penalty": -1', "frequency_penalty=-1 is not supported; leave frequency_penalty out"),
        ('"frequency_penalty": 0', None),
        ('"stop": []', None),
        ('"stop": null', None),
        ('"stop": ["\u4e2d\u6587"]', None),
        ('"stop": ""', 'stop=""; give a text or a list of up to 64, none of them empty'),
        ('"suffix": "end"', 'suffix="end" is not supported; leave suffix out'),
        ('"logit_bias": {"3072": 1}', 'logit_bias={"3072": 1}; give tokens below 3,072'),
        ('"stream": "yes"', 'stream="yes"; give true or false'),
        ('"generation_config": "{\\"do_sample\\": true, \\"transformers_version\\": \\"5\\"}"', None),
        ('"generation_config": "{\\"num_beams\\": 3}"', "generation_config.num_beams=3 is not supported"),
        ('"generation_config": "{\\"num_beams\\": 1, \\"eos_token_id\\": 2}"', None),
        ('"prompt": ["The cell is"]', None),
        ('"prompt": [[5, 6]]', "prompt=[[5, 6]]; give one text"),
        ('"unknown": null', None),
    ],
)
def test_a_field_is_told_with_what_it_may_be(server, given, says):
    status, told = ask(server, "/v1/completions", f'{{"prompt": "The cell is", {given}}}'.encode())
    assert (status, told if status == 200 else told[: len(says or "")]) == ((400, says) if says else (200, told))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ('"messages": null', "messages=null; "),
        ('"messages": []', "messages=[]; "),
        ('"messages": [null]', "messages[0]=null; "),
        ('"messages": [{"content": "a"}]', "messages[0] lacks 'role'"),
        ('"messages": [{"role": "user", "content": 5}]', "messages[0].content=5; give a text, or a list of parts"),
        ('"messages": [{"role": "user", "text": "a"}]', 'messages[0].text="a" is not supported'),
        ('"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"', 'tool_choice="required" is not'),
        ('"messages": [{"role": "user", "content": "a"}], "tools": [5]', "tools[0]=5; "),
        (
            '"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"chat_template": "b"}',
            'chat_template_kwargs={"chat_template": "b"}; give no chat_template',
        ),
        ('"messages": [{"role": "user", "content": "a"}], "modalities": ["audio"]', 'modalities=["audio"] is not'),
    ],
)
def test_a_field_of_a_chat_is_told_with_what_it_may_be(server, given, says):
    status, told = ask(server, "/v1/chat/completions", f"{{{given}}}".encode())
    assert status == 400
    assert told.startswith(says)


@pytest.mark.parametrize(
    "given",
    [
        {"content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]},
        {"content": "a", "id": "msg-1", "type": "message", "reasoning": "b", "provider_specific_fields": {}},
        {"content": "a", "anything": None},
    ],
)
def test_what_clients_add_to_messages_is_taken(server, given):
    body = {
        "messages": [{"role": "user", **given}],
        "max_tokens": 1,
        "tool_choice": "none",
        "parallel_tool_calls": False,
    }
    assert ask(server, "/v1/chat/completions", json.dumps(body).encode())[0] == 200


def test_a_call_without_arguments_has_none():
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": ""}}
    message = Message.model_validate({"role": "assistant", "tool_calls": [call]})
    assert message.for_template()["tool_calls"][0]["function"]["arguments"] == {}


def test_the_page_names_every_field_that_is_refused():
    page = (ROOT / "docs" / "serving.md").read_text()
    table = page.split("| field | refused | do instead |")[1].split("\n\n")[0]
    fields = "".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))
    refused = set()
    for kind in (ChatRequest, CompletionRequest):
        odd = {field: {"odd": 1} for field in kind.model_fields}
        with pytest.raises(ValidationError) as error:
            kind.model_validate(odd, context={"name": "demo", "vocabulary": 8})
        refused |= {each["loc"][0] for each in error.value.errors() if each["type"] == "extra_forbidden"}
    assert set(re.findall("`([^`]*)`", fields)) == refused | {"prompt"}


def test_many_mistakes_are_refused_as_fast_as_one(server):
    began = time.perf_counter()
    for wrong in (1, {}):
        status, told = ask(server, "/v1/chat/completions", json.dumps({"messages": [wrong] * 100_000}).encode())
        assert (status, told[:11]) == (400, "messages[0]")
    assert time.perf_counter() - began < 1.5, "pydantic tells of all of them, which took seconds"
