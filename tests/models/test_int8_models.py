"""Models whose weights torchao holds in int8: kernels read them where they lie, all else is as torchao computes it."""

import copy
import json
import re
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

from hf_twell import L1Penalty, TwellLlamaForCausalLM, measure_sparsity, sparsify, unpatch
from hf_twell.blocks import operands
from hf_twell.blocks.calls import takes_kernels
from hf_twell.blocks.modeling import SparseFfn, sparse_ffns
from hf_twell.blocks.operands import quantized_values
from hf_twell.cli import main
from hf_twell.files.folders import save_model, training_record
from hf_twell.files.packages import how_to_install
from hf_twell.models.hub import folder_card
from hf_twell.ops import api, build, reference
from tests.blocks.test_compatibility import refused
from tests.conftest import finished, ids, tiny_llama
from tests.ffn_cases import relative_rms

quantization = pytest.importorskip("torchao.quantization")
pytestmark = pytest.mark.skipif(
    not build.status("cpu", build=True).available, reason=build.status("cpu", build=True).reason
)
CONFIG = quantization.Int8WeightOnlyConfig(set_inductor_config=False)
OPTIONS = {"quantization_config": TorchAoConfig(CONFIG)}


def few_active(model):
    """The model with a constant in its hidden states, by which gates keep all but a few neurons off."""
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 2.0
        for layer in model.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight *= 0.1
                linear.weight[0] *= 1e-3
            layer.mlp.gate_proj.weight[:, 0] = -0.6
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A sparse model in bfloat16, about 5 % of whose neurons are active."""
    path = tmp_path_factory.mktemp("int8") / "sparse"
    model = few_active(tiny_llama(hidden_size=64, intermediate_size=300))
    sparsify(model.bfloat16()).save_pretrained(path)
    return path


def load(folder, cls=AutoModelForCausalLM, **options):
    return cls.from_pretrained(folder, dtype="bfloat16", **OPTIONS | options).eval()


def down_values(model):
    return model.model.layers[0].mlp.down_proj.weight.qdata


@torch.no_grad()
def logits(model):
    return model(input_ids=ids()).logits


@pytest.fixture
def kernel_calls(monkeypatch):
    """The blocks that took kernels with int8 weights, call by call."""
    calls, forward = [], SparseFfn._compute

    def compute(self, x, l1, operands):
        if operands.s_up is not None:
            calls.append(self.twell.layer)
        return forward(self, x, l1, operands)

    monkeypatch.setattr(SparseFfn, "_compute", compute)
    return calls


def assert_same_but_for_rounding(values, stock):
    """bfloat16 through three layers: a few of its steps apart, and not all equal, as another way was taken."""
    assert 0 < relative_rms(values, stock) < 3 * 2**-7


@pytest.mark.numeric
def test_loaded_by_transformers_and_sparsified(folder, kernel_calls, caplog):
    stock, model = load(folder), sparsify(load(folder))
    before = [p.data_ptr() for layer in model.model.layers for p in (layer.mlp.gate_proj.weight.qdata,)]
    weights = [quantized_values(layer.mlp.up_proj.weight)[1].dtype for layer in model.model.layers]
    assert weights == [torch.float32] * 3
    assert_same_but_for_rounding(logits(model), logits(stock))
    assert kernel_calls == [0, 1, 2]
    assert not [record for record in caplog.records if record.name.startswith("hf_twell")]
    assert [layer.mlp.gate_proj.weight.qdata.data_ptr() for layer in model.model.layers] == before
    for ffn in sparse_ffns(model):  # nothing beside torchao's own tensors, and these by columns
        held = ffn.down_proj.weight
        assert held.qdata.stride() == (1, 64)
        assert held.qdata.untyped_storage().nbytes() == held.qdata.numel()
        assert takes_kernels(ffn, torch.ones(1, 64, dtype=torch.bfloat16))
    assert torch.equal(logits(model), logits(model))


@pytest.mark.numeric
def test_as_exact_as_torchao_itself(folder):
    """Against fp64 arithmetic on the dequantized weights: at most twice the error of torchao's own linears."""
    model = sparsify(load(folder))
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[:, 0] = 6.0
    for ffn in sparse_ffns(model):
        weights = {}
        for name in ("up", "down", "gate"):
            weights[f"w_{name}"], weights[f"s_{name}"] = quantized_values(getattr(ffn, f"{name}_proj").weight)
        truth = reference.ffn(x.double(), **weights)
        with torch.no_grad():
            assert relative_rms(ffn(x), truth) <= 2 * relative_rms(ffn._through_submodules(x, None), truth)


@pytest.mark.numeric
@pytest.mark.parametrize("cls", [AutoModelForCausalLM, TwellLlamaForCausalLM])
def test_saved_and_loaded_again(folder, tmp_path, cls):
    """Also from evaluation, when down_proj lies by columns; plain Transformers computes the same numbers densely."""
    stock, model = load(folder), sparsify(load(folder, cls))
    values = logits(model)
    assert down_values(model).stride() == (1, 64)
    model.save_pretrained(tmp_path / "int8")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "int8").eval()
    assert torch.equal(logits(plain), logits(stock))
    for again in (sparsify(plain), TwellLlamaForCausalLM.from_pretrained(tmp_path / "int8").eval()):
        assert torch.equal(logits(again), values)
    assert json.loads((tmp_path / "int8" / "config.json").read_text())["hidden_act"] == "relu"


@pytest.mark.numeric
def test_copies_and_ways_back(folder):
    stock, model = load(folder), sparsify(load(folder))
    values = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), values)
    state = model.state_dict()
    assert torch.equal(logits(model), values)  # somebody holds the memory now: it stays where it is
    assert state["model.layers.0.mlp.down_proj.weight"].qdata.data_ptr() == down_values(model).data_ptr()
    del state
    model.train()
    assert down_values(model).is_contiguous()
    assert torch.equal(logits(model.eval()), values)
    unpatch(model)
    assert down_values(model).is_contiguous()
    assert torch.equal(logits(model), logits(stock))


@pytest.mark.numeric
def test_quantized_after_sparsify(folder, kernel_calls):
    model = sparsify(AutoModelForCausalLM.from_pretrained(folder).eval())
    logits(model)
    quantization.quantize_(model.model, CONFIG)
    assert torch.equal(logits(model), logits(sparsify(load(folder))))
    assert kernel_calls == [0, 1, 2] * 2


@pytest.mark.numeric
def test_gradients_go_through_the_submodules(folder, kernel_calls):
    stock, model = load(folder), sparsify(load(folder))
    batch = {"input_ids": ids(), "labels": ids()}
    for each in (stock, model):
        each(**batch).loss.backward()
    assert kernel_calls == []
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(model.get_parameter(name).grad, stock.get_parameter(name).grad)
    model.zero_grad()
    for each in L1Penalty(model.train(), l1_weight=0.5).micro_batches([batch]):
        model(**each).loss.backward()
    assert kernel_calls == []
    assert not torch.equal(model.model.norm.weight.grad, torch.zeros(64))
    logits(model.eval())
    assert kernel_calls == [0, 1, 2]


@pytest.mark.numeric
def test_measured_as_any_other(folder):
    measured = [measure_sparsity(sparsify(load(folder), backend=name), [ids()]) for name in ("auto", "reference")]
    assert 0.01 < measured[0]["density"] < 0.1
    assert abs(measured[0]["density"] - measured[1]["density"]) < 1e-3


OTHERS = {
    "groups": quantization.Int8WeightOnlyConfig(granularity=quantization.PerGroup(32), set_inductor_config=False),
    "one scale": quantization.Int8WeightOnlyConfig(granularity=quantization.PerTensor(), set_inductor_config=False),
    "int8 activations": quantization.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False),
    "float8": quantization.Float8WeightOnlyConfig(set_inductor_config=False),
}


@pytest.mark.numeric
@pytest.mark.parametrize("kind", OTHERS)
def test_other_formats_go_through_the_submodules(folder, kernel_calls, kind, caplog):
    options = {"quantization_config": TorchAoConfig(OTHERS[kind], modules_to_not_convert=["lm_head"])}
    folder = folder if kind != "groups" else _padded(folder)
    stock, model = load(folder, **options), sparsify(load(folder, **options))
    assert torch.equal(logits(model), logits(stock))
    assert kernel_calls == []
    assert not takes_kernels(sparse_ffns(model)[0], torch.ones(1, 64, dtype=torch.bfloat16))
    (record,) = [record for record in caplog.records if record.name == "hf_twell.convert.sparsify"]
    assert "no kernel reads these quantized weights (" in record.getMessage()


@pytest.mark.numeric
def test_fp8_goes_as_int8_does_where_kernels_read_it(folder, tmp_path, kernel_calls, monkeypatch, caplog):
    """As on a GPU; plain PyTorch stands in for its kernels, and computes what torchao does."""
    monkeypatch.setitem(operands._READ, "Float8Tensor", (torch.float8_e4m3fn, ("cpu",)))
    monkeypatch.setattr(api, "_kernels_take", lambda *args, **options: False)
    options = {"quantization_config": TorchAoConfig(OTHERS["float8"], modules_to_not_convert=["lm_head"])}
    stock, model = load(folder, **options), sparsify(load(folder, **options))
    expected = logits(stock)
    assert torch.equal(logits(model), expected)
    assert kernel_calls == [0, 1, 2]
    assert not [record for record in caplog.records if record.name.startswith("hf_twell")]
    assert down_values(model).dtype == torch.float8_e4m3fn
    assert down_values(model).stride() == (1, 64)
    assert torch.equal(logits(copy.deepcopy(model)), expected)
    model.save_pretrained(tmp_path / "fp8")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8").eval()
    assert torch.equal(logits(plain), expected)
    model.train()
    assert down_values(model).is_contiguous()
    assert torch.equal(logits(unpatch(model.eval())), expected)


def _padded(folder):
    """A model whose rows groups of 32 divide."""
    path = folder.parent / "padded"
    sparsify(few_active(tiny_llama(hidden_size=64, intermediate_size=320)).bfloat16()).save_pretrained(path)
    return path


@pytest.mark.numeric
def test_one_projection_left_out(folder, kernel_calls):
    options = {"quantization_config": TorchAoConfig(CONFIG, modules_to_not_convert=["lm_head", ".*down_proj"])}
    stock, model = load(folder, **options), sparsify(load(folder, **options))
    assert torch.equal(logits(model), logits(stock))
    assert kernel_calls == []


def test_silu_in_int8_is_refused(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    refused(AutoModelForCausalLM.from_pretrained(tmp_path, **OPTIONS), "is quantized (torch.float32, Int8Tensor)")


@pytest.mark.numeric
def test_hooks_on_projections_count(folder, kernel_calls):
    model, seen = sparsify(load(folder)), []
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *args: seen.append(1))
    logits(model)
    assert seen == [1]
    assert kernel_calls == [0, 2]


@pytest.mark.codegen
@pytest.mark.slow
@pytest.mark.parametrize("order", ["compiled first", "evaluated first"])
def test_compiled_without_breaks(folder, order):
    """Whatever order down_proj had when the graph was made, and has when it runs; with gradients, too."""
    model, stock = (load(folder, num_hidden_layers=1) for _ in range(2))
    model, stock = sparsify(model), logits(stock)
    compiled = torch.compile(model, fullgraph=True)
    for first in (order == "compiled first", order != "compiled first"):
        if first:
            with torch.no_grad():
                assert relative_rms(compiled(input_ids=ids()).logits, stock) < 3 * 2**-7
            assert relative_rms(compiled(input_ids=ids()).logits.detach(), stock) < 3 * 2**-7
        else:
            logits(model)
            assert down_values(model).stride() == (1, 64)
    with torch.no_grad():
        assert relative_rms(compiled(input_ids=ids()).logits, stock) < 3 * 2**-7


@pytest.mark.codegen
@pytest.mark.slow
def test_inductors_int8_matmul_wants_rows():
    """What a block computes by its submodules in a compiled graph, after evaluation has given columns to down_proj."""
    model = sparsify(few_active(tiny_llama(hidden_size=64, intermediate_size=320)).bfloat16()).eval()
    quantization.quantize_(model, CONFIG)
    block = model.model.layers[0].mlp
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[:, 0] = 6.0
    with torch.no_grad():
        truth = block(x)
    assert block.down_proj.weight.qdata.stride() == (1, 64)
    by_submodules = torch.compile(lambda x: block._through_submodules(x, None), fullgraph=True)
    with torch.inference_mode():
        assert relative_rms(by_submodules(x), truth) < 2**-6


def test_the_command(folder, tmp_path, kernel_calls, run_json):
    result = run_json("quantize", folder, tmp_path / "int8", "--weights", "int8")
    assert result["blocks"] == 3
    scales = 3 * (300 + 300 + 64) * 4
    assert result["block_bytes"] == result["block_bytes_before"] / 2 + scales
    model = sparsify(AutoModelForCausalLM.from_pretrained(tmp_path / "int8").eval())
    assert type(model.model.layers[0].self_attn.q_proj.weight) is torch.nn.Parameter
    logits(model)
    assert kernel_calls == [0, 1, 2]


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_the_card_of_a_trained_model_that_was_quantized(folder, tmp_path, caplog, weights):
    """It has what was recorded of the training, said to be of the weights before; figures of its own are not."""
    model = sparsify(AutoModelForCausalLM.from_pretrained(folder))
    sparsity = measure_sparsity(model, [ids()])
    density = f"{100 * sparsity['density']:.2f} %"
    loss = {"dense": {"loss": 2.0}, "before": {"loss": 9.0}, "after": {"loss": 2.7, "sparsity": sparsity}}
    method, measured = {"target_density": 0.05, "step": 7}, {"heldout": ["a.txt"], **loss}
    save_model(model, tmp_path / "trained", method={**method, "files": {"optimizer.pt": 3}}, measured=measured)
    quantized = tmp_path / "quantized"
    assert main(["quantize", str(tmp_path / "trained"), str(quantized), "--weights", weights]) == 0
    assert training_record(quantized) == {"method": method, "measured": json.loads(json.dumps(measured))}
    caplog.clear()
    card = folder_card(quantized, "me/x")
    (record,) = caplog.records
    assert "Its held-out loss before the weights were quantized is 35 % above that of its dense" in record.getMessage()
    assert f"| feed-forward weights | {weights}, torchao |" in card
    assert "needs torchao (`pip install torchao`)" in card
    assert "| optimizer steps | 7 |" in card
    assert f"| density measured before the weights were quantized | {density} |" in card
    assert "| held-out loss (nats per token) before the weights were quantized | dense parent 2.000, " in card
    assert f"| density measured | {density} |" in folder_card(quantized, "me/x", sparsity=sparsity)
    assert not re.search("quantized|torchao", folder_card(tmp_path / "trained", "me/x"))


def test_quantized_models_are_not_converted_again(folder, tmp_path, capsys):
    sparsify(load(folder)).save_pretrained(tmp_path / "int8")
    capsys.readouterr()
    assert main(["sparsify", str(tmp_path / "int8"), str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()  # and no bar: nothing was loaded
    assert "int8 is quantized already, and can be neither converted nor saved again; copy the folder" in line
    assert not (tmp_path / "out").exists()


def test_a_missing_torchao_is_named_with_what_installs_it(folder, tmp_path):
    sparsify(load(folder)).save_pretrained(tmp_path / "int8")
    (tmp_path / "text.txt").write_text("some words")
    code = "import sys\nsys.modules['torchao'] = None\nfrom hf_twell.cli import main\nsys.exit(main(sys.argv[1:]))"
    done = finished(sys.executable, "-c", code, "eval", "int8", "--text", "text.txt", cwd=tmp_path)
    assert done.returncode == 1
    says = f"int8 holds weights that torchao reads, which is missing: {how_to_install('torchao')}"
    assert done.stderr.splitlines()[-1] == f"hf-twell: error: {says}"


def test_the_command_in_fp8(folder, tmp_path, kernel_calls, caplog, run_json):
    """As torchao computes it, before and after `sparsify`, which says that no kernel reads it."""
    result = run_json("quantize", folder, tmp_path / "fp8", "--weights", "fp8")
    assert result["block_bytes"] == result["block_bytes_before"] / 2 + 3 * (300 + 300 + 64) * 4
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8").eval()
    assert stock.model.layers[0].mlp.up_proj.weight.qdata.dtype == torch.float8_e4m3fn
    expected = logits(stock)
    caplog.clear()
    assert torch.equal(logits(sparsify(stock)), expected)
    assert kernel_calls == []
    assert any("no kernel reads these quantized weights" in record.getMessage() for record in caplog.records)
    plain = logits(AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16").eval())
    assert relative_rms(expected, plain) < 0.1  # e4m3 has 3 bits behind the first one


def test_what_the_command_refuses(folder, tmp_path, error_line):
    tiny_llama().save_pretrained(tmp_path / "silu")
    sparsify(load(folder)).save_pretrained(tmp_path / "int8")
    for arguments, says in (
        ((tmp_path / "silu", tmp_path / "out"), "does not compute ReLU"),
        ((tmp_path / "int8", tmp_path / "out"), "is quantized already"),
        ((folder, folder, "--overwrite"), "is the model itself"),
    ):
        assert says in error_line("quantize", *arguments, "--weights", "int8")
    assert not (tmp_path / "out").exists()
