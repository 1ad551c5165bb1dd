"""`hf-twell serve`: what its clients get, and what it says to the one who starts it."""

import json
import resource
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import hf_twell
from hf_twell.cli import main
from tests.conftest import tiny_llama
from tests.servers import ROOT, Server, answering, serving

pytest.importorskip("fastapi")
from hf_twell.models.loading import load_model
from hf_twell.serving.answers import Served
from hf_twell.serving.requests import BadRequest
from hf_twell.serving.sparse import prepare

DEMO = ROOT / "recipes" / "demo" / "model"
MESSAGES = [{"role": "user", "content": "What is a cell?"}]
PROMPTS = ("The cell is", "Once upon a time")
NEW_TOKENS = 24
ROUTES = pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory) -> Path:
    """The demo model as a sparse checkpoint, in float32, with a chat template."""
    folder = tmp_path_factory.mktemp("sparse")
    hf_twell.sparsify(AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32")).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(sparse):
    """What is served."""
    model, tokenizer = load_model(str(sparse), device="cpu")
    prepare(str(sparse), model.eval(), tokenizer, "cpu")
    return model


@pytest.fixture(scope="module")
def server(sparse, model):
    with answering(str(sparse), model, AutoTokenizer.from_pretrained(sparse)) as server:
        yield server


def greedy(folder: Path, prompt: str | list[dict]) -> str:
    """What plain Transformers writes after a text or messages, in float32, by the stock class and its plain matmuls."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encode = tokenizer if isinstance(prompt, str) else tokenizer.apply_chat_template
    options = {} if isinstance(prompt, str) else {"add_generation_prompt": True, "return_dict": True}
    ids = encode(prompt, return_tensors="pt", **options)["input_ids"]
    written = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(written, skip_special_tokens=True)


def completion(server: Server, **body) -> str:
    (choice,) = server.ask("/v1/completions", {"max_tokens": NEW_TOKENS, **body})["choices"]
    return choice["text"]


def events(server: Server, route: str, body: dict) -> list[str]:
    """The data of a stream's events, as they come."""
    with server.open(route, {**body, "stream": True}) as answer:
        lines = [line.decode().strip() for line in answer]
    assert all(line.startswith("data: ") for line in lines if line)
    return [line.removeprefix("data: ") for line in lines if line]


def test_the_command_serves_a_sparse_model(sparse, tmp_path):
    arguments = ("--engine", "transformers", "--port", "0", "--device", "cpu", "--backend", "cpu")
    with serving(tmp_path, sparse, *arguments) as server:
        assert any("is sparse: its 4 blocks decode by cpu kernels" in line for line in server.lines)
        assert completion(server, model=str(sparse), prompt=PROMPTS[0]) == greedy(sparse, PROMPTS[0])


def test_a_sparse_model_answers_as_in_transformers(server, sparse):
    expected = greedy(sparse, PROMPTS[0])
    assert len(expected) > NEW_TOKENS
    assert completion(server, model=str(sparse), prompt=PROMPTS[0]) == expected

    *parts, done = events(server, "/v1/completions", {"prompt": PROMPTS[0], "max_tokens": NEW_TOKENS})
    assert done == "[DONE]"
    texts = [json.loads(part)["choices"][0]["text"] for part in parts]
    assert len(texts) > 10
    assert "".join(texts) == expected


def test_chat_goes_through_the_template(server, sparse):
    expected = greedy(sparse, MESSAGES)
    body = {"messages": MESSAGES, "max_tokens": NEW_TOKENS}
    (choice,) = server.ask("/v1/chat/completions", body)["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected}
    *parts, _ = events(server, "/v1/chat/completions", body)
    deltas = [json.loads(part)["choices"][0]["delta"] for part in parts]
    assert "".join(delta.get("content", "") for delta in deltas) == expected


def test_requests_at_the_same_time(server, sparse):
    with ThreadPoolExecutor(4) as pool:
        texts = pool.map(lambda prompt: completion(server, prompt=prompt), PROMPTS * 2)
    assert list(texts) == [greedy(sparse, prompt) for prompt in PROMPTS] * 2


def test_a_temperature_samples_and_a_seed_repeats(server, sparse):
    body = {"prompt": PROMPTS[0], "temperature": 1.5, "seed": 3}
    first = completion(server, **body)
    assert first == completion(server, **body)
    assert first != greedy(sparse, PROMPTS[0])
    assert completion(server, prompt=PROMPTS[0], temperature=0) == greedy(sparse, PROMPTS[0])


@pytest.mark.parametrize("stream", [False, True])
def test_a_seed_repeats_whatever_else_is_asked(server, stream):
    """Also where other seeds arrive while it is answered, or before its turn comes."""

    def seeded(seed: int) -> str:
        body = {"prompt": PROMPTS[1], "temperature": 1.0, "seed": seed, "max_tokens": 60}
        if not stream:
            return completion(server, **body)
        *parts, _ = events(server, "/v1/completions", body)
        return "".join(json.loads(part)["choices"][0]["text"] for part in parts)

    alone = [seeded(seed) for seed in range(4)]
    assert len(set(alone)) == 4
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(seeded, range(4))) == alone


def write(server: Server, route: str, **body) -> str:
    """By one of the two routes."""
    words = {"prompt": PROMPTS[0]} if route == "/v1/completions" else {"messages": MESSAGES}
    (choice,) = server.ask(route, {**words, "max_tokens": NEW_TOKENS, **body})["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@ROUTES
def test_a_top_p_samples(server, route):
    best, sampled = write(server, route), write(server, route, top_p=0.95, seed=3)
    assert sampled == write(server, route, top_p=0.95, temperature=1, seed=3) != best
    for harmless in ({"top_p": 1}, {"top_p": 0}, {"top_p": 0.95, "temperature": 0}):
        assert write(server, route, seed=3, **harmless) == best


@ROUTES
def test_a_bias_is_added(server, route, sparse):
    tokenizer = AutoTokenizer.from_pretrained(sparse)
    (token,) = tokenizer(" the", add_special_tokens=False)["input_ids"]
    assert write(server, route, logit_bias={str(token): 100}) == " the" * NEW_TOKENS


def test_the_one_model_and_no_other(server, sparse):
    assert [row["id"] for row in server.ask("/v1/models")["data"]] == [str(sparse)]
    assert server.ask("/health") == {"status": "ok"}
    message = server.ask("/v1/completions", {"model": "gpt2", "prompt": "a"})
    assert f"pinned to '{sparse}'" in message
    assert "gpt2" in message
    for route in ("/load_model", "/reset"):  # of Transformers' own server
        assert server.ask(route, {"model": "gpt2"}) == "Not Found"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": ["a", "b"]}, 'prompt=["a", "b"]; give one text'),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens=0; give a whole number of at least 1"),
        ({"prompt": "a", "nonsense": 1}, "nonsense=1 is not supported; leave nonsense out"),
        ({"prompt": "a " * 600}, "the model's context 512"),
        ({}, "lacks 'prompt'"),
        ({"prompt": "a", "n": 2}, "n=2 is not supported; leave n out"),
        ({"prompt": "a", "logprobs": 0}, "logprobs=0 is not supported"),
        ({"prompt": "a", "best_of": 3}, "best_of=3"),
        ({"prompt": "a", "echo": True}, "echo=true"),
        ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty=0.5"),
        ({"prompt": "a", "top_p": 7}, "top_p=7; give a number from 0 to 1"),
        ({"prompt": "a", "top_p": "0.5"}, 'top_p="0.5"; give a number'),
        ({"prompt": "a", "temperature": -1}, "temperature=-1; give a number from 0 to 2"),
        ({"prompt": "a", "seed": "one"}, 'seed="one"; give a whole number'),
        ({"prompt": "a", "seed": 1 << 64}, "of at most 64 bits"),
        ({"prompt": "a", "logit_bias": [1]}, "logit_bias=[1]; give numbers from -100 to 100 by token"),
        ({"prompt": "a", "logit_bias": {"the": 1}}, 'logit_bias={"the": 1}; give numbers'),
        ({"prompt": "a", "logit_bias": {"5": "1"}}, 'logit_bias={"5": "1"}; give numbers'),
        ({"prompt": "a", "logit_bias": {"5": 101}}, 'logit_bias={"5": 101}; give numbers'),
        ([], "no JSON object"),
    ],
)
def test_mistakes_of_a_client_are_told(server, body, says):
    assert says in server.ask("/v1/completions", body)


def test_mistakes_in_messages_are_told(server):
    assert "lacks 'messages'" in server.ask("/v1/chat/completions", {})
    assert server.ask("/v1/chat/completions", {"messages": [{"role": "robot", "content": "a"}]}) == "no robots"
    body = {"messages": [{"role": "user", "content": "a"}]}
    for field, value in (
        ("n", 2),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("response_format", {"type": "json_object"}),
        ("reasoning_effort", "low"),
    ):
        message = server.ask("/v1/chat/completions", {**body, field: value})
        assert message == f"{field}={json.dumps(value)} is not supported; leave {field} out"


def test_fields_that_ask_for_nothing_are_answered(server):
    """As clients send them, which fill in defaults."""
    plain = {"n": 1, "presence_penalty": 0.0, "logprobs": None, "user": "me", "top_p": 1, "logit_bias": {}}
    assert completion(server, prompt=PROMPTS[0], echo=False, best_of=1, max_tokens=1, **plain)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "response_format": {"type": "text"}}
    for given in (plain, {**plain, "logprobs": False, "top_logprobs": 0}):
        assert len(server.ask("/v1/chat/completions", {**body, **given})["choices"]) == 1


def test_a_client_that_goes_away_leaves_the_server_to_others(server, sparse):
    with server.open("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 400, "stream": True}) as answer:
        next(answer)
    assert completion(server, prompt=PROMPTS[0]) == greedy(sparse, PROMPTS[0])


def answer(server: Server, route: str, stream: bool, **body) -> tuple[str, str, dict]:
    """The text of an answer, why it ended, and its usage."""
    words = {"prompt": PROMPTS[0]} if route == "/v1/completions" else {"messages": MESSAGES}
    body = {**words, "max_tokens": NEW_TOKENS, **body}
    chunks = [json.loads(event) for event in events(server, route, body)[:-1]] if stream else [server.ask(route, body)]
    choices = [chunk["choices"][0] for chunk in chunks]
    told = [choice.get("delta", choice.get("message", choice)) for choice in choices]
    text = "".join(part.get("text", part.get("content", "")) for part in told)
    return text, choices[-1]["finish_reason"], chunks[-1]["usage"]


@ROUTES
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_is_left_out(server, sparse, route, stream):
    """Wherever it begins and ends: in the middle of a token, or in another one than it began in."""
    expected = greedy(sparse, PROMPTS[0] if route == "/v1/completions" else MESSAGES)
    for begin, length in ((0, 2), (3, 1), (4, 9), (11, 3), (12, 30)):
        stop = expected[begin : begin + length]
        text, reason, usage = answer(server, route, stream, stop=["absent", stop])
        assert (text, reason) == (expected[: expected.index(stop)], "stop")
        assert 1 <= usage["completion_tokens"] == usage["total_tokens"] - usage["prompt_tokens"] < NEW_TOKENS
    whole, reason, usage = answer(server, route, stream, stop=expected[-3:] + "absent")  # its beginning alone comes
    assert (whole, reason, usage["completion_tokens"]) == (expected, "length", NEW_TOKENS)


@ROUTES
@pytest.mark.parametrize("stream", [False, True])
def test_an_end_at_the_last_token_is_no_cut(server, sparse, route, stream):
    tokenizer = AutoTokenizer.from_pretrained(sparse)
    end, other = tokenizer.eos_token_id, tokenizer.bos_token_id
    for token, stop in ((end, []), (other, [tokenizer.bos_token])):  # a special token stops, too, and has no text
        text, reason, usage = answer(server, route, stream, max_tokens=1, logit_bias={str(token): 100}, stop=stop)
        assert (text, reason, usage["completion_tokens"]) == ("", "stop", 1)
    for token, options in ((other, {}), (end, {"ignore_eos": True})):
        bias = {str(token): 100}
        _, reason, usage = answer(server, route, stream, max_tokens=2, logit_bias=bias, **options)
        assert (reason, usage["completion_tokens"]) == ("length", 2)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "image_url"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "input_audio"),
        ({"type": "file", "file": {"file_id": "1"}}, "file"),
        ({"type": "hologram"}, "hologram"),
        ({"type": "text", "text": "a", "video_url": "b"}, "video_url"),
        ("a", "content[1]"),
    ],
)
def test_what_a_model_cannot_read_is_refused(server, part, named):
    content = [{"type": "text", "text": "What is this?"}, part]
    told = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 1})
    assert "messages[0].content[1]" in told
    assert named in told


def test_all_of_a_message_reaches_the_template(server, sparse):
    """The text beside a tool call, and the parts of a text; what clients send back empty is none."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    parts = [{"type": "text", "text": "What"}, {"type": "text", "text": "is a cell?"}]
    written = [
        {"role": "assistant", "content": "What is a cell?", "tool_calls": [call], "refusal": None, "audio": None}
    ]
    for messages in (written, [{"role": "assistant", "content": parts, "annotations": [], "tool_calls": None}]):
        body = {"messages": messages, "max_tokens": NEW_TOKENS}
        (choice,) = server.ask("/v1/chat/completions", body)["choices"]
        plain = [{"role": "assistant", "content": "What is a cell?"}]
        assert choice["message"]["content"] == greedy(sparse, plain)
    told = server.ask("/v1/chat/completions", {"messages": [{**written[0], "audio": {"id": "1"}}]})
    assert told.startswith('messages[0].audio={"id": "1"} is not supported')


@pytest.fixture
def calls(model):
    """How often the model is called, each time for at least 2 ms."""
    called = []

    def note(*_):
        called.append(time.sleep(0.002))

    with model.register_forward_pre_hook(note):
        yield called


@ROUTES
@pytest.mark.parametrize("stream", [False, True])
def test_work_ends_when_its_client_has_gone(server, calls, route, stream):
    """The one that is answered, and those that wait for their turn."""
    words = {"prompt": PROMPTS[0]} if route == "/v1/completions" else {"messages": MESSAGES}
    body = {**words, "stream": stream, "max_tokens": 400, "logit_bias": {"1": -100}}
    clients = [send(server, route, body) for _ in range(6)]
    while len(calls) < 5:
        time.sleep(0.001)
    for client in clients:
        client.close()
    assert completion(server, prompt=PROMPTS[0], max_tokens=2)
    assert len(calls) < 400


def send(server: Server, route: str, body: dict) -> socket.socket:
    """A request whose answer nobody reads."""
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = f"Host: a\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    client = socket.create_connection((host, int(port)))
    client.sendall(f"POST {route} HTTP/1.1\r\n{head}\r\n\r\n".encode() + data)
    return client


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_is_told_and_the_next_is_answered(server, model, stream):
    def fail(*_):
        raise RuntimeError('no "memory"\nleft')

    body = {"prompt": PROMPTS[0], "max_tokens": 2}
    with model.register_forward_pre_hook(fail):
        told = json.loads(events(server, "/v1/completions", body)[0])["error"]["message"] if stream else ""
        told = told or server.ask("/v1/completions", body)
    assert told == 'the answer failed: no "memory"\nleft'
    assert completion(server, prompt=PROMPTS[0])


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_that_is_none_is_sent_as_text(model, sparse, stream):
    tokenizer = AutoTokenizer.from_pretrained(sparse)
    expected = greedy(sparse, MESSAGES)
    assert " the cellar" in expected
    call = {"open": " the", "close": "ar", "content": "json", "repeats": True}  # and " cell" is no JSON
    fields = {"content": {"content": "text"}, "tool_calls": call}
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "start_anchor": "assistant:", "fields": fields}
    with answering(str(sparse), model, tokenizer) as server:
        text, reason, _ = answer(server, "/v1/chat/completions", stream)
    assert (text.strip(), reason) == (expected.strip(), "length")


def test_bytes_that_are_no_text_do_not_end_an_answer():
    """Of a tokenizer that writes bytes where it knows no piece, as Llama 2's: cut between any two tokens."""
    from hf_twell.serving.one_model import _Text

    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581the", "a", "\u4e2d"]
    backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True))
    space = decoders.Replace("\u2581", " ")
    backend.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    text = "the \u4e2d\xe9 \U0001f600a"
    tokens = [257, *(byte + 1 for byte in text.encode()[3:]), 259, 257]
    reader = _Text(tokenizer)
    assert "".join(reader.after([token]) for token in tokens) + reader.rest() == tokenizer.decode(tokens)
    reader, broken = _Text(tokenizer), [257, 0xE4 + 1, 258, 0xC3 + 1, 257, 0x80 + 1]
    assert "".join(reader.after([token]) for token in broken) + reader.rest() == tokenizer.decode(broken)


@ROUTES
def test_a_large_body_is_refused_early(server, route):
    """In time (a minute before), in memory (3.7 GB), and by what it is too large for."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for size, status, says in (
        (40_000_000, 413, "the body has more than 1,064,960 bytes"),
        (1_000_000, 400, "the prompt has 1,000,0"),
    ):
        words = {"prompt": "a " * (size // 2)}
        if route == "/v1/chat/completions":
            words = {"messages": [{"role": "user", "content": words["prompt"]}]}
        given, refusal = server.post(route, json.dumps(words).encode(), timeout=20)
        assert given == status
        assert says in refusal["error"]["message"]
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 1000


def test_a_prompt_is_counted_no_further_than_the_context(model, sparse):
    """And one of many characters that are few tokens is answered."""
    tokenizer = AutoTokenizer.from_pretrained(sparse)
    served, counted = Served("m", model, tokenizer), []
    word = max((tokenizer.decode(token) for token in range(len(tokenizer))), key=len)
    few = word * (2 * served.context // 3)
    assert len(few) > 8 * served.context, "more than is looked at as a whole"
    assert served.inputs(few)["input_ids"].shape[-1] < served.context

    class Counting(type(tokenizer)):
        def __call__(self, text, **options):
            counted.append(len(text))
            return super().__call__(text, **options)

    tokenizer.__class__ = Counting
    with pytest.raises(BadRequest, match=r"the prompt has 10,000,000 characters, more than the model's context of "):
        served.inputs("a " * 5_000_000)
    assert counted == [2**16]


def test_a_body_needs_no_content_type(server):
    status, told = server.post("/v1/completions", json.dumps({"prompt": "a", "max_tokens": 1}).encode())
    assert (status, len(told["choices"])) == (200, 1)
    status, told = server.post("/v1/completions", b'{"prompt": "a"')
    assert status == 400
    assert told["error"]["message"].startswith("the body is no JSON object: Invalid JSON: EOF")


def test_an_answer_ends_with_the_context(server):
    usage = server.ask("/v1/completions", {"prompt": "a " * 480})["usage"]
    assert 480 < usage["prompt_tokens"] < usage["total_tokens"] <= 512


def test_a_gguf_file_is_said_to_be_dense():
    assert "GGUF files do not tell sparse models" in prepare("model.gguf", tiny_llama(), None, "auto")


def test_a_prompt_without_tokens_is_refused(model, sparse):
    """Of a tokenizer that adds none of its own."""
    with pytest.raises(ValueError, match="the prompt is empty"):
        Served("m", model, AutoTokenizer.from_pretrained(sparse)).inputs("", add_special_tokens=False)


@pytest.mark.slow
def test_openais_own_client(server, sparse):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    options = {"model": str(sparse), "prompt": PROMPTS[0], "max_tokens": NEW_TOKENS}
    assert client.completions.create(**options).choices[0].text == greedy(sparse, PROMPTS[0])
    parts = client.completions.create(**options, stream=True)
    assert "".join(part.choices[0].text for part in parts) == greedy(sparse, PROMPTS[0])
    with pytest.raises(openai.BadRequestError, match="pinned to"):
        client.completions.create(**{**options, "model": "gpt2"})


@pytest.mark.slow
def test_lm_evals_own_client(server, sparse):
    """It trims no stop sequence, and scores what it gets."""
    pytest.importorskip("tenacity", reason="of lm_eval[api]")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    expected = greedy(sparse, PROMPTS[0])
    url = f"{server.url}/v1/completions"
    client = LocalCompletionsAPI(url, model=str(sparse), tokenizer_backend=None, tokenized_requests=False)
    asked = [{"until": [expected[9:12]], "max_gen_toks": NEW_TOKENS}, {"until": [], "max_gen_toks": NEW_TOKENS}]
    requests = [
        Instance("generate_until", {}, (PROMPTS[0], {**options, "do_sample": False}), number)
        for number, options in enumerate(asked)
    ]
    assert client.generate_until(requests) == [expected[: expected.index(expected[9:12])], expected]


@pytest.mark.slow
def test_ctrl_c_ends_what_is_being_written(sparse, tmp_path):
    """A stream, and an answer in one piece that waits its turn behind the stream."""
    body = {"prompt": PROMPTS[0], "max_tokens": 500}
    with serving(tmp_path, sparse, "--engine", "transformers", "--port", "0", "--device", "cpu") as server:
        with server.open("/v1/completions", {**body, "stream": True}) as answer, ThreadPoolExecutor(1) as pool:
            next(answer)
            behind = pool.submit(server.ask, "/v1/completions", body)
            time.sleep(0.2)  # for it to arrive
            server.stop()
            *_, usage, done = (line.decode().removeprefix("data: ") for line in answer if line.strip())
            assert done.strip() == "[DONE]"
            assert json.loads(usage)["usage"]["completion_tokens"] < 500
            assert behind.result()["usage"]["completion_tokens"] < 500
        server.process.wait(timeout=10)


@pytest.mark.slow
def test_its_blocks_call_the_kernels(sparse, tmp_path):
    """An instruction set that no processor has breaks the kernels, and so the server, and plain matmuls alone go on."""
    arguments = [str(sparse), "--engine", "transformers", "--port", "0", "--device", "cpu"]
    with pytest.raises(AssertionError, match="cannot run here"):  # noqa: SIM117
        with serving(tmp_path, *arguments, "--backend", "cpu", HF_TWELL_CPU_ISA="none"):
            pass
    with serving(tmp_path, *arguments, "--backend", "reference", HF_TWELL_CPU_ISA="none") as server:
        assert any("its 4 blocks decode by plain matmuls, as asked" in line for line in server.lines)
        assert completion(server, prompt=PROMPTS[0]) == greedy(sparse, PROMPTS[0])


@pytest.mark.slow
def test_an_adapter_is_served_on_its_sparse_base(sparse, tmp_path):
    peft = pytest.importorskip("peft")
    model = hf_twell.sparsify(AutoModelForCausalLM.from_pretrained(sparse))
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    hf_twell.save_adapter(peft.get_peft_model(model, config), tmp_path / "adapter")
    merged = hf_twell.load_adapter(tmp_path / "adapter", sparse).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(sparse).save_pretrained(tmp_path / "merged")
    with serving(
        tmp_path, tmp_path / "adapter", "--engine", "transformers", "--port", "0", "--device", "cpu"
    ) as server:
        assert any("decode by plain matmuls: adapters are on them" in line for line in server.lines)
        written = completion(server, prompt=PROMPTS[0])
        assert written == greedy(tmp_path / "merged", PROMPTS[0])
        assert written != greedy(sparse, PROMPTS[0])


@pytest.mark.slow
def test_a_dense_model_is_served_and_said_so(tmp_path):
    with serving(tmp_path, DEMO, "--engine", "transformers", "--port", "0", "--dtype", "float32") as server:
        assert any("float32" in line and "is dense" in line for line in server.lines)
        assert any("no chat template" in line for line in server.lines)
        message = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
        assert "no chat template; use /v1/completions" in message
        assert completion(server, prompt=PROMPTS[0]) == greedy(DEMO, PROMPTS[0])


def test_a_port_in_use_is_told(sparse, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main(["serve", str(sparse), "--engine", "transformers", "--port", port]) == 1
    assert f"cannot serve on 127.0.0.1 port {port}: Address already in use; give another --port" in last(capsys)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{folder}/absent"], "no folder at"),
        (["{folder}"], "config.json"),
        ([str(DEMO), "--host", "192.0.2.1"], "give an address of this machine"),
        ([str(DEMO), "--backend", "cpu"], "is no converted model"),
        ([str(DEMO), "--", "--max-model-len", "64"], "arguments after -- are for vLLM"),
        ([str(DEMO), "--device", "tpu"], "give cpu, cuda or cuda:N"),
    ],
)
def test_mistakes_of_the_one_who_starts_it_are_told(arguments, says, tmp_path, capsys):
    model, *rest = (argument.format(folder=tmp_path) for argument in arguments)
    assert main(["serve", model, "--engine", "transformers", "--port", "0", *rest]) == 1
    assert says in last(capsys)


def last(capsys) -> str:
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("hf-twell: error: ")
    return line


@pytest.mark.slow
def test_a_missing_package_is_named_with_what_installs_it():
    code = "import sys\nsys.modules['uvicorn'] = None\nfrom hf_twell.cli import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "serve", str(DEMO), "--engine", "transformers"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr == "hf-twell: error: this needs the package uvicorn: pip install 'hf_twell[serve]'\n"
