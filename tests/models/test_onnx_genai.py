"""A sparse checkpoint in ONNX Runtime GenAI, whose own builder exports it: standard operators, computed densely."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_twell import sparsify
from tests.conftest import ids, tiny_llama

PACKAGES = Path(sys.prefix, "onnx")  # a folder of packages, which `make environments` makes
EXPORT_AND_GENERATE = """
import json, runpy, sys

prompt = json.loads(sys.argv[1])
sys.argv[1:] = "-i sparse -o exported -p fp32 -e cpu -c cache".split()
runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")

import onnxruntime_genai as genai

model = genai.Model("exported")
options = genai.GeneratorParams(model)
options.set_search_options(max_length=len(prompt) + 8)
generator = genai.Generator(model, options)
generator.append_tokens(prompt)
logits = generator.get_output("logits")[0].tolist()
while not generator.is_done():
    generator.generate_next_token()
print(json.dumps([logits, generator.get_sequence(0).tolist()]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not PACKAGES.is_dir(), reason="no ONNX Runtime GenAI; `make environments` installs it")
def test_the_exported_model_is_that_of_transformers(tmp_path):
    model = tiny_llama(head_dim=16, eos_token_id=None)  # the engine takes heads of multiples of 16
    sparsify(model).save_pretrained(tmp_path / "sparse")
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(tmp_path / "sparse")
    prompt = ids()[:1]
    command = [sys.executable, "-c", EXPORT_AND_GENERATE, json.dumps(prompt[0].tolist())]
    environment = {"PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    logits, tokens = json.loads(done.stdout.splitlines()[-1])

    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "sparse")
    assert type(stock.model.layers[0].mlp.act_fn) is torch.nn.ReLU
    torch.testing.assert_close(torch.tensor([logits]), stock(prompt).logits.detach(), atol=1e-4, rtol=0)
    assert tokens == stock.generate(prompt, max_new_tokens=8, do_sample=False)[0].tolist()
