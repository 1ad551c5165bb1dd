"""What is done to models by others, before or after `sparsify`: each works exactly, or is refused in one line."""

import functools
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from hf_twell import L1Penalty, TwellLlamaForCausalLM, measure_sparsity, sparsify
from hf_twell.blocks.modeling import sparse_ffns
from hf_twell.ops import build
from tests.conftest import ids, logits, one_of, relu_llama, tiny_llama

pytestmark = pytest.mark.numeric


def refused(model, message: str):
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError) as caught:
        sparsify(model)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [type(module) for module in model.modules()] == before, "nothing has changed"
    assert model.config.hidden_act == "silu"


# quantization by PyTorch


def in_eight_bits_when_called(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("by_columns", [False, True])
def test_dynamic_quantization(by_columns):
    model = sparsify(tiny_llama().eval())
    for ffn in sparse_ffns(model) if by_columns else []:  # as an evaluation leaves the weight
        ffn.down_proj.weight.data = ffn.down_proj.weight.data.t().contiguous().t()
    quantized = in_eight_bits_when_called(model)
    assert len(sparse_ffns(quantized)) == 3
    assert torch.equal(logits(quantized.train()), logits(in_eight_bits_when_called(relu_llama())))
    refused(in_eight_bits_when_called(tiny_llama().eval()), "cannot be read")


# accelerate


def test_cpu_offload_after():
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(sparsify(tiny_llama().eval()), execution_device="cpu")
    assert next(model.model.layers[0].mlp.parameters()).is_meta
    torch.testing.assert_close(logits(model), logits(relu_llama()))
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(ids(), **options), relu_llama().generate(ids(), **options))


def test_offloading_before_is_refused():
    accelerate = pytest.importorskip("accelerate")
    refused(accelerate.cpu_offload(tiny_llama().eval(), execution_device="cpu"), "a device_map that offloads nothing")


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_device_map_with_offloaded_blocks(tmp_path, place):
    pytest.importorskip("accelerate")
    tiny_llama().save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": place, "model.layers.2": "disk"}
    options = {"device_map": places, "offload_folder": tmp_path / "offloaded"}
    model = TwellLlamaForCausalLM.from_pretrained(tmp_path / "model", **options)
    assert model.model.layers[2].mlp.up_proj.weight.is_meta
    assert len(sparse_ffns(model)) == 3
    torch.testing.assert_close(logits(model), logits(relu_llama()))
    assert measure_sparsity(model, [ids()]) == measure_sparsity(relu_llama(), [ids()])
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options)
    refused(dense, "forward replaced")


# Linears that others put in place of stock ones, as bitsandbytes does


class EightBitWeight(nn.Parameter):
    """int8 values, and their scales kept beside them."""


class EightBitLinear(nn.Linear):
    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        values = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = EightBitWeight(values, requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def in_eight_bits(model):
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, EightBitLinear(getattr(layer.mlp, name)))
    return model


def test_eight_bits_after():
    model, twin = in_eight_bits(sparsify(tiny_llama().eval())), in_eight_bits(relu_llama())
    assert torch.equal(logits(model), logits(twin))
    assert not torch.allclose(logits(model), logits(relu_llama()), atol=1e-4)


def test_eight_bits_of_a_relu_model_are_taken():
    """A sparse model that was saved, loaded in eight bits by its stock class, and sparsified again for the L1 term."""
    model, twin = in_eight_bits(relu_llama()), in_eight_bits(relu_llama())
    for _ in range(2):
        assert torch.equal(logits(sparsify(model)), logits(twin))
    assert len(sparse_ffns(model)) == 3


@pytest.mark.parametrize("how", ["evaluation", "compiled", "training"])
@pytest.mark.parametrize("patched", [nn.Linear, nn.ReLU])
def test_a_forward_that_is_put_on_pytorchs_class(patched, how, monkeypatch):
    """As tools for calibration and for quantization-aware training do it, for all modules at once."""
    model, twin = sparsify(tiny_llama().eval()), relu_llama()
    run = torch.compile(model, fullgraph=True, backend="eager") if how == "compiled" else model
    for _ in range(1 if how == "compiled" else 2):  # the second goes the way of the first
        before = logits(model)
    plain = patched.forward
    with monkeypatch.context() as patch:
        patch.setattr(patched, "forward", lambda self, x: plain(self, x.to(torch.bfloat16).float()) + 0.125)
        if how == "training":
            for each in (model, twin):
                each.train()(input_ids=ids(), labels=ids()).loss.backward()
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)
        else:
            torch.testing.assert_close(logits(run), logits(twin), atol=0, rtol=0)
            assert not torch.allclose(logits(twin), before, atol=1e-2)
    torch.testing.assert_close(logits(model.eval()), before)


def test_eight_bits_before_are_refused():
    refused(in_eight_bits(tiny_llama()), "gate_proj (EightBitLinear) is quantized (torch.int8")


# Liger's patches: to the classes before a model is made, or to the instances of one that is there


class LigerSwiGLUMLP(nn.Module):
    """As Liger's: SiLU in the forward itself, and no act_fn."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def liger_norm(self, x):
    wide = x.float()
    return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)


def bind(module, forward):
    module.__dict__["forward"] = types.MethodType(forward, module)


def test_ligers_swiglu_class_is_refused(monkeypatch):
    monkeypatch.setattr(modeling_llama, "LlamaMLP", LigerSwiGLUMLP)
    refused(tiny_llama(), "apply Liger with swiglu=False")


def test_ligers_swiglu_instances_are_refused():
    model = tiny_llama()
    for layer in model.model.layers:
        bind(layer.mlp, LigerSwiGLUMLP.forward)
    refused(model, "has its forward replaced on the instance (by accelerate's offloading, Liger")


RUNS = {
    "evaluation": logits,
    "generation": lambda model: model.generate(ids(), max_new_tokens=2),
    "measuring": lambda model: measure_sparsity(model, [ids()]),
    "training": lambda model: [model(**b) for b in L1Penalty(model, 1e-3).micro_batches([{"input_ids": ids()}])],
    "compiled": lambda model: logits(torch.compile(model, backend="eager")),
    "checkpointed": lambda model: (model.train().gradient_checkpointing_enable(), model(input_ids=ids())),
}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_ligers_swiglu_after_sparsify_is_refused(run):
    model = sparsify(tiny_llama().eval())
    bind(model.model.layers[1].mlp, LigerSwiGLUMLP.forward)
    with pytest.raises(ValueError, match=r"layers.1.mlp was replaced after sparsify") as caught:
        RUNS[run](model)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_ligers_swiglu_under_a_compiled_model_is_seen():
    model = sparsify(tiny_llama().eval())
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(logits(compiled), logits(relu_llama()))
    bind(model.model.layers[1].mlp, LigerSwiGLUMLP.forward)
    with pytest.raises(ValueError, match=r"layers.1.mlp was replaced after sparsify"):
        logits(compiled)


@pytest.mark.parametrize("first", ["Liger", "accelerate"])
def test_ligers_swiglu_beside_accelerates_hooks_is_seen(first):
    hooks = pytest.importorskip("accelerate.hooks")
    mlp = (model := sparsify(tiny_llama().eval())).model.layers[1].mlp
    if first == "Liger":
        bind(mlp, LigerSwiGLUMLP.forward)
    hooks.add_hook_to_module(mlp, hooks.ModelHook())
    if first == "accelerate":
        torch.testing.assert_close(logits(model), logits(relu_llama()))
        bind(mlp, LigerSwiGLUMLP.forward)
    with pytest.raises(ValueError, match=r"layers.1.mlp was replaced after sparsify"):
        logits(model)


def wrapped(old):
    @functools.wraps(old)
    def forward(*args, **kwargs):
        return old(*args, **kwargs)

    return forward


WRAPPERS = {
    "wraps": wrapped,
    "closure": lambda old: lambda x: old(x),
    "partial": functools.partial,
    "compiled": lambda old: torch.compile(old, fullgraph=True, backend="eager"),
    "not compiled": torch.compiler.disable,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_forwards_that_wrap_ours_are_exact(wrapper):
    """What caches, tracers and per-block compilers do to a block's forward, in evaluation and training."""
    model, twin = sparsify(tiny_llama().eval()), relu_llama()
    for layer in model.model.layers:
        layer.mlp.forward = WRAPPERS[wrapper](layer.mlp.forward)
    torch.testing.assert_close(logits(model), logits(twin))
    penalty = L1Penalty(model.train(), l1_weight=0.0)
    for batch in penalty.micro_batches([{"input_ids": ids(), "labels": ids()}]):
        model(**batch).loss.backward()
    twin.train()(input_ids=ids(), labels=ids()).loss.backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4)
    assert 0 < penalty.report()["density"] < 1


def test_hooks_that_were_taken_off():
    """accelerate leaves the old forward on the instance."""
    hooks = pytest.importorskip("accelerate.hooks")
    mlp = (model := sparsify(tiny_llama().eval())).model.layers[1].mlp
    hooks.add_hook_to_module(mlp, hooks.ModelHook())
    hooks.remove_hook_from_module(mlp)
    assert "forward" in vars(mlp)
    torch.testing.assert_close(logits(model), logits(relu_llama()))
    L1Penalty(model, 1e-3)


@pytest.mark.parametrize("wrapper", one_of("closure", ["wraps", "closure", "partial"]))
def test_a_model_of_wrapped_forwards_compiles_into_one_graph(wrapper, fresh_compiler):
    model = sparsify(tiny_llama().eval())
    for layer in model.model.layers:
        layer.mlp.forward = WRAPPERS[wrapper](layer.mlp.forward)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(logits(compiled), logits(relu_llama()))
    with torch._dynamo.config.patch(error_on_recompile=True):
        logits(compiled)


def test_threads_share_a_model_with_hooks(one_thread):
    """As requests to a model that is dispatched over devices: each call knows its own way."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = sparsify(tiny_llama().eval())
    for layer in model.model.layers:
        hooks.add_hook_to_module(layer.mlp, hooks.ModelHook())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda _: logits(model), range(400)))
    finally:
        sys.setswitchinterval(interval)
    for result in results:
        torch.testing.assert_close(result, results[0])


def test_liger_without_swiglu():
    model, twin = tiny_llama().eval(), relu_llama()
    for each in (model, twin):
        for name, module in each.named_modules():
            if name.endswith("norm"):
                bind(module, liger_norm)
    torch.testing.assert_close(logits(sparsify(model)), logits(twin))


# Compilers and caches


# Older ones guard no hooks, whoever reads them, unless they are told to.
GUARD_HOOKS = {"skip_nnmodule_hook_guards": False} if torch.__version__ < (2, 13) else {}


@torch._dynamo.config.patch(GUARD_HOOKS)
@pytest.mark.parametrize("change", one_of("hook", ["hook", "forward"]))
def test_what_is_done_to_a_compiled_model_is_seen(change):
    model, twin = sparsify(tiny_llama().eval()), relu_llama()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(logits(compiled), logits(twin))
    for each in (model, twin):
        linear = each.model.layers[1].mlp.up_proj
        if change == "hook":
            linear.register_forward_hook(lambda module, args, out: 2 * out)
        else:
            bind(linear, lambda self, x: 2 * nn.functional.linear(x, self.weight))
    torch.testing.assert_close(logits(compiled), logits(twin))
    assert not torch.allclose(logits(twin), logits(relu_llama()), atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("strict", [False, True])
def test_export(tmp_path, backend, strict):
    model = sparsify(tiny_llama().eval(), backend=backend)
    truth = logits(relu_llama())
    with torch.no_grad():
        program = torch.export.export(model, (), {"input_ids": ids(), "use_cache": False}, strict=strict)
        torch.export.save(program, tmp_path / "model.pt2")
        again = torch.export.load(tmp_path / "model.pt2").module()
        torch.testing.assert_close(again(input_ids=ids(), use_cache=False).logits, truth)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@torch.no_grad()
def test_tracers_of_a_block():
    block, x = sparsify(tiny_llama().eval()).model.layers[0].mlp, torch.randn(2, 32)
    y = block(x)
    torch.testing.assert_close(torch.jit.trace(block, x)(x), y)
    with pytest.raises(torch.fx.proxy.TraceError):
        torch.fx.symbolic_trace(block)


@pytest.mark.skipif(not build.status("cpu", build=True).available, reason="needs the CPU kernels")
@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
def test_a_bias_written_between_forward_and_backward_raises(name):
    """Wrong gradients would be worse. A stock block does not read it again."""
    model, twin = tiny_llama(mlp_bias=True), tiny_llama(mlp_bias=True, hidden_act="relu")
    losses = []
    for each in (sparsify(model, backend="cpu"), twin):
        losses.append(each(input_ids=ids(), labels=ids()).loss)
        with torch.no_grad():
            each.model.layers[0].mlp.get_submodule(name).bias.add_(1)
    losses[1].backward()
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        losses[0].backward()


def test_l1_term_on_eight_bit_blocks():
    """Frozen quantized projections: the term still reaches what lies before them, as with a dense ReLU model."""
    model = in_eight_bits(sparsify(tiny_llama()))
    twin, terms = in_eight_bits(relu_llama()).train(), []
    for layer in twin.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: terms.append(args[0].abs().sum(-1).mean()))
    for batch in L1Penalty(model.train(), 0.5).micro_batches([{"input_ids": ids(), "labels": ids()}]):
        model(**batch).loss.backward()
    (twin(input_ids=ids(), labels=ids()).loss + 0.5 * sum(terms) / len(terms)).backward()
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad
    torch.testing.assert_close(gradient, twin.model.layers[0].self_attn.q_proj.weight.grad, atol=1e-5, rtol=1e-4)
