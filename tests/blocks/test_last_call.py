"""Blocks in evaluation on a CPU: a call that goes the way of the last one, and all that makes it look again."""

import copy
import pickle
import sys

import pytest
import torch
from torch import nn
from transformers import Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from hf_twell.bench import workload
from hf_twell.blocks import calls, modeling
from hf_twell.blocks.architectures import FORMS
from hf_twell.dispatch import limits
from hf_twell.models.quantizing import quantize_block
from hf_twell.ops import api, build

pytestmark = pytest.mark.skipif(not build.status("cpu", build=True).available, reason="needs the CPU kernels")
SEEN = ("hook", "pre hook", "block hook", "forward", "class")  # changes that tell when they come to be called
EVERY = limits.limit("kCpuSampleCalls")
CHANGES = (*SEEN, "activation", "weight", "dtype", "training", "backend", "width")


def fused_block(w_gate, w_up, w_down):
    """`workload.patched_block` with gate and up in one linear, as Phi-3 has them."""
    sizes = {"hidden_size": w_gate.shape[1], "intermediate_size": w_gate.shape[0], "num_attention_heads": 1}
    block = Phi3MLP(Phi3Config(**sizes, hidden_act="relu")).eval()
    for linear, weight in ((block.gate_up_proj, torch.cat([w_gate, w_up])), (block.down_proj, w_down)):
        linear.weight = nn.Parameter(weight, requires_grad=False)
    block.__class__ = modeling.sparse_class(Phi3MLP)
    block.twell, block.twell_state = modeling.FfnSettings("block", 0, FORMS[1], "auto"), modeling.FfnState()
    return block


@pytest.fixture(params=["plain", "int8", "fused", "fused int8"])
def block(request):
    x, *weights = workload.make_ffn(8, 64, 300, 6.0)
    make = fused_block if request.param.startswith("fused") else workload.patched_block
    ffn = make(*weights)
    if request.param.endswith("int8"):
        pytest.importorskip("torchao")
        quantize_block(ffn, ffn.twell.form, "int8")
    return ffn, x[:2]


@torch.no_grad()
def test_later_calls_are_the_first_one_again(block):
    ffn, x = block
    first = ffn(x)
    assert ffn.twell_state.last_call is not None
    for count in range(2, 70):  # past samples of the density
        assert torch.equal(ffn(x), first)
        assert ffn.twell_state.last_call is not None
        assert ffn.twell_state.recent.look_in == (EVERY - count) % EVERY
    assert torch.equal(calls.repeat(ffn, x), first)
    with torch.enable_grad():
        assert calls.repeat(ffn, x) is None


@torch.no_grad()
def test_a_type_without_kernels_has_none_with_fewer_tokens():
    ffn = workload.patched_block(*workload.make_ffn(40, 64, 300, 150.0)[1:]).double()
    x = torch.randn(40, 64, dtype=torch.float64)
    whole = ffn(x)
    torch.testing.assert_close(ffn(x[:1]), whole[:1])


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_looks_again(block, change, monkeypatch):
    ffn, x = block
    ffn(x)
    form, seen = ffn.twell.form, []
    up = getattr(ffn, form.up)
    if change == "hook":
        up.register_forward_hook(lambda *_: seen.append(1))
    elif change == "pre hook":
        getattr(ffn, form.activation).register_forward_pre_hook(lambda *_: seen.append(1))
    elif change == "block hook":
        ffn.register_forward_hook(lambda *_: seen.append(1))
    elif change == "forward":
        old = ffn.forward
        ffn.forward = lambda x: seen.append(1) or old(x)
    elif change == "class":
        stock = type(ffn).forward
        monkeypatch.setattr(type(ffn), "forward", lambda self, x: seen.append(1) or stock(self, x))
    elif change == "activation":
        setattr(ffn, form.activation, nn.ReLU6())
    elif change == "weight":
        up.weight = nn.Parameter(torch.zeros(up.out_features, 64), requires_grad=False)
    elif change == "dtype":
        x = x.half()
    elif change == "training":
        ffn.train()
    elif change == "backend":
        ffn.twell.backend = "reference"
    elif change == "width":
        x = x[:, :32]
    assert calls.repeat(ffn, x) is None
    if change not in ("dtype", "weight", "width"):  # which do not fit
        ffn(x)
    assert seen == [1] * (change in SEEN)


@torch.no_grad()
def test_copies_know_nothing(block):
    ffn, x = block
    y = ffn(x)
    other = copy.deepcopy(ffn)
    assert other.twell_state.last_call is None
    assert torch.equal(other(x), y)
    assert pickle.loads(pickle.dumps(ffn.twell_state)).last_call is None


@torch.no_grad()
def test_new_values_are_read(block):
    """A weight that is written in place, or gets new memory, is the one that the next call computes with."""
    ffn, x = block
    y = ffn(x)
    held = ffn.down_proj.weight
    values = held if type(held) is nn.Parameter else held.qdata
    values.data = torch.zeros_like(values)
    assert calls.repeat(ffn, x) is not None
    assert y.any()
    assert not ffn(x).any()


@torch.no_grad()
def test_little_code_lies_between_a_block_and_the_operator(block):
    """Behind other work none of it is in the caches: few files, and few functions that have to return first."""
    ffn, x = block
    ffn(x)
    files, returns = trace(ffn, x)
    assert len(files) <= 6, files
    assert len(returns) <= 6, returns
    assert not {name for name in files if "hf_twell" in name} - {modeling.__file__, calls.__file__}
    # Of other tokens: the choice is made again, and nothing else.
    files, returns = trace(ffn, x[:1])
    assert ffn.twell_state.last_call.shape == x[:1].shape
    assert len({name for name in files if "hf_twell" in name}) <= 4, files
    assert len(returns) <= 30, returns


@pytest.mark.parametrize("way", ["dense", "plain"])
@torch.no_grad()
def test_a_call_that_kernels_do_not_compute_passes_as_little(way, monkeypatch):
    if way == "plain":
        monkeypatch.setitem(limits.read(), "kCpuSmallestH", 1 << 17)  # as users have it
    x, *weights = workload.make_ffn(128, 64, 300, 150.0)
    ffn = workload.patched_block(*weights)
    torch.testing.assert_close(ffn(x), ffn(x))
    assert ffn.twell_state.last_call.compute is (api.dense_ffn if way == "dense" else None)
    files, returns = trace(ffn, x)
    own = {name for name in files if "hf_twell" in name}
    assert len(own) <= 4, own
    assert len(returns) <= 6, returns
    handle = ffn.act_fn.register_forward_hook(lambda module, args, output: output * 0)
    assert not ffn(x).any()
    handle.remove()
    ffn.down_proj.weight.data = torch.zeros_like(ffn.down_proj.weight)
    assert ffn(x[:2]).shape == (2, 64)
    assert not ffn(x).any()


def trace(ffn, x) -> tuple[set[str], list[str]]:
    """The files that a call passes on its way to the operator or a linear, and the functions that return before."""
    files: set[str] = set()
    returns: list[str] = []

    def look(frame, event, arg):
        name = frame.f_code.co_filename
        if event == "call" and name.endswith(("torch/_ops.py", "nn/modules/linear.py")):
            sys.setprofile(None)
        elif event == "call":
            files.add(name)
        elif event == "return":
            returns.append(frame.f_code.co_name)

    sys.setprofile(look)
    try:
        ffn(x)
    finally:
        sys.setprofile(None)
    return files, returns


@torch.no_grad()
@pytest.mark.parametrize("cast", [False, True])
def test_other_tokens_go_as_in_a_block_that_looks_anew(cast):
    """Whose last call is forgotten: the same ways, and the same bits, at every number of tokens."""
    x, *weights = workload.make_ffn(200, 192, 600, 30.0)
    x, weights = x.float(), [weight.float() for weight in weights]
    repeating, looking = workload.patched_block(*weights), workload.patched_block(*weights)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        for tokens in (1, 2, 3, 9, 33, 64, 200, 7, 1, 0, 130, 2):
            looking.twell_state.last_call = None
            assert torch.equal(repeating(x[:tokens]), looking(x[:tokens])), tokens
            known, found = (ffn.twell_state.last_call for ffn in (repeating, looking))
            assert (known and known[:6]) == (found and found[:6]), tokens


@torch.no_grad()
def test_a_block_that_went_by_its_linears_looks_again_once_its_weights_are_of_another_type(monkeypatch):
    """As a small float32 block does at every density, and one of 8-bit weights does not."""
    pytest.importorskip("torchao")
    for name, as_users_have_it in (("kCpuCachedElements", 1 << 19), ("kCpuSmallestH", 1 << 17)):
        monkeypatch.setitem(limits.read(), name, as_users_have_it)
    x, *weights = workload.make_ffn(2, 64, 300, 6.0)
    ffn, x = workload.patched_block(*(weight.float() for weight in weights)), x.float()
    ffn(x), ffn(x)
    assert ffn.twell_state.last_call.compute is None
    quantize_block(ffn, ffn.twell.form, "int8")
    ffn(x)
    assert ffn.twell_state.last_call.compute is not None


@torch.no_grad()
def test_weights_on_no_device_are_not_read():
    """The meta device has the CPU's number."""
    x, *weights = workload.make_ffn(8, 64, 300, 6.0)
    ffn = workload.patched_block(*weights)
    for linear, size in ((ffn.gate_proj, 300), (ffn.up_proj, 300), (ffn.down_proj, 64)):
        linear.bias = torch.nn.Parameter(torch.zeros(size, dtype=x.dtype))
    ffn(x), ffn(x)
    ffn.to("meta")
    with pytest.raises(RuntimeError, match="meta"):
        ffn(x)


@torch.no_grad()
def test_small_calls_between_others_do_not_put_off_the_next_sample(monkeypatch):
    monkeypatch.setitem(limits.read(), "kCpuCachedElements", 1 << 19)  # as users have it
    x, *weights = workload.make_ffn(200, 192, 600, 6.0)
    ffn = workload.patched_block(*(weight.float() for weight in weights))
    x = x.float()
    for _ in range(3):
        ffn(x), ffn(x[:1, :1] if x.dim() == 3 else x[:1])
    sampled = ffn.twell_state.recent.density
    assert sampled < 0.1
    ffn.gate_proj.weight.zero_()
    ffn.gate_proj.weight[:, 0] = 1.0
    x[..., 0] = 1.0  # every neuron is active from now on
    for _ in range(EVERY + 1):
        ffn(x), ffn(x[:1])
    assert ffn.twell_state.recent.density > 0.9
