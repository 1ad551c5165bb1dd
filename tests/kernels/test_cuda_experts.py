"""Routed experts by CUDA kernels: any routing, density and size against exact results; graphs, streams, compile."""

import itertools
import math

import pytest
import torch
from torch import library
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_twell.blocks.architectures import EXPERTS
from hf_twell.blocks.experts import SparseExperts
from hf_twell.blocks.modeling import FfnSettings, FfnState, sparse_class
from hf_twell.dispatch import limits
from hf_twell.dispatch.limits import limit
from hf_twell.ops import build, experts
from tests.ffn_cases import FEW_PAIRS, relative_rms
from tests.kernels.test_cuda_kernels import exact_fp32, poison  # noqa: F401

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

HALVES = (torch.bfloat16, torch.float16)
THRESHOLDS = {0.0: 100.0, 0.1: 1.2816, 1.0: -100.0}  # of a normal gate, by density
# E, K, F, D: rows at 16-byte borders and not, neurons in whole sixteens and not
SIZES = ((8, 2, 48, 64), (6, 2, 33, 72), (5, 3, 17, 41), (128, 8, 96, 256), (3, 3, 1, 2056), (300, 1, 20, 8))
TOKENS = (1, 2, 7, 8, 16, 33, 64, 250)
ROUTINGS = ("spread", "one", "few")


@pytest.fixture(autouse=True)
def built():
    assert build.status("cuda", build=True).available


def routing(kind, tokens, number, per_token, seed=0):
    """Each token's experts: drawn evenly, the same for all tokens, or mostly the first few."""
    g = torch.Generator("cuda").manual_seed(seed)
    if kind == "one":
        return torch.arange(number - per_token, number, device="cuda").expand(tokens, -1)
    weights = torch.ones(number, device="cuda")
    if kind == "few":
        weights = 0.3 ** torch.arange(number, device="cuda").clamp(max=per_token + 3).float()
    return torch.multinomial(weights.expand(tokens, -1), per_token, generator=g)


def weights_of(number, width, hidden, density, dtype, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    up = torch.randn(number, 2 * width, hidden, generator=g, device="cuda") * hidden**-0.5
    down = torch.randn(number, hidden, width, generator=g, device="cuda") * width**-0.5
    up[:, :width, 0] = -THRESHOLDS[density]
    return up.to(dtype), down.to(dtype).mT.contiguous().mT


def inputs_of(tokens, per_token, hidden, dtype, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=g, device="cuda")
    x[:, 0] = 1.0
    share = torch.rand(tokens, per_token, generator=g, device="cuda").softmax(-1)
    return x.to(dtype), share.to(dtype)


def kernels(x, index, share, w_gate_up, w_down):
    gate, up = w_gate_up.chunk(2, dim=1)
    return torch.ops.hf_twell.experts(x, index, share, gate, up, w_down)


def assert_exact(y, x, index, share, w_gate_up, w_down):
    """At most twice the error of eager PyTorch of the same type; zeros where all is inactive."""
    truth = experts.experts(x.float(), index, share.float(), w_gate_up.float(), w_down.float())
    eager = experts.experts(x, index, share.to(x.dtype), w_gate_up, w_down)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert y.is_contiguous()
    assert y.isfinite().all()
    if not truth.any():
        assert not y.any()
    else:
        bound = max(2 * relative_rms(eager, truth), FEW_PAIRS[x.dtype] / 2)
        assert relative_rms(y, truth) <= bound


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("density", THRESHOLDS)
@pytest.mark.parametrize("dtype", HALVES)
def test_exact(sizes, density, dtype):
    number, per_token, width, hidden = sizes
    weights = weights_of(number, width, hidden, density, dtype)
    for tokens, kind in itertools.product(TOKENS, ROUTINGS):
        x, share = inputs_of(tokens, per_token, hidden, dtype, seed=tokens)
        index = routing(kind, tokens, number, per_token, seed=tokens)
        poison()
        y = kernels(x, index, share, *weights)
        assert_exact(y, x, index, share, *weights)


@pytest.mark.parametrize("shape", [(128, 8, 768, 2048), (8, 2, 14336, 4096)])
@pytest.mark.parametrize("tokens", [1, 8, 64, 256])
def test_real_sizes_and_twenty_runs_alike(shape, tokens):
    number, per_token, width, hidden = shape
    weights = weights_of(number, width, hidden, 0.1, torch.bfloat16)
    x, share = inputs_of(tokens, per_token, hidden, torch.bfloat16)
    index = routing("spread", tokens, number, per_token)
    first = kernels(x, index, share, *weights)
    for _ in range(19):
        assert torch.equal(kernels(x, index, share, *weights), first)
    used = index.unique()  # so that fp32 finds room
    index = torch.searchsorted(used, index)
    assert_exact(first, x, index, share, *(weight[used] for weight in weights))


@pytest.mark.parametrize("tokens", [1, 9, 64, 256])
def test_as_many_pairs_as_there_may_be_and_experts_that_repeat(tokens):
    per_token = limit("kCudaExpertPairs") // tokens
    weights = weights_of(7, 40, 72, 0.1, torch.bfloat16)
    x, share = inputs_of(tokens, per_token, 72, torch.bfloat16)
    index = torch.randint(7, (tokens, per_token), device="cuda")
    assert_exact(kernels(x, index, share, *weights), x, index, share, *weights)


def test_operands_of_other_forms():
    x, share = inputs_of(9, 2, 72, torch.bfloat16)
    index, (gate_up, down) = routing("spread", 9, 6, 2), weights_of(6, 40, 72, 0.1, torch.bfloat16)
    gate, up = gate_up.chunk(2, dim=1)
    expected = torch.ops.hf_twell.experts(x, index, share, gate, up, down)
    wide = torch.full((6, 90, 88), math.nan, device="cuda", dtype=x.dtype)
    wide[:, 3:83, 8:80] = gate_up
    off = torch.full((gate_up.numel() + 1,), math.nan, device="cuda", dtype=x.dtype)[1:].view(gate_up.shape)
    off.copy_(gate_up)
    apart = torch.full((9, 80), math.nan, device="cuda", dtype=x.dtype)[:, 8:]
    apart.copy_(x)
    for changed in (
        {"index": index.int()},
        {"index": index.t().contiguous().t()},
        {"x": apart},
        {"w_down": down.contiguous()},
        {"w_gate": wide[:, 3:43, 8:80], "w_up": wide[:, 43:83, 8:80]},
        {"w_gate": gate.contiguous(), "w_up": off[:, 40:]},
        {"share": share.float()},
    ):
        given = {"x": x, "index": index, "share": share, "w_gate": gate, "w_up": up, "w_down": down} | changed
        assert torch.equal(torch.ops.hf_twell.experts(**given), expected), list(changed)


def test_experts_that_are_none_add_nothing():
    x, share = inputs_of(33, 3, 72, torch.bfloat16)
    index, weights = routing("spread", 33, 6, 3), weights_of(6, 40, 72, 0.1, torch.bfloat16)
    gone = torch.rand(index.shape, device="cuda") < 0.4
    gone[5] = True
    outside = torch.where(gone, torch.where(torch.rand(gone.shape, device="cuda") < 0.5, -1, 6), index)
    poison()
    y = kernels(x, outside, share, *weights)
    assert_exact(y, x, index, share.masked_fill(gone, 0), *weights)
    assert not y[5].any()


def test_a_token_of_nan_leaves_the_others():
    x, share = inputs_of(16, 2, 72, torch.bfloat16)
    index, weights = routing("one", 16, 6, 2), weights_of(6, 40, 72, 0.1, torch.bfloat16)
    expected = kernels(x, index, share, *weights)
    x[3] = math.nan
    y = kernels(x, index, share, *weights)
    assert y[3].isnan().all()
    others = torch.arange(16, device="cuda") != 3
    torch.testing.assert_close(y[others], expected[others])


@pytest.mark.parametrize("tokens", [1, 8, 64, 256])
def test_layers_in_a_graph_give_what_calls_one_by_one_give(tokens):
    """Where kernels start early: six layers, other tokens and routing in each of 20 replays."""
    layers = [weights_of(32, 96, 256, 0.1, torch.bfloat16, seed) for seed in range(6)]
    x, share = inputs_of(tokens, 4, 256, torch.bfloat16)
    indices = torch.stack([routing("spread", tokens, 32, 4, seed) for seed in range(6)])

    def run(wait):
        y = x
        for index, weights in zip(indices, layers, strict=True):
            y = kernels(y, index, share, *weights)
            y = y / y.float().square().mean(-1, keepdim=True).sqrt().add(1e-3).to(y.dtype)
            wait()
        return y

    run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(lambda: None)
    for seed in range(20):
        for tensor, values in zip((x, share), inputs_of(tokens, 4, 256, torch.bfloat16, seed), strict=True):
            tensor.copy_(values)
        kind = ROUTINGS[seed % 3]
        indices.copy_(torch.stack([routing(kind, tokens, 32, 4, 100 * seed + layer) for layer in range(6)]))
        result.fill_(math.nan)
        graph.replay()
        assert torch.equal(result, run(torch.cuda.synchronize))
        assert result.isfinite().all()


def test_chains_without_anything_between_and_on_two_streams():
    weights = weights_of(32, 96, 256, 0.1, torch.bfloat16)
    x, share = inputs_of(16, 4, 256, torch.bfloat16)
    indices = [routing("spread", 16, 32, 4, seed) for seed in range(8)]

    def run(wait=lambda: None):
        y, all_y = x, []
        for index in indices:
            y = kernels(y, index, share, *weights) + x
            all_y.append(kernels(x, index, share, *weights))
            wait()
        return [y, *all_y]

    expected = run(torch.cuda.synchronize)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(10):
        results = []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results.append(run())
        torch.cuda.synchronize()
        for result in results:
            assert all(map(torch.equal, result, expected))


def block_of(backend, dtype=torch.bfloat16):
    sizes = {"hidden_size": 256, "moe_intermediate_size": 96, "num_experts": 32, "num_experts_per_tok": 4}
    block = Qwen3MoeExperts(Qwen3MoeConfig(**sizes, hidden_act="relu")).eval()
    for name, weight in zip(("gate_up_proj", "down_proj"), weights_of(32, 96, 256, 0.1, dtype), strict=True):
        setattr(block, name, torch.nn.Parameter(weight.contiguous(), requires_grad=False))
    block.config._experts_implementation = "grouped_mm"
    if backend:
        block.__class__ = sparse_class(Qwen3MoeExperts, SparseExperts)
        block.twell, block.twell_state = FfnSettings("experts", 0, EXPERTS, backend), FfnState()
    return block


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 64, 600])
def test_blocks_take_them_where_they_are_asked_for(tokens):
    stock, asked, auto = (block_of(backend) for backend in ("", "cuda", "auto"))
    x, share = inputs_of(tokens, 4, 256, torch.bfloat16)
    index = routing("spread", tokens, 32, 4)
    assert asked.takes_kernels(x, index)
    assert not auto.takes_kernels(x, index), "its density is not known yet"
    y, first = asked(x, index, share), auto(x, index, share)
    assert any(torch.equal(first, of) for of in (stock(x, index, share), y))  # kernels, if its sample came at once
    assert_exact(y, x, index, share, stock.gate_up_proj, stock.down_proj)
    assert asked.down_proj.stride()[-2:] == (1, 256)
    if tokens * 4 > limit("kCudaExpertPairs"):  # one expert after the other
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = asked(x, index, share)
    again.fill_(math.nan)
    graph.replay()
    assert torch.equal(again, y)


@torch.no_grad()
def test_deterministic_blocks_do_not_go_by_when_a_sample_arrives():
    block, stock = block_of("auto"), block_of("")
    x, share = inputs_of(64, 4, 256, torch.bfloat16)
    index = routing("spread", 64, 32, 4)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(3):
            assert torch.equal(block(x, index, share), stock(x, index, share))
            torch.cuda.synchronize()
    finally:
        torch.use_deterministic_algorithms(False)


@torch.no_grad()
@pytest.mark.parametrize(("most", "taken"), [(0.3, True), (0.02, False)])
def test_blocks_go_by_what_they_have_sampled(monkeypatch, most, taken):
    monkeypatch.setitem(limits.read(), "kCudaExpertLimits", ((math.inf, most),))
    block = block_of("auto")
    x, share = inputs_of(64, 4, 256, torch.bfloat16)
    index = routing("spread", 64, 32, 4)
    assert not block.takes_kernels(x, index)
    for _ in range(2):  # one asks for a sample, and the next finds it
        y = block(x, index, share)
        torch.cuda.synchronize()
    assert block.twell_state.pairs.density == pytest.approx(0.1, abs=0.04)
    assert block.takes_kernels(x, index) == taken
    assert_exact(block(x, index, share), x, index, share, block.gate_up_proj, block.down_proj)
    torch.testing.assert_close(block(x, index, share), y)


@torch.no_grad()
def test_a_graph_keeps_down_proj_where_it_lies():
    """A call of so many tokens goes by matmuls; a later one of few would give down_proj other memory."""
    block = block_of("auto")
    x, share = inputs_of(300, 4, 256, torch.bfloat16)
    index = routing("spread", 300, 32, 4)
    expected = block(x, index, share)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = block(x, index, share)
    address = block.down_proj.data_ptr()
    for _ in range(3):
        few = block(x[:16], index[:16], share[:16])
        torch.cuda.synchronize()
    assert block.takes_kernels(x[:16], index[:16])
    assert_exact(few, x[:16], index[:16], share[:16], block.gate_up_proj, block.down_proj)
    assert block.down_proj.data_ptr() == address
    y.fill_(math.nan)
    graph.replay()
    assert torch.equal(y, expected)


def test_what_it_does_not_take():
    x, share = inputs_of(4, 2, 64, torch.bfloat16)
    index, (gate_up, down) = routing("spread", 4, 6, 2), weights_of(6, 40, 64, 0.1, torch.bfloat16)
    gate, up = gate_up.chunk(2, dim=1)
    most = limit("kCudaExpertPairs")
    for arguments in (
        (x.float(), index, share, gate.float(), up.float(), down.float()),
        (x.half(), index, share, gate, up, down),
        (x, index.short(), share, gate, up, down),
        (x, index, share.double(), gate, up, down),
        (x, index[:3], share, gate, up, down),
        (x, index, share[:, :1], gate, up, down),
        (x, index, share, gate[:5], up, down),
        (x, index, share, gate, up, down[:, :56]),
        (x, index.cpu(), share, gate, up, down),
        (
            x[:1].repeat(most + 1, 1),
            index[:1, :1].repeat(most + 1, 1),
            share[:1, :1].repeat(most + 1, 1),
            gate,
            up,
            down,
        ),
    ):
        with pytest.raises(RuntimeError, match="hf_twell::experts takes"):
            torch.ops.hf_twell.experts(*arguments)
    assert kernels(x[:0], index[:0], share[:0], gate_up, down).shape == (0, 64)


def test_the_operator_compiles():
    x, share = inputs_of(3, 2, 64, torch.bfloat16)
    index, (gate_up, down) = routing("spread", 3, 6, 2), weights_of(6, 40, 64, 0.1, torch.bfloat16)
    given = (x, index, share, *gate_up.chunk(2, dim=1), down)
    library.opcheck(torch.ops.hf_twell.experts.default, given)
    compiled = torch.compile(lambda *tensors: torch.ops.hf_twell.experts(*tensors), fullgraph=True)
    assert torch.equal(compiled(*given), torch.ops.hf_twell.experts(*given))
