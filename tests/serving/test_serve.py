"""`hf-twell serve`: what its clients get, and what it says to the one who starts it."""

import json
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_twell
from hf_twell.files.packages import how_to_install
from hf_twell.serving.sparse import prepare
from tests.conftest import finished, tiny_llama
from tests.paths import MODEL
from tests.servers import Server, serving

pytest.importorskip("fastapi")

MESSAGES = [{"role": "user", "content": "What is a cell?"}]
PROMPTS = ("The cell is", "Once upon a time")
NEW_TOKENS = 24
ROUTES = pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
ANSWERS = pytest.mark.parametrize("stream", [False, True])
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
)
ON_CPU = ("--engine", "transformers", "--port", "0", "--device", "cpu")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory) -> Path:
    """The demo model as a sparse checkpoint, in float32, with a chat template and a token that it does not know."""
    folder = tmp_path_factory.mktemp("sparse")
    hf_twell.sparsify(AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_tokens("<unknown>")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(sparse, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), sparse, *ON_CPU, "--backend", "cpu") as server:
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


def request(route: str, **body) -> dict:
    words = {"prompt": PROMPTS[0]} if route == "/v1/completions" else {"messages": MESSAGES}
    return {**words, "max_tokens": NEW_TOKENS, **body}


def events(server: Server, route: str, body: dict) -> list[dict]:
    """What a stream's events hold, which end by OpenAI's own last one."""
    with server.open(route, {**body, "stream": True}) as answer:
        *lines, done = [line.decode().strip().removeprefix("data: ") for line in answer if line.strip()]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


def answer(server: Server, route: str, stream: bool = False, **body) -> tuple[str, str, dict]:
    """The text of an answer, why it ended, and its usage."""
    body = request(route, **body)
    chunks = events(server, route, body) if stream else [server.ask(route, body)]
    choices = [chunk["choices"][0] for chunk in chunks]
    told = [choice.get("delta", choice.get("message", choice)) for choice in choices]
    text = "".join(part.get("text", part.get("content", "")) for part in told)
    return text, choices[-1]["finish_reason"], chunks[-1]["usage"]


def completion(server: Server, **body) -> str:
    return answer(server, "/v1/completions", **body)[0]


@ROUTES
@ANSWERS
def test_a_sparse_model_answers_as_in_transformers(server, sparse, route, stream):
    assert any("is sparse: its 4 blocks decode by cpu kernels" in line for line in server.lines)
    expected = greedy(sparse, PROMPTS[0] if route == "/v1/completions" else MESSAGES)
    text, reason, usage = answer(server, route, stream, model=str(sparse))
    assert (text, reason, usage["completion_tokens"]) == (expected, "length", NEW_TOKENS)
    assert len(events(server, route, request(route))) > 10


def test_requests_at_the_same_time(server, sparse):
    with ThreadPoolExecutor(4) as pool:
        texts = pool.map(lambda prompt: completion(server, prompt=prompt), PROMPTS * 2)
    assert list(texts) == [greedy(sparse, prompt) for prompt in PROMPTS] * 2


@ROUTES
def test_a_temperature_or_a_top_p_samples_and_a_seed_repeats(server, route):
    def write(**body) -> str:
        return answer(server, route, **body)[0]

    best = write()
    for asked in ({"temperature": 1.5}, {"top_p": 0.95}):
        assert write(seed=3, **asked) == write(seed=3, **asked) != best
    for harmless in ({"top_p": 1}, {"temperature": 0}, {"temperature": 1e-320}, {"top_p": 0.95, "temperature": 0}):
        assert write(seed=3, **harmless) == best


@ROUTES
def test_a_bias_is_added(server, route, sparse):
    (token,) = AutoTokenizer.from_pretrained(sparse)(" the", add_special_tokens=False)["input_ids"]
    assert answer(server, route, logit_bias={str(token): 100})[0] == " the" * NEW_TOKENS


@ROUTES
@ANSWERS
def test_a_stop_sequence_is_left_out(server, sparse, route, stream):
    """Wherever it begins and ends: in the middle of a token, or in another one than it began in."""
    expected = greedy(sparse, PROMPTS[0] if route == "/v1/completions" else MESSAGES)
    for begin, length in ((0, 2), (3, 1), (4, 9), (12, 30)):
        stop = expected[begin : begin + length]
        text, reason, usage = answer(server, route, stream, stop=["absent", stop])
        assert (text, reason) == (expected[: expected.index(stop)], "stop")
        assert usage["completion_tokens"] < NEW_TOKENS
    assert answer(server, route, stream, stop=expected[-3:] + "absent")[:2] == (expected, "length")
    assert answer(server, route, stream, stop=[])[0] == expected


def test_the_one_model_and_no_other(server, sparse):
    assert [row["id"] for row in server.ask("/v1/models")["data"]] == [str(sparse)]
    assert server.ask("/health") == {"status": "ok"}
    message = server.ask("/v1/completions", {"model": "gpt2", "prompt": "a"})
    assert f"pinned to '{sparse}'" in message
    assert "gpt2" in message
    for route in ("/load_model", "/reset"):  # of Transformers' own server
        assert server.ask(route, {"model": "gpt2"}) == "Not Found"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("presence_penalty", 0.5),
        ("response_format", {"type": "json_object"}),
        ("reasoning_effort", "low"),
        ("tool_choice", "required"),
    ],
)
def test_fields_that_would_be_ignored_are_refused(server, field, value):
    """But for what asks for nothing, as clients send it that fill in defaults."""
    route = "/v1/chat/completions"
    told = server.ask(route, request(route, **{field: value}))
    assert told == f"{field}={json.dumps(value)} is not supported; leave {field} out"
    nothing = {"n": 1, "response_format": {"type": "text"}, "tool_choice": "auto"}.get(field)
    assert answer(server, route, max_tokens=1, user="me", **{field: nothing})


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"echo": True}, "echo=true is not supported"),
        ({"best_of": 3}, "best_of=3 is not supported"),
        ({"logprobs": 1}, "logprobs=1 is not supported"),
        ({"nonsense": 1}, "Unexpected fields in the request: {'nonsense'}"),
        ({"prompt": ["a", "b"]}, "prompt must be a string"),
        ({"prompt": "a " * 600}, "the model's context 512; leave room for an answer"),
        ({"prompt": "<unknown>"}, "makes token 3072, but the model has only 3,072 embeddings"),
        ({"max_tokens": 0}, "`max_new_tokens` must be greater than 0"),
    ],
)
def test_mistakes_of_a_client_are_told_and_the_next_is_answered(server, body, says):
    assert says in server.ask("/v1/completions", request("/v1/completions", **body))
    assert completion(server, max_tokens=1)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "robot", "content": "a"}, "no robots"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}, "messages hold image_url"),
    ],
)
def test_what_the_template_or_the_model_does_not_read_is_refused(server, sparse, message, says):
    assert server.ask("/v1/chat/completions", {"messages": [message]}).startswith(says)
    parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    assert answer(server, "/v1/chat/completions", messages=parts)[0] == greedy(sparse, MESSAGES)


def test_an_answer_ends_with_the_context(server):
    _, reason, usage = answer(server, "/v1/completions", prompt="a " * 480, max_tokens=None)
    assert (usage["total_tokens"], reason) == (512, "length")


def test_work_ends_when_the_client_of_a_stream_has_gone(server):
    def ticks() -> int:
        """Of processor time that the server took."""
        fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    body, begun = request("/v1/completions", max_tokens=400, stream=True), ticks()
    server.open("/v1/completions", body).read()
    whole, begun = ticks() - begun, ticks()
    with server.open("/v1/completions", body) as stream:
        next(stream)
    assert completion(server, max_tokens=1)
    assert ticks() - begun < whole / 2


def test_a_gguf_file_is_said_to_be_dense():
    assert "GGUF files do not tell sparse models" in prepare("model.gguf", tiny_llama(), None, "auto")


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
    body = request("/v1/completions", max_tokens=500)
    with serving(tmp_path, sparse, *ON_CPU) as server:
        with server.open("/v1/completions", {**body, "stream": True}) as stream, ThreadPoolExecutor(1) as pool:
            next(stream)
            behind = pool.submit(server.ask, "/v1/completions", body)
            time.sleep(0.2)  # for it to arrive
            server.stop()
            assert 'data: {"error": "503: the server was stopped"}' in stream.read().decode()
            assert behind.result() == "the server was stopped"
        server.process.wait(timeout=10)


@pytest.mark.slow
def test_its_blocks_call_the_kernels(sparse, tmp_path):
    """An instruction set that no processor has breaks the kernels, and so the server, and plain matmuls alone go on."""
    with pytest.raises(AssertionError, match="cannot run here"):  # noqa: SIM117
        with serving(tmp_path, sparse, *ON_CPU, "--backend", "cpu", HF_TWELL_CPU_ISA="none"):
            pass
    with serving(tmp_path, sparse, *ON_CPU, "--backend", "reference", HF_TWELL_CPU_ISA="none") as server:
        assert any("its 4 blocks decode by plain matmuls, as asked" in line for line in server.lines)
        assert completion(server) == greedy(sparse, PROMPTS[0])


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
    with serving(tmp_path, tmp_path / "adapter", *ON_CPU) as server:
        assert any("decode by plain matmuls: adapters are on them" in line for line in server.lines)
        written = completion(server)
        assert written == greedy(tmp_path / "merged", PROMPTS[0])
        assert written != greedy(sparse, PROMPTS[0])


@pytest.mark.slow
def test_a_dense_model_is_served_and_said_so(tmp_path):
    with serving(tmp_path, MODEL, "--engine", "transformers", "--port", "0", "--dtype", "float32") as server:
        assert any("float32" in line and "is dense" in line for line in server.lines)
        assert any("no chat template" in line for line in server.lines)
        assert "chat_template is not set" in server.ask("/v1/chat/completions", {"messages": MESSAGES})
        assert completion(server) == greedy(MODEL, PROMPTS[0])


def test_a_port_in_use_is_told(sparse, error_line):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = error_line("serve", sparse, "--engine", "transformers", "--port", port)
    assert f"cannot serve on 127.0.0.1 port {port}: Address already in use" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{folder}/absent"], "no folder at"),
        (["{folder}"], "config.json"),
        ([str(MODEL), "--host", "192.0.2.1"], "give an address of this machine"),
        ([str(MODEL), "--host", "no such host"], "give an address of this machine"),
        ([str(MODEL), "--backend", "cpu"], "is no converted model"),
        ([str(MODEL), "--", "--max-model-len", "64"], "arguments after -- are for vLLM"),
        ([str(MODEL), "--device", "tpu"], "give cpu, cuda or cuda:N"),
    ],
)
def test_mistakes_of_the_one_who_starts_it_are_told(arguments, says, tmp_path, error_line):
    model, *rest = (argument.format(folder=tmp_path) for argument in arguments)
    assert says in error_line("serve", model, "--engine", "transformers", "--port", "0", *rest)


@pytest.mark.slow
def test_a_missing_package_is_named_with_what_installs_it():
    code = "import sys\nsys.modules['uvicorn'] = None\nfrom hf_twell.cli import main\nsys.exit(main(sys.argv[1:]))"
    done = finished(sys.executable, "-c", code, "serve", MODEL, "--engine", "transformers")
    assert done.returncode == 1
    assert done.stderr == f"hf-twell: error: this needs the package uvicorn: {how_to_install('uvicorn')}\n"
