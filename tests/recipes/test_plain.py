"""recipes/study/plain.py: a sparse model is fine-tuned without the callback, scored, and not trained again."""

import importlib.util
import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_twell import measure_sparsity, sparsify
from hf_twell.recipe.packing import PackedText
from tests.conftest import needs_lm_eval
from tests.paths import HELDOUT, MODEL, ROOT

KEYS = {
    "run", "mode", "parent", "tokens", "learning_rate", "losses", "heldout_tokens", "density", "union", "layers",
    "told", "tasks", "warnings", "limit", "minutes", "environment",
}  # fmt: skip


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes" / "study"))
    import plain

    yield plain
    for name in ("plain", "study"):
        sys.modules.pop(name, None)


@pytest.fixture
def sparse(tmp_path, tokenizer):
    """The first layer of the demo model with ReLU, measured as conversions are."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, num_hidden_layers=1)
    measure_sparsity(sparsify(model), [torch.arange(3, 135)[None]])
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "sparse")
    return tmp_path / "sparse"


def command_of(model, folder, *more) -> list[str]:
    documents = HELDOUT.read_text().split("<|endoftext|>\n")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents[:4]))
    (folder / "heldout.txt").write_text(documents[4])
    (folder / "lambada_openai-test.jsonl").write_text(json.dumps({"text": "The cat sat on the mat"}) + "\n")
    paths = {"text": folder / "text.jsonl", "heldout": folder / "heldout.txt", "eval": folder, "output": folder / "out"}
    sizes = ["--tokens=500", "--length=128", "--batch=2", "--learning-rate=1e-3"]
    return [str(model), *(f"--{key}={path}" for key, path in paths.items()), *sizes, *more]


@needs_lm_eval
@pytest.mark.usefixtures("one_thread")
def test_each_mode_is_a_row_and_made_once(plain, sparse, tmp_path):
    modes = ["untouched", "full", *(["lora"] if importlib.util.find_spec("peft") else [])]
    command = command_of(sparse, tmp_path, "--tasks", "lambada_openai", "--modes", *modes)
    plain.main(command)
    text = (tmp_path / "out" / "rows.jsonl").read_text()
    rows = {row["mode"]: row for row in map(json.loads, text.splitlines())}
    assert list(rows) == modes
    before = AutoModelForCausalLM.from_pretrained(sparse)
    for mode, row in rows.items():
        assert row.keys() == KEYS
        assert row["tokens"] == (0 if mode == "untouched" else 512)
        assert 0 < row["density"] < row["union"]["16"] <= row["union"]["64"] <= row["union"]["128"] <= 1
        assert row["losses"]["heldout"] > 0
        assert "acc" in row["tasks"]["lambada_openai"]
        if mode == "untouched":
            continue
        after = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / row["run"])
        assert (after.config.hidden_act, after.dtype) == ("relu", before.dtype)
        assert before.state_dict().keys() == after.state_dict().keys(), "merged, where it was adapters"
        for name in ("self_attn.q_proj", "mlp.gate_proj"):
            weights = [model.get_submodule(f"model.layers.0.{name}").weight for model in (before, after)]
            assert not torch.equal(*weights)
        of_text = PackedText(plain.load_model(sparse)[1], [str(tmp_path / "heldout.txt")], 128).sequences.split(2)
        assert row["density"] == pytest.approx(measure_sparsity(after, of_text)["density"])
        assert row["density"] != rows["untouched"]["density"]
    plain.main(command)
    assert (tmp_path / "out" / "rows.jsonl").read_text() == text


@pytest.mark.parametrize("mode", ["untouched", "full"])
def test_a_dense_model_is_refused(mode, plain, tmp_path):
    with pytest.raises(ValueError, match="model is not sparse: its config has no twell entry; convert it first"):
        plain.main(command_of(MODEL, tmp_path, "--tasks", "--modes", mode))
