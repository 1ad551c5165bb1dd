"""Commands on vLLM with the plugin: its OpenAI server, and lm-eval."""

import contextlib
import json
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_twell
from tests.conftest import needs_lm_eval
from tests.evaluation.test_evaluation import ARC_ROWS, LM_EVAL_TASK, arc_row, write_rows
from tests.paths import ROOT
from tests.vllm_engines import PYTHON, TIMEOUT_S, environment, expected, needs_vllm, save

DEMO = ROOT / "recipes" / "demo" / "model"
PROMPT = "The cell is the smallest unit of life"
LINE = "hf_twell: 4 of 4 feed-forward blocks use the sparse kernels"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S), needs_vllm]


@pytest.fixture
def checkpoint(tmp_path) -> str:
    """The demo model with ReLU in place of SiLU, and its tokenizer."""
    path = save(AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32"), tmp_path / "model")
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(path)
    return path


@contextlib.contextmanager
def server(folder, model: str):
    """The address of vLLM's server of the model; it writes into `folder`/log.txt."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not `vllm serve`: the build for CPUs lacks what that asks for, the metadata of a package named vllm.
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "float32"]
    command += ["--max-model-len", "256", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port)]
    env = environment(folder, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{port}"
        end = time.monotonic() + TIMEOUT_S / 2
        while True:
            assert process.poll() is None, (folder / "log.txt").read_text()[-3000:]
            assert time.monotonic() < end, (folder / "log.txt").read_text()[-3000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=10)
                break
            time.sleep(1)
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def post(address: str, body: dict) -> dict:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def test_the_openai_server(checkpoint, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32").eval()
    (tokens,) = expected(model, [tokenizer(PROMPT)["input_ids"]], new_tokens=16)["tokens"]
    with server(tmp_path, checkpoint) as address:
        body = {"model": checkpoint, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
        answer = post(f"{address}/v1/completions", body)
    assert answer["choices"][0]["text"] == tokenizer.decode(tokens)
    assert LINE in (tmp_path / "log.txt").read_text()


@needs_lm_eval
def test_lm_eval_scores_the_sparse_model(checkpoint, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    write_rows(data / "ARC-Easy-Test.jsonl", [arc_row(*row) for row in ARC_ROWS])
    find = "import lm_eval.tasks; print(lm_eval.tasks.__file__)"
    tasks = Path(subprocess.run([str(PYTHON), "-c", find], capture_output=True, text=True, check=True).stdout).parent
    text = LM_EVAL_TASK.format(
        stock=tasks / "arc" / "arc_easy.yaml", name="arc_easy", file=data / "ARC-Easy-Test.jsonl"
    )
    (tmp_path / "arc_easy.yaml").write_text(text)
    # The build for CPUs lacks the metadata of a package named vllm, which lm-eval asks for.
    metadata = tmp_path / "site" / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    command = [str(PYTHON), "-m", "lm_eval", "--model", "vllm", "--include_path", str(tmp_path)]
    command += ["--model_args", f"pretrained={checkpoint},dtype=float32,max_model_len=256,enforce_eager=True"]
    command += ["--tasks", "arc_easy_local", "--log_samples", "--output_path", str(tmp_path / "out")]
    env = environment(tmp_path, PYTHONPATH=str(metadata.parents[1]), HF_HOME=str(tmp_path / "hf"))
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert LINE in done.stdout + done.stderr

    ours = hf_twell.evaluate(
        checkpoint, tasks=["arc_easy"], data_dir=data, dtype="float32", device="cpu", log_samples=True
    )["tasks"]["arc_easy"]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    theirs = json.loads(results.read_text())["results"]["arc_easy_local"]
    for metric, score in ours["metrics"].items():
        assert score == {"value": theirs[f"{metric},none"], "stderr": theirs[f"{metric}_stderr,none"]}
    (log,) = (tmp_path / "out").rglob("samples_*.jsonl")
    rows = sorted((json.loads(line) for line in log.read_text().splitlines()), key=lambda row: row["doc_id"])
    for sample, row in zip(ours["samples"], rows, strict=True):
        scores = [[response[0] for response in each] for each in (sample["responses"], row["filtered_resps"])]
        assert [float(score) for score in scores[1]] == pytest.approx(scores[0], abs=1e-3)
