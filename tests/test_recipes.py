"""Recipes on real models: the really trained 260K Llama becomes sparse, and the demo runs from end to end."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_twell
from hf_twell.cli import main
from hf_twell.text import read_documents
from tests.conftest import shared_path

ROOT = Path(__file__).parents[1]
PLAIN_TRANSFORMERS = """
import sys, torch
sys.modules["hf_twell"] = None  # importing it would fail
from transformers import AutoModelForCausalLM
with torch.no_grad():
    torch.save(AutoModelForCausalLM.from_pretrained(sys.argv[1])(torch.load(sys.argv[2])).logits, sys.argv[3])
"""


def test_a_trained_llama_becomes_sparse_and_comes_back_from_disk(stories, tmp_path, capsys):
    """Dense to less than half the L0 of the swap in 50 steps, at most 0.5 nats above the same steps without L1."""
    documents = read_documents(shared_path("data/text/tinystories.txt.xz"))
    (tmp_path / "heldout.txt").write_text("\n<|endoftext|>\n".join(documents[::20]))
    (tmp_path / "train.txt").write_text("\n<|endoftext|>\n".join(d for i, d in enumerate(documents) if i % 20))
    (tmp_path / "recipe.yaml").write_text(
        f"model: {stories}\noutput_dir: out\ntrain: train.txt\nheldout: heldout.txt\nsequence_length: 128\n"
        "warmup_steps: 10\ntraining: {max_steps: 50, per_device_train_batch_size: 32, per_device_eval_batch_size: 32, "
        "learning_rate: 5e-3, lr_scheduler_type: cosine, warmup_steps: 5, save_strategy: 'no', use_cpu: true}\n"
    )
    results = {}
    for weight in (0.0, 0.1):
        changes = [f"l1_weight={weight}", f"output_dir={tmp_path / str(weight)}", "--json"]
        assert main(["train", str(tmp_path / "recipe.yaml"), *changes]) == 0
        results[weight] = json.loads(capsys.readouterr().out)
    swapped, control, sparse = results[0.1]["before"], results[0.0]["after"], results[0.1]["after"]
    assert swapped["sparsity"]["l0"] == pytest.approx(85, abs=3), "about half of 172 neurons after a bare swap"
    assert sparse["sparsity"]["l0"] < swapped["sparsity"]["l0"] / 2
    assert sparse["loss"] <= control["loss"] + 0.5
    assert control["loss"] < swapped["loss"]

    folder = results[0.1]["model"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(documents[0], return_tensors="pt")["input_ids"]
    torch.save(ids, tmp_path / "ids.pt")
    command = [sys.executable, "-c", PLAIN_TRANSFORMERS, folder, tmp_path / "ids.pt", tmp_path / "logits.pt"]
    subprocess.run(command, check=True, cwd=tmp_path)
    model = hf_twell.sparsify(AutoModelForCausalLM.from_pretrained(folder), backend="reference")
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "logits.pt"), model(ids).logits)


def test_the_demo_runs_from_end_to_end(tmp_path):
    output, heldout = tmp_path / "demo", tmp_path / "heldout.txt"
    heldout.write_text((ROOT / "recipes" / "demo" / "text" / "heldout.txt").read_text()[:20_000])
    changes = [
        f"heldout={heldout}",
        "training.max_steps=2",
        "training.per_device_train_batch_size=2",
        "training.use_cpu=true",
    ]
    done = subprocess.run(
        [sys.executable, ROOT / "recipes" / "demo.py", f"output_dir={output}", *changes],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for row in ("dense (SiLU)", "bare ReLU swap", "fine-tuned with the L1 term", "without the L1 term"):
        assert re.search(rf"{re.escape(row)} +\d\.\d+ +\d", done.stdout), row
    assert "equal logits, to the last bit" in done.stdout
    assert (output / "training.png").stat().st_size > 5000
