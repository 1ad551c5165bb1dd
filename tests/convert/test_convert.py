"""What a model keeps through `sparsify` and `unpatch`, and through everything that is done to models."""

import copy
import gc
import io
import json
import pickle
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_twell import L1Penalty, measure_sparsity, sparsify, unpatch
from hf_twell.blocks.modeling import SparseFfn, sparse_ffns
from tests.conftest import finished, ids, logits, tiny_llama

pytestmark = pytest.mark.numeric


def dense_relu(model) -> LlamaForCausalLM:
    """The stock model that a config with ReLU gives, with the same weights."""
    config = LlamaConfig.from_dict({**model.config.to_dict(), "hidden_act": "relu"})
    stock = LlamaForCausalLM(config).to(model.dtype).train(model.training)
    stock.load_state_dict(model.state_dict())
    return stock


def test_really_trained_model(stories_model):
    truth = logits(dense_relu(stories_model))
    assert torch.equal(logits(sparsify(stories_model, backend="reference")), truth)
    assert torch.equal(logits(unpatch(stories_model)), truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
def test_dtype_and_mode(dtype, training):
    model = tiny_llama().to(dtype).train(training)
    model.model.layers[1].eval()  # a frozen layer stays frozen
    modes = [module.training for module in model.modules()]
    sparsify(model, backend="reference")
    assert [module.training for module in model.modules()] == modes
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert torch.equal(logits(model), logits(dense_relu(model).train(training)))
    unpatch(model)
    assert [module.training for module in model.modules()] == modes


def test_twice_changes_nothing():
    model = sparsify(tiny_llama())
    keys, config = list(model.state_dict()), model.config.to_dict()
    classes = [type(module) for module in model.modules()]
    modules, output = list(model.modules()), logits(model)
    sparsify(model)
    assert list(model.state_dict()) == keys
    assert model.config.to_dict() == config
    assert [type(module) for module in model.modules()] == classes
    assert list(model.modules()) == modules, "not even the activations are made anew"
    assert torch.equal(logits(model), output)


def test_second_call_changes_layers_and_backend():
    model = sparsify(tiny_llama(), layers=[0, -1], backend="reference")
    assert [ffn.twell.layer for ffn in sparse_ffns(model)] == [0, 2]
    assert model.config.twell == {"version": 1, "layers": [0, 2]}
    assert type(model.model.layers[1].mlp) is LlamaMLP
    assert isinstance(model.model.layers[1].mlp.act_fn, nn.ReLU)

    sparsify(model)
    assert [(ffn.twell.layer, ffn.twell.backend) for ffn in sparse_ffns(model)] == [(0, "auto"), (2, "auto")]
    sparsify(model, layers=(1, 1, -2))
    assert [ffn.twell.layer for ffn in sparse_ffns(model)] == [1]
    assert vars(model.model.layers[0].mlp).keys() == vars(tiny_llama().model.layers[0].mlp).keys()
    sparsify(model, layers=range(3))
    assert model.config.twell["layers"] is None
    assert len(sparse_ffns(model)) == 3


@pytest.mark.parametrize("make", [iter, tuple, set, lambda layers: __import__("numpy").array(layers)])
def test_kinds_of_layers(make):
    model = sparsify(tiny_llama(), layers=make([0, 2]))
    assert [ffn.twell.layer for ffn in sparse_ffns(model)] == [0, 2]
    json.dumps(model.config.twell)


def test_unpatch():
    model = sparsify(tiny_llama(), backend="reference")
    truth = logits(model)
    assert unpatch(model) is model
    assert {type(layer.mlp) for layer in model.model.layers} == {LlamaMLP}
    assert all(isinstance(layer.mlp.act_fn, nn.ReLU) for layer in model.model.layers)
    assert model.config.hidden_act == "relu"
    assert torch.equal(logits(model), truth)
    assert vars(model.model.layers[0].mlp).keys() == vars(tiny_llama().model.layers[0].mlp).keys()
    assert torch.equal(logits(unpatch(model)), truth)
    assert torch.equal(logits(sparsify(model, backend="reference")), truth)
    untouched = tiny_llama()
    before = logits(untouched)
    assert torch.equal(logits(unpatch(untouched)), before)
    assert "push_to_hub" not in vars(unpatch(sparsify(untouched)))


def test_memory_is_given_back_at_once():
    """Without waiting for the garbage collector, which does not know how much a GPU holds."""
    model = sparsify(tiny_llama())
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_optimizer_and_tied_weights_stay():
    model = tiny_llama(tie_word_embeddings=True)
    parameters = list(model.parameters())
    sparsify(model)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight


HOOKS = {
    "block": lambda mlp: mlp,
    "activation": lambda mlp: mlp.act_fn,
    "gate": lambda mlp: mlp.gate_proj,
    "up": lambda mlp: mlp.up_proj,
    "down": lambda mlp: mlp.down_proj,
}


class Recorder:
    """A hook that cannot be copied, as profilers and loggers cannot."""

    def __init__(self):
        self.shapes = []

    def __deepcopy__(self, memo):
        raise TypeError("cannot be copied")

    def hook(self, module, args, output):
        self.shapes.append(tuple(output.shape))
        return output * 2

    def pre_hook(self, module, args):
        self.shapes.append(tuple(args[0].shape))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("where", HOOKS)
def test_hooks(where, when):
    model, recorder = tiny_llama(), Recorder()
    if when == "after":
        sparsify(model)
    target = HOOKS[where](model.model.layers[0].mlp)
    handles = [target.register_forward_hook(recorder.hook), target.register_forward_pre_hook(recorder.pre_hook)]
    if when == "before":
        sparsify(model)
    stock = dense_relu(model)
    HOOKS[where](stock.model.layers[0].mlp).register_forward_hook(lambda module, args, output: output * 2)
    torch.testing.assert_close(logits(model), logits(stock))
    assert len(recorder.shapes) == 2
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(logits(model), logits(dense_relu(model)))
    assert len(recorder.shapes) == 2


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("where", HOOKS)
def test_backward_hooks(where, kind):
    model, gradients = sparsify(tiny_llama()), []
    for each in (model, dense_relu(model)):
        target = HOOKS[where](each.model.layers[0].mlp)
        getattr(target, kind)(lambda module, seen, *_: tuple(2 * gradient for gradient in seen))
        each(input_ids=ids(), labels=ids()).loss.backward()
        gradients.append([parameter.grad for parameter in each.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


GLOBAL_HOOKS = {
    "forward": ("register_module_forward_hook", lambda module, args, output: 2 * output),
    "before": ("register_module_forward_pre_hook", lambda module, args: tuple(2 * arg for arg in args)),
    "backward": ("register_module_full_backward_hook", lambda module, grads, _: tuple(2 * grad for grad in grads)),
}


@pytest.mark.parametrize("when", GLOBAL_HOOKS)
def test_hooks_on_every_module(when):
    model, x = sparsify(tiny_llama()), torch.randn(1, 12, 32)
    register, hook = GLOBAL_HOOKS[when]
    results = []
    for each in (model, dense_relu(model)):
        handle = getattr(nn.modules.module, register)(hook)
        try:
            leaf = x.clone().requires_grad_()
            y = each.model.layers[0].mlp(leaf)
            y.sum().backward()
        finally:
            handle.remove()
        results.append((y.detach(), leaf.grad))
    torch.testing.assert_close(*results)
    assert results[0][0].isfinite().all()


def test_activation_exchanged_afterwards():
    model = sparsify(tiny_llama())
    stock = dense_relu(model)
    for ffn in (model.model.layers[1].mlp, stock.model.layers[1].mlp):
        ffn.act_fn = nn.GELU()
    torch.testing.assert_close(logits(model), logits(stock))


def test_activation_that_is_a_plain_function():
    model = tiny_llama()
    for layer in model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.act_fn = nn.functional.silu
    truth = logits(dense_relu(model))
    assert torch.equal(logits(sparsify(model, backend="reference")), truth)


def through_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model)), through_file]
)
def test_copies(again):
    model = sparsify(tiny_llama(), layers=[0, 1])
    for module in (model, *model.model.layers):
        twin = again(module)
        ffns = sparse_ffns(twin)
        assert [type(ffn) for ffn in ffns] == [type(ffn) for ffn in sparse_ffns(module)]
        assert [ffn.twell.layer for ffn in ffns] == [ffn.twell.layer for ffn in sparse_ffns(module)]
    twin = again(model)
    assert torch.equal(logits(twin), logits(model))
    if again is not copy.copy:
        assert twin.push_to_hub._model() is twin
        unpatch(twin)
        assert len(sparse_ffns(model)) == 2, "a copy is a model of its own"


def test_to_device_and_back():
    model = sparsify(tiny_llama())
    model.to(torch.bfloat16).to("meta")
    assert model(input_ids=ids().to("meta")).logits.is_meta
    half = sparsify(tiny_llama()).to(torch.float16)
    assert logits(half).dtype == torch.float16


class Counter:
    """A torch.compile backend that only counts the graphs it is given."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@pytest.mark.parametrize(
    ("how", "when"),
    [
        pytest.param("wrapped", "before", marks=pytest.mark.slow),
        pytest.param("wrapped", "after", marks=pytest.mark.slow),
        pytest.param("in place", "before", marks=pytest.mark.slow),
        ("blocks in place", "before"),
        ("blocks wrapped", "before"),
    ],
)
def test_compile(how, when):
    torch._dynamo.reset()
    model, counter = tiny_llama(num_hidden_layers=1).eval(), Counter()
    options = {"fullgraph": True, "backend": counter}
    target = model
    if when == "after":
        sparsify(model)
    if how == "wrapped":
        target = torch.compile(model, **options)
    elif how == "in place":
        model.compile(**options)
    else:
        for layer in model.model.layers:
            if how == "blocks in place":
                layer.mlp.compile(**options)
            else:
                layer.mlp = torch.compile(layer.mlp, **options)
    logits(target)
    if when == "before":
        assert sparsify(target) is target
    plain = sparsify(tiny_llama(num_hidden_layers=1).eval())
    torch.testing.assert_close(logits(target), logits(plain))
    graphs = counter.graphs
    logits(target)
    assert counter.graphs == graphs > 0, "steady calls do not compile again"
    assert len(sparse_ffns(target)) == 1
    unpatch(target)
    torch.testing.assert_close(logits(target), logits(plain))


PLAIN_TRANSFORMERS = """
import sys
sys.modules["hf_twell"] = None  # makes importing it an error
import torch
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    inputs, expected = torch.load(folder + "/expected.pt")
    with torch.no_grad():
        assert torch.equal(model(input_ids=inputs).logits, expected), folder
    print(type(model).__name__, model.dtype, model.config.hidden_act, model.config.twell)
"""


@pytest.mark.slow
def test_saved_model_is_a_stock_one(stories_model, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "dense")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16)
    models = {
        "stories": sparsify(stories_model, backend="reference"),
        "bf16": sparsify(half, layers=[2], backend="reference"),
        "tied": unpatch(sparsify(tiny_llama(tie_word_embeddings=True, mlp_bias=True).eval())),
    }
    folders = [str(tmp_path / name) for name in models]
    for folder, model in zip(folders, models.values(), strict=True):
        model.save_pretrained(folder)
        torch.save((ids(), logits(model)), f"{folder}/expected.pt")
        config = json.loads(Path(folder, "config.json").read_text())
        assert (config["architectures"], config["hidden_act"]) == (["LlamaForCausalLM"], "relu")
    done = finished(sys.executable, "-c", PLAIN_TRANSFORMERS, *folders)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "LlamaForCausalLM torch.float32 relu {'layers': None, 'version': 1}",
        "LlamaForCausalLM torch.bfloat16 relu {'layers': [2], 'version': 1}",
        "LlamaForCausalLM torch.float32 relu {'layers': None, 'version': 1}",
    ]

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    assert not sparse_ffns(again)
    sparsify(again, backend="reference")
    assert [ffn.twell.layer for ffn in sparse_ffns(again)] == [2]
    assert torch.equal(logits(again), logits(models["bf16"]))
    assert len(sparse_ffns(sparsify(again, layers=range(3)))) == 3


def test_adapters_that_were_put_on_before_count():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False)
    models = []
    for base in (tiny_llama(mlp_bias=True), dense_relu(tiny_llama(mlp_bias=True))):
        torch.manual_seed(1)
        models.append(peft.get_peft_model(base, config).eval())
    model, twin = models
    assert sparsify(model) is model
    torch.testing.assert_close(logits(model), logits(twin))
    with model.disable_adapter(), twin.disable_adapter():
        torch.testing.assert_close(logits(model), logits(twin))
    merged = model.merge_and_unload()
    assert len(sparse_ffns(merged)) == 3
    torch.testing.assert_close(logits(unpatch(merged)), logits(twin.merge_and_unload()))


def test_a_block_that_is_trained_as_a_copy_counts_once():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        sparsify(tiny_llama()), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["mlp"])
    )
    assert [ffn.twell.layer for ffn in sparse_ffns(model)] == [0, 1, 2]
    assert all(parameter.requires_grad for ffn in sparse_ffns(model) for parameter in ffn.parameters())
    first = sparse_ffns(model)
    model.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["mlp"]))
    model.add_adapter("attention", peft.LoraConfig(target_modules=["q_proj"]))
    assert sparse_ffns(model) == first, "the first adapter is still active"
    for name in ("other", "attention"):
        model.set_adapter(name)
        density, ffns = measure_sparsity(model, [ids()])["density"], sparse_ffns(model)
        assert len(ffns) == 3
        assert not set(ffns) & set(first)
        penalty = L1Penalty(model, 1.0)
        for batch in penalty.micro_batches([{"input_ids": ids(), "labels": ids()}]):
            model(**batch).loss.backward()
        assert penalty.report()["density"] == pytest.approx(density)


@pytest.mark.parametrize("what", ["mlp", "gate_proj", "down_proj"])
def test_blocks_that_are_trained_as_copies_convert(what):
    peft = pytest.importorskip("peft")
    model, config = tiny_llama(), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=[what])
    truth = logits(dense_relu(model))
    model = peft.get_peft_model(model, config)
    for _ in range(2):
        assert sparsify(model) is model
        torch.testing.assert_close(logits(model), truth)
    assert [ffn.twell.layer for ffn in sparse_ffns(model)] == [0, 1, 2]
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), truth)
    sparsify(model, layers=[1])
    assert [ffn.twell.layer for ffn in sparse_ffns(model)] == [1]
    torch.testing.assert_close(logits(unpatch(model)), truth)
    assert not any(isinstance(module, SparseFfn) for module in model.modules())


@pytest.mark.parametrize("when", ["before", "after"])
def test_fsdp2_of_each_block(when, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = tiny_llama()
        truth = logits(dense_relu(model))
        if when == "after":
            sparsify(model)
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer.mlp, mesh=mesh)
        sparsify(model)
        assert all(isinstance(ffn, FSDPModule) for ffn in sparse_ffns(model))
        assert len(sparse_ffns(model)) == 3
        torch.testing.assert_close(logits(model), truth)
    finally:
        torch.distributed.destroy_process_group()
