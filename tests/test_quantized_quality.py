"""recipes/quantized_quality.py: rows of a tiny model, dense and sparse, with tasks by lm-eval."""

import json

import pytest
import torch

from hf_twell import sparsify
from tests.conftest import needs_lm_eval, tiny_llama
from tests.test_pretrained_study import eval_dir, scripts  # noqa: F401

pytest.importorskip("torchao.quantization")
pytestmark = [pytest.mark.slow, needs_lm_eval]


@pytest.mark.parametrize("sparse", [False, True])
def test_rows_of_each_kind_of_weights(sparse, scripts, eval_dir, tmp_path):  # noqa: F811
    tokenizer = scripts("pretrain")["train_tokenizer"](["some words, and more of them. " * 200], 300, 128)
    torch.manual_seed(0)
    model = tiny_llama(vocab_size=300, hidden_size=64, intermediate_size=128)
    model.model.embed_tokens.weight.data[0] = 0.1  # of padding: torchao's dynamic fp8 would make NaN of zeros
    if sparse:
        model = sparsify(model)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    study = tmp_path / "study"
    study.mkdir()
    sequences = torch.randint(0, 300, (3, 64), dtype=torch.int32)
    torch.save({"train": sequences, "texts": {"books": sequences}}, study / "text.pt")
    eval_dir.rename(study / "eval")
    main = scripts("quantized_quality")["main"]
    kinds = ["bf16", "int8", "fp8", "fp8-dynamic"]
    options = ["--study", str(study), "--limit", "2", "--rows", str(tmp_path / "rows.jsonl")]
    rows = main([str(tmp_path / "model"), *options, "--weights", *kinds])
    assert [row["weights"] for row in rows] == kinds
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == rows
    plain, *quantized = (row["losses"]["books"] for row in rows)
    assert all(loss != plain and abs(loss / plain - 1) < 0.02 for loss in quantized), "other weights, nearly the same"
    assert all(set(row["tasks"]) == {"lambada", "arc_easy", "arc_challenge", "hellaswag"} for row in rows)
