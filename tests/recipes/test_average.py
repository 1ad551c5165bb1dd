"""recipes/average.py: the mean of two models that load alike, and what it refuses."""

import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from hf_twell.cli import main as hf_twell_main
from hf_twell.models.loading import load_model
from tests.conftest import tiny_llama
from tests.forks import forks
from tests.paths import ROOT

RECIPES = ROOT / "recipes"


@pytest.fixture
def parent(tmp_path) -> Path:
    """A random Llama with 3 layers and a tokenizer."""
    train_tokenizer = runpy.run_path(str(RECIPES / "pretrain.py"))["train_tokenizer"]
    tokenizer = train_tokenizer([(RECIPES / "demo/text/heldout.txt").read_text()], 400, 128)
    tiny_llama(vocab_size=400, tie_word_embeddings=True).save_pretrained(tmp_path / "parent")
    tokenizer.save_pretrained(tmp_path / "parent")
    return tmp_path / "parent"


def test_the_mean_of_two_models(parent, tmp_path):
    script = runpy.run_path(str(RECIPES / "average.py"))
    average, main = script["average"], script["main"]
    other = tiny_llama(vocab_size=400, tie_word_embeddings=True)
    for weight in other.parameters():
        weight.data.mul_(3)
    other.save_pretrained(tmp_path / "other")
    shutil.copy(parent / "tokenizer.json", tmp_path / "other")
    main([str(tmp_path / "other"), str(parent), str(tmp_path / "mean"), "--share", "0.25"])
    saved, _ = load_model(tmp_path / "mean", device="cpu")
    first, _ = load_model(parent, device="cpu")
    for weight, mean in zip(first.parameters(), saved.parameters(), strict=True):
        torch.testing.assert_close(mean, 2.5 * weight)
    tiny_llama(vocab_size=400, num_hidden_layers=2).save_pretrained(tmp_path / "small")
    shutil.copy(parent / "tokenizer.json", tmp_path / "small")
    tiny_llama(vocab_size=400, hidden_act="gelu").save_pretrained(tmp_path / "gelu")
    shutil.copy(parent / "tokenizer.json", tmp_path / "gelu")
    assert hf_twell_main(["sparsify", str(parent), str(tmp_path / "sparse")]) == 0
    for arguments, message in (
        ((tmp_path / "small", parent), "are unlike models: .* differ; average two alike"),
        ((tmp_path / "gelu", parent), "gelu computes gelu, .*parent silu; give two models with the same activation"),
        ((tmp_path / "sparse", parent), "sparse is sparse .* give dense models, and convert the mean"),
        ((parent, tmp_path / "sparse"), "sparse is sparse .* give dense models, and convert the mean"),
        ((parent, parent, 2.0), "share=2.0; give the parent's share, from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            average(*arguments)


@pytest.mark.slow
def test_the_mean_is_refused_in_one_line(parent, tmp_path):
    """And an existing folder is replaced where that is asked for, as its message says."""
    script = str(RECIPES / "average.py")
    environment = {**os.environ, "PYTHONPATH": str(RECIPES.parent), "HF_HUB_OFFLINE": "1"}
    with forks(tmp_path, environment) as run:

        def average(*arguments) -> subprocess.CompletedProcess:
            argv = [script, *map(str, arguments)]
            code = f"import runpy, sys; sys.argv = {argv!r}; runpy.run_path({script!r}, run_name='__main__')"
            return run(code, tmp_path)

        for arguments, message in (
            ((parent, parent, parent), r"parent exists; .* \(--overwrite\)"),
            ((tmp_path / "absent", parent, tmp_path / "mean"), "cannot load a model from .*absent"),
            ((parent, parent, tmp_path / "mean", "--share", "2"), "share=2.0; give the parent's share, from 0 to 1"),
        ):
            done = average(*arguments)
            assert done.returncode == 1
            assert re.match(f"average.py: error: .*{message}", done.stderr.splitlines()[-1])
            assert "Traceback" not in done.stderr
        shutil.copytree(parent, tmp_path / "mean")
        done = average(parent, parent, tmp_path / "mean", "--overwrite")
        assert done.returncode == 0, done.stderr
        load_model(tmp_path / "mean", device="cpu")
        done = average(parent, parent, parent, "--overwrite")
        assert done.returncode == 1
        assert "is the model itself" in done.stderr.splitlines()[-1]
