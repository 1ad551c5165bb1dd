"""The packages themselves that `test_compatibility.py` acts out: each test runs where its package is installed.

pip install --no-deps bitsandbytes torchao sentence-transformers
pip install --no-deps liger-kernel triton    # its kernels need a GPU, its patches do not
"""

import copy
import logging

import numpy
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TorchAoConfig
from transformers.models.llama import modeling_llama

from hf_twell import L1Penalty, TwellLlamaForCausalLM, load_adapter, save_adapter, sparsify
from hf_twell.blocks.modeling import sparse_ffns
from tests.blocks.test_compatibility import RUNS, refused
from tests.conftest import ids, logits, relu_llama, tiny_llama
from tests.paths import MODEL

SIZES = {"hidden_size": 64, "intermediate_size": 128}  # 4-bit weights come in blocks of 64


@pytest.fixture(params=["8-bit", "4-bit"])
def quantized(request):
    pytest.importorskip("bitsandbytes")
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    bits = {"8-bit": {"load_in_8bit": True}, "4-bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
    return {"quantization_config": BitsAndBytesConfig(**bits[request.param]), "device_map": "cpu"}


def test_bitsandbytes(quantized, tmp_path):
    """Quantized before: refused. The result quantized: exact, through its own linears."""
    tiny_llama(**SIZES).save_pretrained(tmp_path / "dense")
    sparsify(tiny_llama(**SIZES)).save_pretrained(tmp_path / "sparse")
    refused(AutoModelForCausalLM.from_pretrained(tmp_path / "dense", **quantized), "is quantized")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "sparse", **quantized)
    model = TwellLlamaForCausalLM.from_pretrained(tmp_path / "sparse", **quantized)
    assert type(model.model.layers[0].mlp.up_proj).__module__.startswith("bitsandbytes")
    assert len(sparse_ffns(model)) == 3
    assert torch.equal(logits(model), logits(stock))
    assert not torch.equal(logits(model), logits(sparsify(tiny_llama(**SIZES).eval(), backend="reference")))


def test_lora_on_bitsandbytes(quantized, tmp_path):
    """QLoRA with the L1 term, against plain autograd on the stock model; saved, and loaded onto such a base."""
    peft = pytest.importorskip("peft")
    sparsify(tiny_llama(**SIZES)).save_pretrained(tmp_path / "sparse")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "gate_proj", "down_proj"])
    models = []
    for cls in (TwellLlamaForCausalLM, AutoModelForCausalLM):
        torch.manual_seed(0)
        base = cls.from_pretrained(tmp_path / "sparse", **quantized)
        models.append(peft.get_peft_model(base, copy.deepcopy(config)).train())
    model, stock = models
    batch = {"input_ids": ids(), "labels": ids()}
    for each in L1Penalty(model, l1_weight=0.5).micro_batches([batch]):
        model(**each).loss.backward()
    terms = []
    for layer in stock.base_model.model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: terms.append(args[0].abs().sum(-1).mean()))
    loss = stock(**batch).loss
    (loss + 0.5 * sum(terms) / len(terms)).backward()
    for (name, mine), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-3, msg=name)
    save_adapter(model, tmp_path / "adapter")
    base = TwellLlamaForCausalLM.from_pretrained(tmp_path / "sparse", **quantized)
    assert torch.equal(logits(load_adapter(tmp_path / "adapter", base)), logits(model.eval()))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "sparse", **quantized)
    assert torch.equal(logits(load_adapter(tmp_path / "adapter", base)), logits(model))


def test_torchao(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    method = quantization.Int8WeightOnlyConfig()
    model, twin = sparsify(tiny_llama().eval()), relu_llama()
    logits(model)
    for each in (model, twin):
        quantization.quantize_(each, method)
    assert torch.equal(logits(model), logits(twin))
    assert not torch.equal(logits(twin), logits(relu_llama()))
    tiny_llama().save_pretrained(tmp_path / "dense")
    sparsify(tiny_llama()).save_pretrained(tmp_path / "sparse")
    options = {"quantization_config": TorchAoConfig(method)}
    refused(AutoModelForCausalLM.from_pretrained(tmp_path / "dense", **options), "is quantized")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "sparse", **options)
    stock.save_pretrained(tmp_path / "quantized")
    for folder in ("sparse", "dense", "quantized"):
        again = TwellLlamaForCausalLM.from_pretrained(tmp_path / folder, **({} if folder == "quantized" else options))
        assert type(again.model.layers[0].mlp.up_proj.weight).__name__ == "Int8Tensor"
        assert len(sparse_ffns(again)) == 3
        assert torch.equal(logits(again), logits(stock))
    assert torch.equal(logits(sparsify(stock)), logits(again))


@pytest.fixture
def liger(monkeypatch):
    pytest.importorskip("triton")
    patches = pytest.importorskip("liger_kernel.transformers")
    for name in ("LlamaMLP", "LlamaRMSNorm", "apply_rotary_pos_emb"):  # Liger replaces them for the whole process
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    none = {"rope": False, "rms_norm": False, "cross_entropy": False, "fused_linear_cross_entropy": False}
    return lambda model=None, **chosen: patches.apply_liger_kernel_to_llama(model=model, **{**none, **chosen})


def test_ligers_swiglu(liger, monkeypatch):
    """With its kernel or, on a CPU, with what that computes."""
    model, after = tiny_llama(), sparsify(tiny_llama())
    liger(model, swiglu=True)
    refused(model, "has its forward replaced on the instance (by accelerate's offloading, Liger")
    liger(after, swiglu=True)
    if not torch.cuda.is_available():
        silu = lambda gate, up, *_: torch.nn.functional.silu(gate) * up  # noqa: E731
        monkeypatch.setattr("liger_kernel.transformers.swiglu.LigerSiLUMulFunction.apply", silu)
    for run in RUNS.values():
        with pytest.raises(ValueError, match=r"liger_kernel_config={'swiglu': False}"):
            run(after)
    liger(swiglu=True)
    refused(tiny_llama(), "apply Liger with swiglu=False")


def test_ligers_other_patches_are_taken(liger):
    model = tiny_llama()
    liger(model, swiglu=False, rms_norm=True, rope=True, fused_linear_cross_entropy=True)
    assert "forward" in vars(model.model.norm)
    assert len(sparse_ffns(sparsify(model))) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("when", ["before", "after"])
def test_ligers_other_patches_are_exact(liger, when):
    model, twin = tiny_llama().cuda(), relu_llama().cuda().train()
    if when == "after":
        sparsify(model, backend="reference")
    for each in (model, twin):
        liger(each, swiglu=False, rms_norm=True, rope=True, fused_linear_cross_entropy=True)
    sparsify(model, backend="reference")
    batch = {"input_ids": ids().cuda(), "labels": ids().cuda()}
    losses = [each(**batch).loss for each in (model, twin)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)


@pytest.fixture
def sentence_model(tmp_path):
    """Makes a SentenceTransformer of the demo model, with the activation that is asked for."""
    st = pytest.importorskip("sentence_transformers")

    def make(act):
        folder = tmp_path / act
        AutoModel.from_pretrained(MODEL, dtype="float32", hidden_act=act).save_pretrained(folder)
        AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
        return st.SentenceTransformer(str(folder), device="cpu")  # with the mean over tokens

    return make


TEXTS = ["The cell is the smallest unit of life.", "Once upon a time there was a king.", "A"]


def test_sentence_transformers(sentence_model, tmp_path):
    model, twin = sentence_model("silu"), sentence_model("relu")
    before = model.encode(TEXTS)
    sparsify(model[0].auto_model)
    numpy.testing.assert_allclose(model.encode(TEXTS), twin.encode(TEXTS), rtol=1e-4, atol=1e-5)
    assert abs(before - twin.encode(TEXTS)).max() > 1e-2
    model.save(str(tmp_path / "saved"))
    again = type(model)(str(tmp_path / "saved"), device="cpu")
    assert len(sparse_ffns(sparsify(again[0].auto_model))) == 4
    numpy.testing.assert_allclose(again.encode(TEXTS), twin.encode(TEXTS), rtol=1e-4, atol=1e-5)
