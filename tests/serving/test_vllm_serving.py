"""lm-eval on vLLM with the plugin."""

import json
import subprocess
from pathlib import Path

import pytest

import hf_twell
from tests.conftest import needs_lm_eval
from tests.evaluation.test_evaluation import ARC_ROWS, LM_EVAL_TASK, arc_row, write_rows
from tests.vllm_engines import PYTHON, TIMEOUT_S, environment, needs_vllm, save_demo

LINE = "hf_twell: 4 of 4 feed-forward blocks use the sparse kernels"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S), needs_vllm]


@needs_lm_eval
def test_lm_eval_scores_the_sparse_model(tmp_path):
    checkpoint = save_demo(tmp_path / "model")
    data = tmp_path / "data"
    data.mkdir()
    write_rows(data / "ARC-Easy-Test.jsonl", [arc_row(*row) for row in ARC_ROWS])
    find = "import lm_eval.tasks; print(lm_eval.tasks.__file__)"
    tasks = Path(subprocess.run([str(PYTHON), "-c", find], capture_output=True, text=True, check=True).stdout).parent
    files = f"validation: {data / 'ARC-Easy-Test.jsonl'}"
    stock = tasks / "arc" / "arc_easy.yaml"
    text = LM_EVAL_TASK.format(stock=stock, name="arc_easy", files=files, test="null", shots=0)
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
