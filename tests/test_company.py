"""What is done to models by others, before or after `sparsify`: each works exactly, or is refused in one line."""

import copy
import functools
import io
import pickle
import subprocess
import sys
import types
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    EarlyStoppingCallback,
    GenerationConfig,
    Trainer,
    TrainingArguments,
)
from transformers.models.llama import modeling_llama

from hf_twell import L1Penalty, SparsityCallback, TwellLlamaForCausalLM, measure_sparsity, ops, sparsify
from hf_twell.modeling import sparse_ffns
from hf_twell.weight_files import check_finite
from tests.conftest import ids, logits, relu_llama, tiny_llama


def refused(model, message: str):
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError) as caught:
        sparsify(model)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [type(module) for module in model.modules()] == before, "nothing has changed"
    assert model.config.hidden_act == "silu"


def few_active(**changes):
    """A tiny Llama of whose 52 neurons 48 are never active, so that kernels run."""
    model = tiny_llama(mlp_bias=True, **changes).eval()
    for layer in model.model.layers:
        layer.mlp.gate_proj.bias.data[4:] = -9.0
    return model


def pair():
    """A sparse model that has been evaluated, so that it keeps down_proj by columns; and its stock dense ReLU twin."""
    model, twin = sparsify(few_active()), few_active(hidden_act="relu")
    torch.testing.assert_close(logits(model), logits(twin))
    return model, twin


def other_weights():
    generator = torch.Generator().manual_seed(1)
    return {
        name: weights + 0.1 * torch.randn(weights.shape, generator=generator)
        for name, weights in few_active().state_dict().items()
    }


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
    assert torch.equal(logits(quantized), logits(in_eight_bits_when_called(relu_llama())))
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


def test_eight_bits_before_are_refused():
    refused(in_eight_bits(tiny_llama()), "gate_proj (EightBitLinear) is quantized (torch.int8")


class Int8Tensor(torch.Tensor):
    """As torchao's: it says that it is float32, holds int8 values and scales, and computes linear layers alone."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight):
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.values = (weight / self.scale).round().to(torch.int8)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            x, weight, bias = args
            return nn.functional.linear(x, weight.values * weight.scale, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"Int8Tensor dispatch: {function}")


def with_int8_tensors(model):
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear = getattr(layer.mlp, name)
            linear.weight = nn.Parameter(Int8Tensor(linear.weight.detach()), requires_grad=False)
    return model


def test_int8_tensors():
    model, twin = with_int8_tensors(sparsify(tiny_llama().eval())), with_int8_tensors(relu_llama())
    assert torch.equal(logits(model), logits(twin))
    assert not torch.allclose(logits(model), logits(relu_llama()), atol=1e-4)
    check_finite("a model that was loaded", model.named_parameters())
    assert torch.equal(logits(sparsify(model)), logits(twin))
    refused(with_int8_tensors(tiny_llama()), "is quantized (torch.float32, Int8Tensor)")


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


@pytest.mark.parametrize("run", RUNS)
def test_ligers_swiglu_after_sparsify_is_refused(run):
    model = sparsify(tiny_llama().eval())
    bind(model.model.layers[1].mlp, LigerSwiGLUMLP.forward)
    with pytest.raises(ValueError, match=r"layers.1.mlp was replaced after sparsify") as caught:
        RUNS[run](model)
    assert "\n" not in str(caught.value)


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


def test_liger_without_swiglu():
    model, twin = tiny_llama().eval(), relu_llama()
    for each in (model, twin):
        for name, module in each.named_modules():
            if name.endswith("norm"):
                bind(module, liger_norm)
    torch.testing.assert_close(logits(sparsify(model)), logits(twin))


# Compilers and caches


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_compile_fullgraph(backend):
    model = sparsify(tiny_llama().eval(), backend=backend)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (11, 5, 23):
        torch.testing.assert_close(logits(compiled, length), logits(relu_llama(), length))


@pytest.mark.parametrize("change", ["hook", "forward"])
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


def test_compiled_training_step():
    gradients = []
    for compile_model in (False, True):
        model = sparsify(tiny_llama())
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compile_model else model
        run(input_ids=ids(), labels=ids(), use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, compiled in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, plain)


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


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_generate(cache):
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
    model = sparsify(tiny_llama().eval())
    assert torch.equal(model.generate(ids(), **options), relu_llama().generate(ids(), **options))


def test_assisted_generation():
    options = {"max_new_tokens": 12, "do_sample": False}
    draft = sparsify(tiny_llama(num_hidden_layers=1).eval())
    one = ids()[:1]
    with_draft = sparsify(tiny_llama().eval()).generate(one, assistant_model=draft, **options)
    assert torch.equal(with_draft, relu_llama().generate(one, **options))


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


# What is done to a model that has been evaluated


def test_by_columns():
    """The tests below begin with what is special in an evaluated model, where kernels can be had."""
    model, _ = pair()
    if ops.resolve("auto", "cpu") != "cpu":
        pytest.skip("needs the CPU kernels")
    assert model.model.layers[0].mlp.down_proj.weight.stride() == (1, 32)


def same_but_moved(model, twin):
    torch.testing.assert_close(logits(model), logits(twin))
    assert not torch.allclose(logits(twin), logits(few_active(hidden_act="relu")), atol=1e-2)


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def with_weight_norm(linear):
    parametrizations.weight_norm(linear).parametrizations.weight.original0.data *= 2


def pruned_for_good(linear):
    prune.remove(prune.l1_unstructured(linear, "weight", 0.3), "weight")


TRICKS = {
    "parametrized": lambda linear: parametrize.register_parametrization(linear, "weight", Twice()),
    "weight norm": with_weight_norm,
    "pruned": lambda linear: prune.l1_unstructured(linear, "weight", 0.3),
    "pruned for good": pruned_for_good,
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("trick", TRICKS)
def test_tricks_on_projections(trick, name, when):
    model, twin = pair() if when == "after" else (few_active(), few_active(hidden_act="relu"))
    for each in (model.train(), twin):  # in training mode down_proj is contiguous, which pruning wants
        for layer in each.model.layers:
            TRICKS[trick](layer.mlp.get_submodule(name))
    same_but_moved(sparsify(model).eval(), twin)
    assert len(sparse_ffns(model)) == 3


def test_what_wants_contiguous_weights_gets_them_in_training_mode(tmp_path):
    model, twin = pair()
    model.train()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    twin.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(logits(model.eval()), logits(twin))
    assert torch.equal(*(nn.utils.parameters_to_vector(each.parameters()) for each in (model.train(), twin)))


def merge(model):
    other = other_weights()
    model.load_state_dict({name: (weights + other[name]) / 2 for name, weights in model.state_dict().items()})


def give_data(model):
    for name, weights in model.named_parameters():
        weights.data = other_weights()[name]


def write_in_place(model):
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(3)


CHANGES = {
    "assigned": lambda model: model.load_state_dict(other_weights(), assign=True),
    "loaded": lambda model: model.load_state_dict(other_weights()),
    "merged": merge,
    "data": give_data,
    "in place": write_in_place,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights(change):
    model, twin = pair()
    for each in (model, twin):
        CHANGES[change](each)
    for _ in range(2):
        same_but_moved(model, twin)


@pytest.mark.parametrize("gradients", [False, True])
def test_functional_call(gradients):
    model, twin = pair()
    with torch.set_grad_enabled(gradients):
        ours, theirs = (
            torch.func.functional_call(each, other_weights(), (), {"input_ids": ids()}).logits for each in (model, twin)
        )
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(logits(model), logits(twin))


def test_averaged_model():
    averages = []
    for model in pair():
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model.train()(input_ids=ids(), labels=ids()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            averages.append(logits(average.eval()))
            logits(model.eval())
    torch.testing.assert_close(torch.stack(averages[:3]), torch.stack(averages[3:]))
    assert len(sparse_ffns(average)) == 0
    assert not torch.allclose(averages[0], averages[2], atol=1e-3)


def saved_whole(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_whole,
    "share_memory": lambda model: copy.deepcopy(model).share_memory(),
    "float64": lambda model: copy.deepcopy(model).double(),
    "other attention": lambda model: (model.set_attn_implementation("eager"), model)[1],
}


@pytest.mark.parametrize("how", COPIES)
def test_copies(how):
    model, twin = pair()
    copied = COPIES[how](model)
    torch.testing.assert_close(logits(copied), logits(COPIES[how](twin)))
    assert len(sparse_ffns(copied)) == 3
    write_in_place(copied)
    if copied is not model:
        torch.testing.assert_close(logits(model), logits(twin))


def test_layers_cut_off_and_embeddings_resized(tmp_path):
    model, twin = pair()
    sparsify(model, layers=[0, 2])
    for each in (model, twin):
        each.model.layers = each.model.layers[:2]
        each.config.num_hidden_layers = 2
        torch.manual_seed(0)
        each.resize_token_embeddings(104)
    torch.testing.assert_close(logits(model), logits(twin))
    model.save_pretrained(tmp_path / "model")
    advice = r"twell entry; pass layers=range\(2\) for all"
    for again in (lambda **options: sparsify(model, **options), lambda **options: load(tmp_path / "model", **options)):
        with pytest.raises(ValueError, match=advice):
            again()
        torch.testing.assert_close(logits(again(layers=range(2))), logits(twin))


def load(path, **options):
    return TwellLlamaForCausalLM.from_pretrained(path, **options).eval()


def test_a_block_replaced():
    model, twin = pair()
    for each in (model, twin):
        each.set_submodule("model.layers.1.mlp", copy.deepcopy(twin.model.layers[2].mlp))
    same_but_moved(model, twin)
    assert len(sparse_ffns(model)) == 2
    same_but_moved(sparsify(model), twin)
    assert len(sparse_ffns(model)) == 3


def copied_by_peft(model):
    peft = pytest.importorskip("peft")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["mlp"]))


BLOCK_CHANGES = {
    "replaced": lambda model: model.set_submodule("model.layers.1.mlp", copy.deepcopy(model.model.layers[2].mlp)),
    "cut off": lambda model: setattr(model.model, "layers", model.model.layers[:2]),
    "copied": copied_by_peft,
}


@pytest.mark.parametrize("change", BLOCK_CHANGES)
def test_an_l1_term_on_blocks_that_are_gone_is_refused(change):
    model = sparsify(tiny_llama())
    penalty = L1Penalty(model, 0.5)
    BLOCK_CHANGES[change](model)
    with pytest.raises(ValueError, match="or not the model's"):
        penalty.begin_step([{"input_ids": ids()}])


# Generation of other kinds


def padded():
    rows, mask = ids().clone(), torch.ones_like(ids())
    rows[0, :4] = mask[0, :4] = 0
    return rows, mask


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"output_hidden_states": True}])
def test_other_ways_to_generate(options):
    rows, mask = padded()
    if "prompt_lookup_num_tokens" in options:
        rows = torch.cat([ids()[:1], ids()[:1]], dim=1)
        mask = torch.ones_like(rows)
    ours, theirs = (
        each.generate(rows, attention_mask=mask, max_new_tokens=8, do_sample=False, **options) for each in pair()
    )
    assert torch.equal(ours, theirs)


def test_generate_batch():
    """Continuous batching, with its paged attention."""
    options = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    texts = []
    for model in pair():
        rows = [row.tolist() for row in ids()]
        done = model.generate_batch(rows, options, continuous_batching_config=small, progress_bar=False)
        texts.append([done[name].generated_tokens for name in sorted(done)])
    assert texts[0] == texts[1]
    assert [len(text) for text in texts[0]] == [5, 5]


# Trainer's own devices


def trained(model, folder, callbacks, **options):
    rows = [{"input_ids": row, "labels": row} for row in ids().repeat(8, 1)]
    args = TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, optim="sgd", **options
    )
    trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows[:4])
    for callback in callbacks(trainer):
        trainer.add_callback(callback)
    trainer.train()
    return trainer


def test_early_stopping_and_the_best_model(tmp_path):
    options = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    options |= {"load_best_model_at_end": True, "learning_rate": 0.05, "max_steps": 9}
    options["greater_is_better"] = True  # the loss, so that the first checkpoint is the best
    model, twin = pair()
    stop = EarlyStoppingCallback(1)
    ours = trained(model, tmp_path / "ours", lambda trainer: [stop, SparsityCallback(trainer, 0.0)], **options)
    theirs = trained(twin, tmp_path / "theirs", lambda trainer: [stop], **options)
    assert ours.state.global_step == theirs.state.global_step == 2
    assert Path(ours.state.best_model_checkpoint).name == "checkpoint-1"
    torch.testing.assert_close(logits(model.eval()), logits(twin.eval()))


def test_auto_find_batch_size(tmp_path):
    """Steps that ran out of memory leave nothing behind: the run is the one with the size that was found."""

    def out_of_memory(model, args, batch):
        if model.training and len(batch["input_ids"]) > 2:
            raise RuntimeError("CUDA out of memory.")

    models, logs = [], []
    for size in (3, 2):
        model = sparsify(few_active())
        model.register_forward_pre_hook(out_of_memory, with_kwargs=True)
        options = {"per_device_train_batch_size": size, "auto_find_batch_size": size > 2, "max_steps": 3}
        trainer = trained(model, tmp_path, lambda trainer: [SparsityCallback(trainer, 0.5)], **options)
        logs.append([[row[key] for key in ("loss", "twell/l0", "twell/l1")] for row in trainer.state.log_history[:-1]])
        models.append(model.eval())
    assert trainer._train_batch_size == 2
    assert logs[0] == logs[1]
    assert torch.equal(logits(models[0]), logits(models[1]))


# Models split over processes


def test_split_over_two_processes(tmp_path):
    """By tensors, by layers, and by FSDP: `tests/split_models.py` says what each process computed."""
    sparsify(few_active()).save_pretrained(tmp_path / "sparse")
    few_active().save_pretrained(tmp_path / "dense")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    done = subprocess.run(
        [*command, "-m", "tests.split_models", str(tmp_path)],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    twin = few_active(hidden_act="relu")
    truth, text = logits(twin), twin.generate(ids(), max_new_tokens=5, do_sample=False)
    twin(input_ids=ids(), labels=ids()).loss.backward()
    gradient = twin.model.layers[0].mlp.up_proj.weight.grad
    results = torch.load(tmp_path / "results.pt")
    for name, result in results["exact"].items():
        torch.testing.assert_close(result["logits"], truth, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(result["gradient"], gradient, atol=1e-5, rtol=1e-4)
        assert torch.equal(result["text"], text), name
        assert result["blocks"] == result["layers"], name
    assert len(results["exact"]) == 7
    for name, message in results["refused"].items():
        assert "\n" not in message, name
    tensors = "model.layers.0.mlp has 26 of its 52 neurons in this process (tensor parallelism)"
    assert results["refused"].pop("pipeline").startswith("LlamaForCausalLM has 3 layers but 1 ")
    assert [message.startswith(tensors) for message in results["refused"].values()] == [True, True]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(saved), truth)
