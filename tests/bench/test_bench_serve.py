"""`hf-twell bench serve`: what it reads of streams, what it makes of turns, and real servers, sparse and dense."""

import argparse
import importlib.util
import json
import lzma
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_twell
from hf_twell.bench.serve import Prompts, Side, compare_texts, in_bursts
from hf_twell.bench.serve_client import read_answer
from hf_twell.bench.serve_process import free_port, serving
from hf_twell.bench.serve_summary import overlap, pairs, ratio, summary
from hf_twell.cli import bench, main
from hf_twell.cli.bench_serve import command, prompts_of
from hf_twell.cli.bench_table import CELLS
from hf_twell.files.packages import how_to_install
from tests.conftest import COMMAND, finished, started
from tests.paths import DEMO, ROOT
from tests.vllm_engines import PYTHON, TIMEOUT_S, environment, needs_vllm

SMALL = ["--prompt-tokens", "12", "--new-tokens", "6", "--prefill-tokens", "40", "--repeats", "2"]


@pytest.fixture(scope="module")
def sparse(tmp_path_factory) -> Path:
    """The demo model as a sparse checkpoint in float32, with a density that lets vLLM take kernels."""
    folder = tmp_path_factory.mktemp("sparse")
    model = hf_twell.sparsify(AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype="float32"))
    hf_twell.unpatch(model).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO / "model").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["twell"] |= {"density": [0.03] * 4, "unions": {"64": [0.1, 0.1, 0.2, 0.2]}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# What is made of figures.


def test_a_summary_is_the_median_and_the_range():
    assert summary([3.0, 1.0, 2.00004]) == {"median": 2.0, "min": 1.0, "max": 3.0, "turns": [3.0, 1.0, 2.0]}
    assert summary([1234.56, 1.0])["median"] == 618.0


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [([1, 2, 3], [3, 4], True), ([1, 2], [3, 4], False), ([1, 9], [4, 5], True), ([3, 4], [1, 2], False)],
)
def test_ranges_overlap_where_they_share_a_value(one, other, share):
    assert overlap(summary(one), summary(other)) is share
    assert overlap(summary(other), summary(one)) is share


def row(side: str, turns, number=1, concurrency=4, **changes) -> dict:
    setting = {"measured": "decode", "concurrency": concurrency, "prompt_tokens": 8, "new_tokens": 16}
    figures = {"tokens_per_s": summary(turns), "ttft_ms": summary([5.0]), "tpot_ms": summary([2.0])}
    return {"bench": "serve", "side": side, "round": number, "processor": "P", **setting, **figures, **changes}


def test_sides_are_paired_by_setting_and_round_and_pooled():
    rows = [row("dense", [10, 12]), row("sparse", [30, 20]), row("dense", [14, 13], 2), row("sparse", [22], 2)]
    lines = pairs(rows)
    assert [setting["round"] for setting, *_ in lines] == [1, 2, "all"]
    _, sparse, dense = lines[-1]
    assert dense["tokens_per_s"]["turns"] == [10, 12, 14, 13]
    assert sparse["tokens_per_s"] == {"median": 22, "min": 20, "max": 30, "turns": [30, 20, 22]}
    assert ratio(sparse["tokens_per_s"], dense["tokens_per_s"]) == 22 / 12.5


def test_the_table_has_a_line_for_each_setting():
    rows = [row("dense", [10, 12]), row("dense", [40, 44], concurrency=16), row("sparse", [30, 20])]
    head, lines = CELLS["serve"](rows)
    first, second = (dict(zip(head, line, strict=True)) for line in lines)
    assert (first["at once"], first["sparse / dense"], first["ranges overlap"]) == (4, "2.27x", "no")
    assert first["dense tokens/s"] == "11 (10 to 12)"
    assert (first["dense ttft ms"], first["sparse tpot ms"]) == (5, 2)
    assert (second["at once"], second["sparse tokens/s"], second["sparse / dense"]) == (16, "", ""), "after Ctrl-C"
    assert "round" not in head


# What is read of a stream.


def event(text="", **more) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}], **more}).encode() + b"\n\n"


EVENTS = [event("a"), event("b\n\nc") + event("é"), event(usage={"prompt_tokens": 3, "completion_tokens": 4})]
DONE = b"data: [DONE]\n\n"


def test_a_stream_in_pieces():
    """Each event has the time of the piece in which it ended."""
    answer = read_answer(0.5, [(1.0, EVENTS[0]), (2.0, EVENTS[1]), (3.0, EVENTS[2] + DONE)])
    assert answer == (0.5, 1.0, 2.0, 2, "ab\n\ncé", 3, 4)
    whole = b"".join([*EVENTS, DONE])
    for size in (1, 7, 50, len(whole)):
        pieces = [(float(at), whole[at : at + size]) for at in range(0, len(whole), size)]
        again = read_answer(0.5, pieces)
        assert (again.text, again.prompt_tokens, again.new_tokens) == ("ab\n\ncé", 3, 4)
        assert again.first <= again.last <= pieces[-1][0]


@pytest.mark.parametrize("end", [b'{"error": "out of memory"}', EVENTS[0] + b'data: {"error": "out of memory"}\n\n'])
def test_what_is_no_answer_is_told(end):
    with pytest.raises(ValueError, match=r'the server did not answer a request: .*"out of memory"'):
        read_answer(0.0, [(1.0, end)])


def test_text_in_few_pieces_is_a_burst():
    assert in_bursts({"new_tokens_written": 16, "pieces": 2})
    assert not in_bursts({"new_tokens_written": 16, "pieces": 12})
    assert not in_bursts({"new_tokens_written": 1, "pieces": 0})


# What is sent.


@pytest.mark.parametrize("from_text", [False, True])
def test_prompts_have_so_many_tokens(tokenizer, from_text):
    text = (DEMO / "text" / "heldout.txt").read_text()[:20_000] if from_text else None
    prompts = Prompts(tokenizer, text)
    for tokens in (12, 128):
        made = prompts.make(8, tokens, "seed")
        assert {len(tokenizer(prompt)["input_ids"]) for prompt in made} <= {tokens, tokens - 1}
        assert made == prompts.make(8, tokens, "seed")
        assert not set(made) & set(prompts.make(8, tokens, "other seed"))


def test_a_text_shorter_than_a_prompt_is_repeated(tokenizer):
    (prompt,) = Prompts(tokenizer, "one two three").make(1, 40, "seed")
    assert len(tokenizer(prompt)["input_ids"]) in (39, 40)
    with pytest.raises(ValueError, match="has no words"):
        Prompts(tokenizer, " \n")


# What is asked about the answers.


def test_answers_must_be_the_same_in_float32_alone(tokenizer):
    words, other = "the cell is the smallest unit of life", "the cell was the smallest unit of life"
    length = len(tokenizer(words, add_special_tokens=False)["input_ids"])
    same = {"checked_tokens": 2 * length, "same_tokens": 2 * length}
    assert compare_texts([words] * 2, [words] * 2, tokenizer, "float32") == same
    with pytest.raises(ValueError, match=r"greedy answers agree .* in \d+ of \d+ tokens, and in float32"):
        compare_texts([words, other], [words] * 2, tokenizer, "float32")
    found = compare_texts([words, other], [words] * 2, tokenizer, "bfloat16")
    alike = len(tokenizer("the cell", add_special_tokens=False)["input_ids"])
    assert found["same_tokens"] == length + alike < found["checked_tokens"]


# The servers.


def options_of(sparse, *more):
    """The options as the parser gives them."""
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    rest = list(more)
    args = parser.parse_args(["serve", str(sparse), *(rest[: rest.index("--")] if "--" in rest else rest)])
    args.passed_on = rest[rest.index("--") + 1 :] if "--" in rest else []
    return args


def test_both_sides_are_one_command_but_for_the_kernels():
    args = options_of("model", "--dtype", "float32", "--device", "cpu")
    plain, kernels = (command(args, "transformers", side, 7) for side in ("dense", "sparse"))
    assert plain == [*kernels, "--backend", "reference"]
    assert kernels[4:8] == ["model", "--engine", "transformers", "--host"]
    assert kernels[-6:] == ["--port", "7", "--dtype", "float32", "--device", "cpu"]
    given = '{"hf_twell": {"density": 0.02}, "other": 1}'
    args = options_of("model", "--", "--max-model-len", "64", f"--additional-config={given}", "--enforce-eager")
    plain, kernels = (command(args, "vllm", side, 7) for side in ("dense", "sparse"))
    assert plain[:-1] == kernels[:-1]
    assert kernels[-4:-1] == ["64", "--enforce-eager", "--additional-config"]
    assert json.loads(kernels[-1]) == json.loads(given)
    assert json.loads(plain[-1]) == {"hf_twell": {"density": 0.02, "kernels": False}, "other": 1}
    assert "--additional-config" not in command(options_of("model"), "vllm", "sparse", 7)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["{absent}"], "no folder at"),
        ([str(DEMO / "model")], "is not sparse (no `twell` entry in its config); convert it: hf-twell sparsify"),
        (
            ["{sparse}", "--new-tokens", "400"],
            "--prompt-tokens 128 and 400 new tokens are more than the context of 512",
        ),
        (["{sparse}", "--prefill-tokens", "512"], "--prefill-tokens 512 and 1 new tokens"),
        (["{sparse}", "--text", "{absent}"], "absent"),
        (["{sparse}", "--text", "rows.jsonl"], "rows.jsonl holds rows, and only plain text is read here"),
        (["{sparse}", "--", "--enforce-eager"], "arguments after -- are for vLLM, and the engine is Transformers"),
    ],
)
def test_mistakes_are_told_before_a_server_starts(more, says, sparse, tmp_path, error_line):
    names = {"sparse": sparse, "absent": tmp_path / "absent"}
    model, *more = [argument.format(**names) for argument in more]
    begun = time.monotonic()
    assert says in error_line("bench", "serve", model, "--engine", "transformers", *more)
    assert time.monotonic() - begun < 8


def test_prompts_are_of_the_documents_of_packed_texts_too(sparse, tmp_path):
    words = "The cell is the smallest unit of life.\n<|endoftext|>\nA lake has ice.\n"
    (tmp_path / "plain.txt").write_text(words)
    (tmp_path / "packed.txt.xz").write_bytes(lzma.compress(words.encode()))
    plain, packed = (prompts_of(options_of(sparse, "--text", str(file))) for file in sorted(tmp_path.iterdir())[::-1])
    assert plain.words == packed.words == words.replace("<|endoftext|>", "").split()


def test_a_missing_vllm_is_told(sparse, error_line):
    pytest.importorskip("fastapi")
    if importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is installed here")
    line = error_line("bench", "serve", sparse, "--engine", "vllm")
    assert f"--engine vllm, but vLLM is not installed: {how_to_install('vllm')}" in line


@pytest.mark.slow
def test_the_command(sparse, tmp_path, capsys):
    """Both sides as processes, twice; their rows, their figure, their table."""
    pytest.importorskip("fastapi")
    options = [*SMALL, "--engine", "transformers", "--device", "cpu", "--concurrency", "1", "2", "--rounds", "2"]
    assert main(["bench", "serve", str(sparse), *options, "--json", "--output", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)["rows"]
    settings = [(row["round"], row["side"], row["measured"], row["concurrency"]) for row in rows]
    kinds = [("decode", 1), ("decode", 2), ("prefill", 4)]
    assert settings == [(number, side, *kind) for number in (1, 2) for side in ("dense", "sparse") for kind in kinds]
    assert [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()] == rows
    assert (tmp_path / "serve.png").stat().st_size > 1000
    wanted = {"engine_version", "density", "dtype", "computes", "processor", "threads", "torch", "commit", "options"}
    for row in rows:
        assert wanted <= row.keys()
        assert (row["bench"], row["engine"], row["model"]) == ("serve", "transformers", str(sparse))
        assert row["dtype"] == "float32"
        assert (row["density"], row["unions"]) == (pytest.approx(0.03), {"64": 0.15})
        for figure in ("tokens_per_s", "ttft_ms", "request_ms", *(["tpot_ms"] if row["measured"] == "decode" else [])):
            assert 0 < row[figure]["min"] <= row[figure]["median"] <= row[figure]["max"]
            assert len(row[figure]["turns"]) == 2
        assert row["prompt_tokens"] - 1 <= row["prompt_tokens_read"] <= row["prompt_tokens"]
        assert row["new_tokens_written"] == row["new_tokens"]
        assert (row["side"], row["kernels"]) in (("dense", False), ("sparse", True), ("sparse", False))
    assert all(row["same_tokens"] == row["checked_tokens"] > 0 for row in rows[3:])
    for phase in ("starting dense", "checking sparse", "timing sparse, decode", "stopping sparse"):
        assert phase in captured.err
    assert "dense server, transformers: its 4 blocks decode by plain matmuls, as asked" in captured.err
    assert captured.err.count("its greedy answers agree in") == 3


@pytest.mark.slow
def test_a_server_that_cannot_start_is_told(sparse, tmp_path):
    """What `hf-twell serve` says is passed on; of others, the last lines are shown."""
    told, ways = [], []
    for way in (["serve", str(sparse), "--engine", "transformers", "--backend", "none"], ["doctor", "--json"]):
        log = tmp_path / "log"
        with (
            pytest.raises(ValueError) as failure,
            serving("sparse", [*COMMAND, *way], free_port(), log, tell=told.append),
        ):
            pass
        ways.append(str(failure.value))
    assert ways[0].startswith("the sparse server: ")
    assert "none" in ways[0]
    assert "ended (exit code 0) while it started; above are its last lines" in ways[1]
    assert told[-1] == "  }"


@pytest.mark.slow
def test_a_server_that_dies_while_it_answers_is_told(sparse, tmp_path):
    pytest.importorskip("fastapi")
    told, port = [], free_port()
    arguments = command(options_of(sparse, "--device", "cpu"), "transformers", "sparse", port)
    with serving("sparse", arguments, port, tmp_path / "log", tell=told.append) as server:
        with pytest.raises(ValueError, match=r"the server did not answer a request: .*prompt has 7\d\d tokens"):
            Side("sparse", "transformers", server).ask(["The cell " * 360], 4)
        killing = threading.Timer(0.3, server.process.kill)
        killing.start()
        with pytest.raises(ValueError, match=r"the sparse server ended \(exit code -9\) while it answered; above are"):
            Side("sparse", "transformers", server).ask(["The cell is"], 400)
        with pytest.raises(ValueError, match="while it answered"):
            Side("sparse", "transformers", server).ask(["The cell is"], 4)
        killing.join()
    assert any("is sparse: its 4 blocks decode by" in line for line in told)


@pytest.mark.slow
def test_ctrl_c_stops_the_server_and_shows_what_was_measured(sparse, tmp_path):
    pytest.importorskip("fastapi")
    options = [*SMALL, "--engine", "transformers", "--device", "cpu", "--concurrency", "1", "--repeats", "60"]
    arguments = ("bench", "serve", sparse, *options, "--output", tmp_path, "--json")
    process = started(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    rows, children = tmp_path / "bench.jsonl", Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        while not (rows.exists() and rows.read_text().count("\n")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        servers = [int(child) for child in children.read_text().split()]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert json.loads(out)["rows"][0]["side"] == "dense"
    assert "Traceback" not in err
    assert err.strip().splitlines()[-1] == "hf-twell: interrupted"
    assert servers
    assert not any(Path(f"/proc/{server}").exists() for server in servers)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@needs_vllm
def test_vllm_serves_both_sides(sparse, tmp_path):
    options = [*SMALL, "--engine", "vllm", "--concurrency", "1", "2", "--dtype", "float32", "--json"]
    options += ["--", "--max-model-len", "64", "--enforce-eager"]
    env = environment(tmp_path, PYTHONPATH=str(ROOT))
    done = finished(PYTHON, "-m", "hf_twell", "bench", "serve", sparse, *options, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout)["rows"]
    assert [(row["side"], row["kernels"]) for row in rows] == [("dense", False)] * 3 + [("sparse", True)] * 3
    assert all(row["engine_version"].startswith("0.") and row["device"] == "cpu" for row in rows)
    assert "additional_config turns the kernels off" in rows[0]["computes"]
    assert rows[-1]["same_tokens"] == rows[-1]["checked_tokens"] > 0
    assert all(row["new_tokens_written"] == row["new_tokens"] for row in rows)
