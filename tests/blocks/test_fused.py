"""Blocks whose gate and up are one linear: kernels read its rows where they lie; all else takes it for what it is."""

import copy

import pytest
import torch
from torch import nn
from transformers import Phi3Config, Phi3ForCausalLM

from hf_twell import measure_sparsity, sparsify
from hf_twell.blocks.architectures import find_ffns
from hf_twell.blocks.modeling import sparse_ffns
from hf_twell.train.revival import Revival
from tests.conftest import TINY, ids, logits

pytestmark = pytest.mark.numeric


def phi(**changes) -> Phi3ForCausalLM:
    torch.manual_seed(0)
    return Phi3ForCausalLM(Phi3Config(**{**TINY, "bos_token_id": 1, "eos_token_id": 2, **changes})).eval()


@pytest.mark.parametrize("backend", ["cpu", "auto"])
def test_kernels_read_views_and_gradients_reach_the_whole(backend):
    twin, model = phi(hidden_act="relu"), sparsify(phi(), backend=backend)
    block = sparse_ffns(model)[0]
    weight, operands = block.gate_up_proj.weight, block._read_weights()
    assert operands.w_gate.data_ptr() == weight.data_ptr()
    assert operands.w_up.data_ptr() == weight[52:].data_ptr()
    for _ in range(2):
        torch.testing.assert_close(logits(model), logits(twin))
    for each in (model.train(), twin.train()):
        each(input_ids=ids(), labels=ids()).loss.backward()
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
    with torch.no_grad():  # no copy that could go stale
        for each in (model.eval(), twin.eval()):
            each.model.layers[0].mlp.gate_up_proj.weight.mul_(-1)
    torch.testing.assert_close(logits(model), logits(twin))


def test_compiled_without_breaks():
    model = sparsify(phi())
    with torch.no_grad():
        compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(input_ids=ids(), use_cache=False).logits, logits(model))


def test_lora_on_the_one_linear():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["gate_up_proj", "down_proj"], init_lora_weights=False)
    models = []
    for base in (sparsify(phi(), backend="reference"), phi(hidden_act="relu")):
        torch.manual_seed(1)
        models.append(get_peft_model(base, config).eval())
    assert torch.equal(logits(models[0]), logits(models[1]))
    merged = [model.merge_and_unload() for model in models]
    assert torch.equal(logits(merged[0]), logits(merged[1]))


def test_int8_weights_are_read_by_rows():
    pytest.importorskip("torchao")
    from hf_twell.models.quantizing import quantize_block

    model = sparsify(phi())
    site = find_ffns(model)[0]
    x, plain = torch.randn(5, 32), copy.deepcopy(site.module)
    quantize_block(site.module, site.form, "int8")
    operands = site.module._read_weights()
    assert (operands.w_gate.dtype, operands.s_up.shape) == (torch.int8, (52, 1))
    with torch.no_grad():
        for linear in (plain.gate_up_proj, plain.down_proj):
            name = "gate_up_proj" if linear is plain.gate_up_proj else "down_proj"
            linear.weight = nn.Parameter(getattr(site.module, name).weight.dequantize())
        torch.testing.assert_close(site.module(x), plain(x))


def test_what_is_measured_and_revived():
    """Densities are those of F neurons, and negative gates and dead rows are the gate's."""
    dense = measure_sparsity(phi(), [ids()])
    sparse = measure_sparsity(sparsify(phi()), [ids()])
    assert [layer["intermediate_size"] for layer in sparse["layers"]] == [52] * 3
    assert dense["density"] == 1.0
    assert 0.2 < sparse["density"] < 0.8
    assert 0 < dense["negative_share"] < 0.5

    model = sparsify(phi()).train()
    ffns = sparse_ffns(model)
    revival = Revival(ffns, after=10)
    weight = ffns[0].gate_up_proj.weight
    before = weight.detach().clone()
    alive = torch.ones(52, dtype=torch.long)
    alive[7] = 0
    revival.count(torch.tensor(10), [alive, torch.ones_like(alive), torch.ones_like(alive)])
    revival.revive(torch.optim.AdamW(model.parameters()), step=1)
    assert (weight != before).any(1).nonzero().flatten().tolist() == [7]
