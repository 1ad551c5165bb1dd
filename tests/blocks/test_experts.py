"""Routed experts by the CPU's kernels: exact at any density and routing, and taken where that is faster."""

import copy
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, Llama4ForCausalLM, Llama4TextConfig

from hf_twell import measure_sparsity, sparsify, unpatch
from hf_twell.blocks.architectures import ExpertsSite, find_ffns
from hf_twell.measure.inference import blocks_on_kernels
from hf_twell.ops import api, experts
from tests.conftest import ids, logits
from tests.mixtures import by_hand, mixture

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(api.resolve("auto", "cpu") != "cpu", reason="needs the CPU's kernels"),
]


def routing(kind: str, tokens: int, number: int, per_token: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    if kind == "one":
        return torch.arange(per_token).expand(tokens, -1)
    if kind == "last":
        return number - 1 - torch.arange(per_token).expand(tokens, -1)
    return torch.stack(
        [torch.randperm(number, generator=g)[:per_token] for _ in range(tokens)] or [torch.zeros(per_token)]
    ).long()[:tokens]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(6, 2, 96, 64), (3, 1, 41, 33), (5, 5, 7, 200)])
@pytest.mark.parametrize("tokens", [0, 1, 9, 63])
@pytest.mark.parametrize("kind", ["spread", "one", "last"])
@pytest.mark.parametrize("shift", [0.0, -2.0, -100.0, 100.0])  # half active, few, none and all
def test_exact(dtype, sizes, tokens, kind, shift):
    number, per_token, width, hidden = sizes
    g = torch.Generator().manual_seed(1)
    x, up, down = (
        torch.randn(*s, generator=g) for s in ((tokens, hidden), (number, 2 * width, hidden), (number, hidden, width))
    )
    x[:, 0], up[:, :width, 0] = 1.0, shift * hidden**0.5
    index = routing(kind, tokens, number, per_token)
    weight = torch.rand(tokens, per_token, generator=g)
    x, weight, up, down = (t.to(dtype) for t in (x, weight, up / hidden**0.5, down / width**0.5))
    wanted = experts.experts(x.double(), index, weight.double(), up.double(), down.double())
    eager = experts.experts(x, index, weight, up, down).double() - wanted
    for w_down in (down, down.mT.contiguous().mT):
        y = experts.by_expert(x, index, weight, up, w_down, backend="cpu")
        assert (y.dtype, y.shape) == (dtype, x.shape)
        bound = 2**-7 if dtype == torch.bfloat16 else 2**-10 if dtype == torch.float16 else 1e-6
        assert (y.double() - wanted).norm() <= max(2 * eager.norm(), bound * wanted.norm())
        if shift == -100.0:
            assert not y.any()


def sparse_mixture(name="olmoe"):
    """With few active neurons: gates that most tokens do not pass."""
    model = mixture(name)
    for site in find_ffns(model):
        if isinstance(site, ExpertsSite):
            site.form.weights(site.module)[0].data[:, 2:40] = 0.0
    return model


def test_a_sparse_model_goes_by_kernels_and_a_denser_one_does_not():
    model, twin = sparse_mixture(), by_hand(sparse_mixture())
    state = {key: weight.clone() for key, weight in model.state_dict().items()}
    down = model.model.layers[0].mlp.experts.down_proj
    sparsify(model, backend="cpu")
    torch.testing.assert_close(logits(model), logits(twin))
    with torch.no_grad():
        assert blocks_on_kernels(model, ids()) == 2
    assert down.stride()[-2:] == (1, 32), "down lies by columns, in the same parameter"
    assert all(torch.equal(weight, state[key]) for key, weight in model.state_dict().items())
    for twice in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        torch.testing.assert_close(logits(twice), logits(twin))
    unpatch(model)
    assert down.is_contiguous()
    assert torch.equal(logits(model), logits(twin))
    dense = sparsify(mixture())
    logits(dense)
    with torch.no_grad():
        assert blocks_on_kernels(dense, ids()) == 0


def test_experts_too_small_for_kernels_keep_their_memory_order():
    """Grouped matmuls are slower where down lies by columns."""
    model = sparsify(sparse_mixture())
    for _ in range(3):
        logits(model)
    experts = model.model.layers[0].mlp.experts
    assert experts.twell_state.pairs.density < 0.1
    assert experts.down_proj.is_contiguous()


@pytest.mark.parametrize(
    ("name", "weight"), [("olmoe", "0.mlp.experts.down_proj"), ("llama4_text", "1.feed_forward.experts.gate_up_proj")]
)
def test_saves_what_lies_by_columns(name, weight, tmp_path):
    model, twin = sparsify(sparse_mixture(name), backend="cpu"), by_hand(sparse_mixture(name))
    torch.testing.assert_close(logits(model), logits(twin))
    weight = model.model.layers.get_parameter(weight)
    assert weight.stride()[-2:] == (1, 32)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(twin))
    model.train()
    assert weight.is_contiguous()


@pytest.mark.parametrize("backend", ["cpu", "auto"])  # by kernels, and as so small experts are: by matmuls
@pytest.mark.parametrize("per_token", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [-2.0, 0.0, 100.0])
@torch.no_grad()
def test_llama_4s_mixture_is_exact(backend, per_token, dtype, shift):
    """A layer's whole mixture, beside its own class in the same type and in float64, its router as it is by then."""
    torch.manual_seed(0)
    config = Llama4TextConfig(
        hidden_size=64, intermediate_size=96, num_local_experts=6, num_experts_per_tok=1,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=96, head_dim=16,
    )  # fmt: skip
    model = Llama4ForCausalLM(config).eval()
    mixture = model.model.layers[0].feed_forward
    for weight in mixture.parameters():
        weight.normal_(std=0.1)
    mixture.shared_expert.down_proj.weight.zero_()  # so that the routed experts' errors are all there are
    mixture.experts.gate_up_proj[:, 0, :96] = shift
    x = torch.randn(2, 9, 64).index_fill(2, torch.tensor(0), 1.0)
    model, x = model.to(dtype), x.to(dtype)
    plain = by_hand(model).model.layers[0].feed_forward
    truth = copy.deepcopy(plain).double()
    sparsify(model, backend=backend)
    mixture.router.top_k = plain.router.top_k = per_token
    for tokens in (x, x, x[:1, :2]):
        # The router's choice and scores are those of the type, and not in question.
        scores, _ = plain.router(tokens.flatten(0, 1))
        truth.router.forward = lambda _, scores=scores: (scores.double(), None)
        (y, _), (eager, _), (wanted, _) = mixture(tokens), plain(tokens), truth(tokens.double())
        assert (mixture.experts.gate_up_proj.stride()[1:] == (1, 64)) == (backend == "cpu")
        assert (y.dtype, y.shape) == (dtype, eager.shape)
        bound = 2**-7 if dtype == torch.bfloat16 else 1e-6
        assert (y - wanted).norm() <= max(2 * (eager - wanted).norm(), bound * wanted.norm())


@torch.no_grad()
def test_matmuls_of_llama_4_compute_a_tokens_own_expert_alone():
    """Its own class computes all of them for every token."""
    flops = {}
    for backend in ("reference", "auto"):
        mixture = sparsify(sparse_mixture("llama4_text"), backend=backend).model.layers[1].feed_forward
        mixture(x := torch.randn(32, 32))  # a first call looks at the density, too
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_flops=True) as profile:
            mixture(x)
        flops[backend] = sum(event.flops for event in profile.key_averages() if event.key in ("aten::mm", "aten::bmm"))
    each = 32 * 2 * mixture.experts.gate_up_proj[0].numel() * 3 // 2  # of one expert for all tokens
    assert flops["reference"] - flops["auto"] == (mixture.num_experts - mixture.top_k) * each
    assert flops["auto"] < (mixture.top_k + 3) * each, "beside them there are a router and a shared expert"


@torch.no_grad()
def test_the_routing_of_llama_4_is_looked_up_where_experts_are_computed_one_by_one():
    ids, found = torch.arange(8).view(1, 8), []
    for backend in ("reference", "cpu"):
        model = sparsify(sparse_mixture("llama4_text"), backend=backend)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(ids)
        found.append({event.key: event.count for event in profile.key_averages()}["aten::topk"])
    assert found[1] == 2 * found[0], "the router's, and once for each of its layers"


def test_hooks_and_compiled_graphs_take_the_stock_way():
    model = sparsify(sparse_mixture(), backend="cpu")
    block = model.model.layers[0].mlp.experts
    handle = block.act_fn.register_forward_hook(lambda *_: None)
    x, index = torch.randn(3, 32), routing("spread", 3, 6, 2)
    with torch.no_grad():
        assert not block.takes_kernels(x, index)
        handle.remove()
        assert block.takes_kernels(x, index)
        compiled, weight = torch.compile(block, backend="eager"), torch.ones(3, 2)
        torch.testing.assert_close(compiled(x, index, weight), block(x, index, weight))
    assert measure_sparsity(model, [ids()])["density"] < 0.2
    with pytest.raises(ValueError, match="float64"):
        experts.by_expert(
            x.double(), index, x[:, :2].double(), *(w.double() for w in block.parameters()), backend="cpu"
        )


@pytest.mark.parametrize("name", ["qwen2_moe", "llama4_text"])
def test_generates_as_the_stock_model_does(name):
    model, twin = sparsify(sparse_mixture(name)), by_hand(sparse_mixture(name))
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids())}
    assert torch.equal(model.generate(ids(), **options), twin.generate(ids(), **options))
