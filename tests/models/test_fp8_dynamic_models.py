"""Models of torchao's dynamic fp8: which blocks kernels would take, and that everything else is as torchao computes it.

No CPU kernel reads e4m3. Where a test says so, plain PyTorch stands in for a GPU's kernels.
"""

import copy
import json
import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, TorchAoConfig

from hf_twell import sparsify, unpatch
from hf_twell.blocks import calls, operands
from hf_twell.blocks.calls import takes_kernels
from hf_twell.blocks.modeling import sparse_ffns
from hf_twell.dispatch import key, limits
from hf_twell.models.quantizing import make_dynamic, quantize, quantize_block, torchao_config
from hf_twell.ops import api, build, reference
from tests.conftest import ids, tiny_llama
from tests.ffn_cases import relative_rms
from tests.models.test_int8_models import few_active, kernel_calls  # noqa: F401

quantization = pytest.importorskip("torchao.quantization")
pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(not build.status("cpu", build=True).available, reason=build.status("cpu", build=True).reason),
]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
MANY = 40  # tokens of each of two sequences: more than 64 in a call


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A sparse model in bfloat16, about 5 % of whose neurons are active."""
    path = tmp_path_factory.mktemp("dynamic") / "sparse"
    model = few_active(tiny_llama(hidden_size=64, intermediate_size=304))
    sparsify(model.bfloat16()).save_pretrained(path)
    return path


def load(folder, dynamic=PROJECTIONS):
    """Its blocks in e4m3, x quantized for the projections of these names; torchao's own config names all of them."""
    config = TorchAoConfig(torchao_config("fp8"), modules_to_not_convert=["lm_head", ".*self_attn.*"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16", quantization_config=config).eval()
    for layer in model.model.layers:
        for name in dynamic:
            make_dynamic(getattr(layer.mlp, name).weight)
    return model


@pytest.fixture
def gpu(monkeypatch):
    """As on a GPU; plain PyTorch stands in for its kernels. Call it with a compute capability."""

    def of(capability):
        monkeypatch.setitem(operands._READ, "Float8Tensor", (torch.float8_e4m3fn, ("cpu",)))
        monkeypatch.setattr(api, "_kernels_take", lambda *args, **options: False)
        monkeypatch.setattr(calls, "repeat", lambda block, x: None)
        monkeypatch.setattr(key, "device_class", lambda kind, index=None: ("cuda", capability))
        monkeypatch.setitem(limits.read(), "kCudaLimits", ((math.inf, 1.0, 1.0, 1.0),))  # at every density

    return of


@torch.no_grad()
def logits(model, length=MANY):
    return model(input_ids=ids(length)).logits


def test_what_is_made_of_a_weight_is_torchaos(monkeypatch):
    """Also where torchao itself refuses to make it, because it finds no GPU that computes it."""
    monkeypatch.setattr("torchao.quantization.quant_api._check_hardware_support", lambda granularity: None)
    theirs, ours = (nn.Linear(64, 48).bfloat16() for _ in range(2))
    ours.load_state_dict(theirs.state_dict())
    quantization.quantize_(theirs, torchao_config("fp8-dynamic"))
    quantization.quantize_(ours, torchao_config("fp8"))
    make_dynamic(ours.weight)
    assert torch.equal(ours.weight.qdata.view(torch.int8), theirs.weight.qdata.view(torch.int8))
    assert torch.equal(ours.weight.scale, theirs.weight.scale)
    for name in ("block_size", "mm_config", "act_quant_kwargs", "kernel_preference", "dtype"):
        assert getattr(ours.weight, name) == getattr(theirs.weight, name), name
    x = torch.randn(70, 64).bfloat16()
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("dynamic", [PROJECTIONS, PROJECTIONS[:2]])
def test_kernels_take_blocks(folder, gpu, kernel_calls, caplog, dynamic):  # noqa: F811
    """x is quantized in calls of more than 64 tokens, and h never."""
    gpu("9.0")
    model, plain = sparsify(load(folder, dynamic)), sparsify(load(folder, ()))
    few = logits(model, 11)
    assert kernel_calls == [0, 1, 2]
    assert torch.equal(few, logits(plain, 11)), "x stays as it is"
    many = logits(model)
    assert not torch.equal(many, logits(plain))
    for ffn in sparse_ffns(model):
        held = {name: getattr(ffn, name).weight for name in PROJECTIONS}
        values = [held[name].qdata for name in ("up_proj", "down_proj", "gate_proj")]
        scales = {f"s_{name.removesuffix('_proj')}": weight.scale for name, weight in held.items()}
        x = torch.randn(2, MANY, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        with torch.no_grad():
            assert torch.equal(ffn(x), reference.ffn(x, *values, **scales, quantize_x=True))
        assert held["down_proj"].qdata.stride() == (1, 64)
        assert takes_kernels(ffn, x)
    assert torch.equal(logits(copy.deepcopy(model)), many)
    assert relative_rms(many, logits(plain)) < 0.1
    assert not [record for record in caplog.records if record.name.startswith("hf_twell")]


def test_on_gpus_without_kernels_that_quantize(folder, gpu, kernel_calls):  # noqa: F811
    """Calls of few tokens take kernels; others torchao's products of e4m3, or plain PyTorch where there are none."""
    gpu("10.0")
    model = sparsify(load(folder, PROJECTIONS[:2]))
    few, many = logits(model, 11), logits(model)
    assert kernel_calls == [0, 1, 2] * 2
    assert torch.equal(many, logits(load(folder, PROJECTIONS[:2])))
    gpu("8.0")
    assert torch.equal(logits(model, 11), few)
    assert 0 < relative_rms(logits(model), many) < 0.1


def test_tokens_without_active_neurons_are_no_nan(folder, caplog):
    """torchao quantizes a row of zeros to 0 / 0. Our blocks leave it 0, through their submodules, too."""
    stock, model = load(folder), sparsify(load(folder))
    assert logits(stock).isnan().any()
    assert logits(model).isfinite().all()
    assert torch.equal(logits(sparsify(load(folder, PROJECTIONS[:2]))), logits(load(folder, PROJECTIONS[:2])))
    (record,) = {record.getMessage() for record in caplog.records if record.name == "hf_twell.convert.sparsify"}
    assert "no kernel reads these quantized weights (Float8Tensor on cpu)" in record
    ffn = sparse_ffns(model)[0]
    x = torch.zeros(3, 70, 64, dtype=torch.bfloat16)
    x[1] = torch.randn(70, 64)
    with torch.no_grad():
        y = ffn(x)
        assert not y[0].any()
        assert torch.equal(y[1], ffn(x[1]))
        ffn.down_proj.bias = nn.Parameter(torch.randn(64).bfloat16())
        assert torch.equal(ffn(x)[2], ffn.down_proj.bias.expand(70, 64))
        x[2, 5, 5] = float("nan")
        assert ffn(x)[2, 5].isnan().all()


def made_by(weight, granularity, **asked):
    """A weight of torchao's e4m3 by any of its options."""
    kwargs = torchao_kwargs(granularity, **asked)
    config = torchao_config("fp8-dynamic")
    kwargs = {"act_quant_kwargs": kwargs, "mm_config": config.mm_config}
    made = quantization.Float8Tensor.from_hp(weight, granularity=granularity, **kwargs)
    return nn.Parameter(made, requires_grad=False)


def torchao_kwargs(granularity, **asked):
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    return QuantizeTensorToFloat8Kwargs(granularity=granularity, **asked)


OTHERS = {
    "one scale": {"granularity": quantization.PerTensor()},
    "a lower bound": {"granularity": quantization.PerRow(), "hp_value_lb": 1e-6},
    "an upper bound": {"granularity": quantization.PerRow(), "hp_value_ub": 1e3},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_formats_go_through_the_submodules(folder, gpu, kernel_calls, kind, caplog):  # noqa: F811
    gpu("9.0")
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for _ in range(2)]
    for model in models:
        for layer in model.model.layers:
            for name in PROJECTIONS[:2]:
                linear = getattr(layer.mlp, name)
                linear.weight = made_by(linear.weight.detach(), **OTHERS[kind])
    stock, model = models[0], sparsify(models[1])
    try:
        expected = logits(stock)
    except RuntimeError as error:  # of oneDNN, capped to AVX2 on a processor for which PyTorch expects more of it
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip("PyTorch itself cannot multiply by these weights here")
    assert torch.equal(logits(model), expected)
    assert kernel_calls == []
    (record,) = [record for record in caplog.records if record.name == "hf_twell.convert.sparsify"]
    assert "no kernel reads these quantized weights (" in record.getMessage()


@pytest.mark.parametrize("dynamic", [("gate_proj",), ("up_proj", "down_proj"), ("down_proj",)])
def test_projections_that_want_different_inputs_go_through_themselves(folder, gpu, kernel_calls, dynamic, caplog):  # noqa: F811
    gpu("9.0")
    stock, model = load(folder, dynamic), sparsify(load(folder, dynamic))
    expected, found = logits(stock), logits(model)
    known = ~expected.isnan()
    assert torch.equal(found[known], expected[known])
    assert kernel_calls == []
    assert not takes_kernels(sparse_ffns(model)[0], torch.ones(1, 64, dtype=torch.bfloat16))
    assert [record for record in caplog.records if record.name == "hf_twell.convert.sparsify"]


def test_saved_and_loaded_again(folder, tmp_path, gpu, kernel_calls):  # noqa: F811
    model, tokenizer = quantize(folder, "fp8-dynamic")
    assert tokenizer is None
    values = logits(model)
    assert kernel_calls == []
    model.save_pretrained(tmp_path / "dynamic")
    written = json.loads((tmp_path / "dynamic" / "config.json").read_text())
    kind = written["quantization_config"]["quant_type"]["default"]["_type"]
    assert kind == "Float8DynamicActivationFloat8WeightConfig"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "dynamic").eval()
    assert torch.equal(logits(plain), values)
    kinds = [getattr(plain.model.layers[1].mlp, name).weight for name in PROJECTIONS]
    assert [weight.act_quant_kwargs is not None for weight in kinds] == [True, True, False]
    assert all(weight.qdata.dtype == torch.float8_e4m3fn for weight in kinds)
    assert type(plain.model.layers[0].self_attn.q_proj.weight) is nn.Parameter
    again = sparsify(plain)
    assert torch.equal(logits(again), values)
    gpu("9.0")
    on_kernels = logits(again)
    assert kernel_calls == [0, 1, 2]
    assert 0 < relative_rms(on_kernels, values) < 0.05, "the same meaning, by other roundings"
    again.train()
    assert again.model.layers[0].mlp.down_proj.weight.qdata.is_contiguous()
    assert torch.equal(logits(unpatch(again.eval())), values)


@pytest.mark.parametrize("weights", ["fp8", "fp8-dynamic"])
def test_pruned_neurons_are_no_nan(tmp_path, weights):
    """Rows of zeros in a weight, which torchao makes NaN of."""
    model = sparsify(few_active(tiny_llama(hidden_size=64, intermediate_size=304)).bfloat16())
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight[::3] = 0
        model.model.layers[2].mlp.down_proj.weight[5] = 0
    model.save_pretrained(tmp_path / "pruned")
    assert logits(load(tmp_path / "pruned", ())).isnan().any()
    quantized, _ = quantize(tmp_path / "pruned", weights)
    found = logits(quantized)
    assert found.isfinite().all()
    assert relative_rms(found, logits(model)) < 0.15
    quantized.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()), found)


def test_what_quantize_refuses(folder, tmp_path):
    sparsify(tiny_llama(hidden_size=64, intermediate_size=304)).save_pretrained(tmp_path / "fp32")
    with pytest.raises(ValueError, match=r"fp32 is in torch.float32; torchao's fp8-dynamic takes bfloat16 alone"):
        quantize(tmp_path / "fp32", "fp8-dynamic")
    sparsify(tiny_llama(hidden_size=64, intermediate_size=300).bfloat16()).save_pretrained(tmp_path / "odd")
    with pytest.raises(ValueError, match=r"of shape \(300, 64\); torchao's fp8-dynamic takes multiples of 16 alone"):
        quantize(tmp_path / "odd", "fp8-dynamic")


def test_the_command(folder, tmp_path, run_json):
    result = run_json("quantize", folder, tmp_path / "dynamic", "--weights", "fp8-dynamic")
    assert result["weights"] == "fp8-dynamic"
    assert result["block_bytes"] == result["block_bytes_before"] / 2 + 3 * (304 + 304 + 64) * 4
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "dynamic").eval())
    plain = logits(AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16").eval())
    assert relative_rms(found, plain) < 0.15  # e4m3 has 3 bits behind the first one, now on both sides


@pytest.mark.slow
def test_compiled_without_breaks(folder, gpu):
    """Two graphs for any number of tokens: x is quantized in one of them."""
    gpu("9.0")
    model, graphs = sparsify(load(folder)), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    block = model.model.layers[0].mlp
    held = [getattr(block, name).weight for name in ("up_proj", "down_proj", "gate_proj")]
    scales = dict(zip(("s_up", "s_down", "s_gate"), (weight.scale for weight in held), strict=True))

    def computed(x):
        return reference.ffn(x, *(weight.qdata for weight in held), **scales, quantize_x=True)

    compiled = torch.compile(block, backend=count, fullgraph=True)
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        for tokens in (65, 300, 66, 64, 2, 63, 129, 17, 200):
            part = x[:tokens].clone()
            torch._dynamo.mark_dynamic(part, 0)
            torch.testing.assert_close(compiled(part), computed(part), rtol=0, atol=0)
    assert len(graphs) == 2


def test_a_block_alone(gpu):
    gpu("9.0")
    ffn = sparse_ffns(sparsify(tiny_llama(hidden_size=64, intermediate_size=304).bfloat16().eval()))[0]
    quantize_block(ffn, ffn.twell.form, "fp8-dynamic")
    asked = [getattr(ffn, name).weight.act_quant_kwargs for name in PROJECTIONS]
    assert [each is not None for each in asked] == [True, True, False]
    with torch.no_grad():
        assert ffn(torch.randn(70, 64).bfloat16()).isfinite().all()
