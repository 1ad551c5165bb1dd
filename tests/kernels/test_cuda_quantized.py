"""The CUDA kernels on int8 and fp8 weights, on a GPU: against fp64 on dequantized ones, as the CPU's are tested."""

import copy

import pytest
import torch
from torch import library

from hf_twell.bench.workload import make_ffn, patched_block
from hf_twell.blocks.calls import store_density, takes_kernels
from hf_twell.blocks.modeling import SparseFfn
from hf_twell.models.quantizing import CONFIGS
from hf_twell.ops import api, build, reference
from hf_twell.ops.checks import name_of
from tests.ffn_cases import make_case, relative_rms
from tests.kernels import test_cuda_kernels
from tests.kernels.test_cuda_kernels import (  # noqa: F401
    DTYPES,
    by_columns,
    on_gpu,
    path,
    patterned_case,
    poison,
    scattered_case,
    sizes,
)
from tests.kernels.test_cuda_models import runs_kernels
from tests.quantized_cases import (
    KINDS,
    assert_as_good_as_eager,
    assert_compiles_and_replays,
    assert_nan_weights_reach_their_own_sums,
    assert_scales_reach_their_own_sums,
    dense_in,
    quantize,
    quantized,
    quantized_case,
    strided,
)

pytestmark = test_cuda_kernels.pytestmark


@pytest.fixture(autouse=True, scope="module")
def library_of_kernels():
    assert build.status("cuda", build=True).available


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


ORDER = ("x", "w_up", "w_down", "w_gate", "b_up", "b_down", "b_gate", "s_up", "s_down", "s_gate")


@torch.no_grad()
def cuda_ffn(*args, **case):
    return api.ffn(*args, **case, backend="cuda")


def case_of(kind, *args, **options):
    return on_gpu(quantized_case(*args, kind=kind, **options))


def bits(values):
    """The same memory as integers, for what PyTorch does not do with fp8."""
    return values.view(torch.int8)


def assert_right(case):
    poison()
    assert_as_good_as_eager(cuda_ffn, case)
    torch.testing.assert_close(cuda_ffn(**case), cuda_ffn(**case), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.0, "one", 0.02, 0.5, 1.0])
def test_every_path_is_as_good_as_eager(kind, path, dtype, density):  # noqa: F811
    for tokens in sizes(path, 0, 1, 2, 7, 8, 9, 17, 33, 64, 65, 257):
        for by_column in (True, False):
            assert_right(case_of(kind, tokens, 80, 344, density, dtype, by_column=by_column))


# The kernels read rows of a multiple of 16 columns themselves; others are dequantized at any number of tokens.
@pytest.mark.parametrize(("hidden", "width"), [(16, 1), (16, 70), (33, 70), (72, 129), (576, 1536), (1008, 999)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_sizes_biases_no_gate_and_both_orders_of_down(kind, dtype, hidden, width):
    for gated, biases, by_column in ((True, True, False), (True, False, True), (False, True, True)):
        for tokens in (1, 15, 64, 65):
            options = {"gated": gated, "biases": biases, "by_column": by_column}
            assert_right(case_of(kind, tokens, hidden, width, 0.05, dtype, **options))


@pytest.mark.parametrize(("hidden", "width"), [(2048, 5632), (112, 65536), (16384, 520), (4096, 14336)])
def test_wide_blocks(kind, hidden, width):
    for density in (0.01, 0.3):
        case = case_of(kind, 300, hidden, width, density, torch.bfloat16, by_column=True)
        for tokens in (1, 2, 3, 8, 9, 16, 40, 64, 300):
            assert_right(case | {"x": case["x"][:tokens]})


# Hopper's kernels for 3 to 8 tokens take blocks from 2M elements a matrix on.
FEW = (3, 5, 8, 9, 15, 16, 17, 24, 33, 63, 64)


@pytest.mark.parametrize(("hidden", "width"), [(1040, 2101), (2096, 1101)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", ["one", 0.02, 0.1, 1.0])
def test_few_tokens_of_awkward_blocks(kind, dtype, hidden, width, density):
    for gated, biases in ((True, True), (True, False), (False, True)):
        case = case_of(kind, 64, hidden, width, density, dtype, gated=gated, biases=biases, by_column=True)
        for tokens in FEW:
            if density != "one":
                assert_right(case | {"x": case["x"][:tokens]})
            elif tokens > 1:
                assert_right(case_of(kind, tokens, hidden, width, density, dtype, gated=gated, biases=biases))


# On 9.0 one kernel takes the first ones whole. Beyond its sizes gate rows come by bulk copies, in one to three pieces,
# to thread blocks of one to 32 sixteens.
BY_ONE_KERNEL = [(1088, 2101), (1984, 6300), (2048, 1100), (2048, 5632)]
BY_BULK_COPIES = [(2064, 2101), (2096, 4501), (1040, 6401), (4112, 1041), (80, 65_535)]


@pytest.mark.parametrize(("hidden", "width"), BY_ONE_KERNEL + BY_BULK_COPIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_and_two_tokens_of_awkward_blocks(kind, dtype, hidden, width):
    """Rows that end early, thread blocks of unequal shares, few or all neurons active."""
    for density, gated in ((0.0, True), (0.003, True), (0.05, False), (1.0, True)):
        case = case_of(kind, 2, hidden, width, density, dtype, gated=gated, biases=gated, by_column=True)
        for tokens in (1, 2):
            assert_right(case | {"x": case["x"][:tokens]})


@pytest.mark.parametrize("density", [0.005, 0.02, 0.2, 0.5])
def test_tokens_that_share_no_neurons(kind, density):
    for dtype in DTYPES:
        for tokens in FEW:
            assert_right(quantized(by_columns(scattered_case(tokens, 1024, 3072, density, dtype)), kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [912, 2048, 4096])
def test_tiles_at_the_borders_of_how_they_are_multiplied(kind, dtype, hidden):
    """As of 16-bit weights: by pairs (64 of a tile), active neurons (16 and 32) and their share (three quarters)."""
    g = torch.Generator("cuda").manual_seed(0)

    def chosen(*shape, share):
        return torch.rand(*shape, generator=g, device="cuda") < share

    for tokens in (5, 16, 33, 64):
        patterns = [chosen(tokens, 5632, share=64 / (tokens * 43))]
        for share in (0.35, 0.55, 0.75):
            patterns.append(chosen(tokens, 5632, share=0.5) & chosen(5632, share=share))
        for active_TF in patterns:
            assert_right(quantized(patterned_case(active_TF, hidden, dtype), kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 9, 16, 20, 64, 70])
def test_every_value_is_itself(kind, dtype, tokens):
    """Also int8's -128, which has no positive counterpart, and fp8's subnormals: as gate, as up and as down."""
    q = torch.arange(-128, 128, dtype=torch.int8, device="cuda")
    if kind == "fp8":
        q[q & 0x7F == 0x7F] = 0  # NaN, which would reach all that it is summed up with
    numbers, dtype_of_weights = q.view(KINDS[kind]).float(), KINDS[kind]
    x = torch.zeros(tokens, 256, dtype=dtype, device="cuda")
    rows = torch.arange(tokens, device="cuda")
    x[rows, rows * 37 % 256] = 1.0
    value = numbers[rows * 37 % 256]
    one = torch.ones(16, device="cuda")
    spread = torch.eye(256, 16, device="cuda").to(dtype_of_weights)
    ones = torch.ones(256, device="cuda")
    rows_of_q = q.repeat(16, 1).view(dtype_of_weights)
    y = cuda_ffn(x, rows_of_q, spread, s_up=one, s_down=ones)
    assert torch.equal(y[:, :16].float(), value.relu()[:, None].expand(-1, 16)), "as up"
    gate = torch.ones(16, 256, device="cuda").to(dtype_of_weights)
    y = cuda_ffn(x, rows_of_q, spread, gate, s_up=one, s_down=ones, s_gate=one)
    assert torch.equal(y[:, :16].float(), value[:, None].expand(-1, 16)), "as up behind a gate"
    lone = torch.zeros(256, 16, dtype=torch.int8, device="cuda")
    lone[:, 3] = q
    y = cuda_ffn(x, gate, lone.view(dtype_of_weights), s_up=one, s_down=ones)
    assert torch.equal(y.float(), numbers.expand(tokens, -1)), "as down"


@pytest.mark.parametrize(
    ("tokens", "hidden", "width"),
    [(1, 48, 172), (5, 1040, 2101), (9, 48, 172), (16, 1040, 2101), (20, 48, 172), (64, 1040, 2101), (70, 48, 172)],
)
@pytest.mark.parametrize("by_column", [True, False])
def test_scales_of_zero_nan_and_infinity(kind, tokens, hidden, width, by_column):
    case = case_of(kind, tokens, hidden, width, 0.06, torch.bfloat16, by_column=by_column)
    assert_scales_reach_their_own_sums(cuda_ffn, case, assert_right)


@pytest.mark.parametrize(
    ("tokens", "hidden", "width"),
    [(1, 48, 172), (2, 1088, 2101), (5, 1040, 2101), (9, 48, 172), (20, 48, 172), (64, 1040, 2101), (70, 33, 172)],
)
def test_nan_weights_reach_what_they_are_summed_with(tokens, hidden, width):
    assert_nan_weights_reach_their_own_sums(cuda_ffn, case_of("fp8", tokens, hidden, width, 0.06, torch.bfloat16))


@pytest.mark.parametrize("tokens", [9, 20, 70])
def test_nan_inputs_stay_with_their_token(kind, tokens):
    case = case_of(kind, tokens, 48, 172, 0.01, torch.bfloat16)
    case["x"][5] = float("nan")
    y = cuda_ffn(**case)
    assert y[5].isnan().all()
    assert not torch.cat([y[:5], y[6:]]).isnan().any()


def test_noncontiguous_x_scales_and_weights(kind):
    case = case_of(kind, 60, 48, 172, 0.05, torch.bfloat16, biases=True)
    assert torch.equal(cuda_ffn(**strided(case)).flatten(0, 2), cuda_ffn(**case))


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 9, 16, 20, 64, 65, 300, 1500])
@pytest.mark.parametrize("biases", [True, False])
def test_gates_that_are_differences_of_large_terms(kind, tokens, biases):
    """As good as torchao's own product in int8, of exact values, which are scaled at the end."""
    x, *weights = make_ffn(tokens, 256, 1024, 12, dtype=torch.bfloat16, device=torch.device("cuda"))
    (w_gate, s_gate), (w_up, s_up), (w_down, s_down) = (quantize(weight, kind) for weight in weights)
    case = {"x": x, "w_up": w_up, "w_down": w_down, "w_gate": w_gate, "s_up": s_up, "s_down": s_down, "s_gate": s_gate}
    bias = None
    if biases:
        bias = torch.randn(1024, device="cuda", dtype=x.dtype)
        case |= {"b_gate": bias}

    def stock(x, values, scale, bias=None):
        y = torch.nn.functional.linear(x, values.to(x.dtype)) * scale.flatten().to(x.dtype)
        return y if bias is None else y + bias

    h = stock(x, w_gate, s_gate, bias).relu() * stock(x, w_up, s_up)
    wide = dense_in({"b_up": None, "b_down": None, "b_gate": None, **case}, torch.float64)
    truth = reference.ffn(**wide)
    ours, theirs = cuda_ffn(**case), stock(h, w_down, s_down)
    assert relative_rms(ours, truth) <= 2 * relative_rms(theirs, truth)


def test_float32(kind):
    assert_right(case_of(kind, 20, 48, 172, 0.05, torch.float32, biases=True))


@pytest.mark.parametrize("tokens", [1, 33, 130])
def test_opcheck_compilation_and_graphs(kind, tokens):
    case = case_of(kind, tokens, 48, 172, 0.05, torch.bfloat16, biases=True, by_column=True)
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if kind != "fp8":  # in which PyTorch cannot compare the arguments, as the other check wants
        checks = (*checks, "test_schema")
    library.opcheck(torch.ops.hf_twell.infer.default, [case.get(name) for name in ORDER], test_utils=checks)
    assert_compiles_and_replays(cuda_ffn, case)


def test_gradients_are_refused_by_name(kind):
    case = case_of(kind, 20, 48, 172, 0.05, torch.bfloat16)
    with pytest.raises(ValueError, match=f"gradients are wanted through {name_of(KINDS[kind])} weights"):
        api.ffn(**case | {"x": case["x"].requires_grad_()}, backend="cuda")


@pytest.fixture
def block(kind):
    """A block in torchao's int8 or fp8, 5 % of whose 520 neurons are active, and an x of 300 tokens."""
    quantization = pytest.importorskip("torchao.quantization")
    case = on_gpu(make_case(300, 80, 520, 0.05, torch.bfloat16))
    ffn = patched_block(case["w_gate"], case["w_up"], case["w_down"])
    quantization.quantize_(ffn, getattr(quantization, CONFIGS[kind])(set_inductor_config=False))
    return ffn.eval(), case["x"]


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 20, 64])
def test_a_block_of_torchao(block, tokens, monkeypatch):
    """Kernels read its values where they lie, by columns from the first call on; the answers are its own."""
    ffn, x = block
    x, calls, fused = x[:tokens], [], SparseFfn._compute
    monkeypatch.setattr(SparseFfn, "_compute", lambda *args: calls.append(1) or fused(*args))
    stock = ffn.down_proj(torch.relu(ffn.gate_proj(x)) * ffn.up_proj(x))
    read = {name: getattr(ffn, name).weight for name in ("gate_proj", "up_proj", "down_proj")}
    values = [read[name].qdata.clone() for name in ("up_proj", "down_proj", "gate_proj")]
    scales = {f"s_{name}": read[f"{name}_proj"].scale for name in ("up", "down", "gate")}
    truth = reference.ffn(x.float(), *values, **scales)
    for _ in range(3):
        y = ffn(x)
    assert calls
    assert takes_kernels(ffn, x)
    assert read["down_proj"].qdata.stride() == (1, 80)
    ours, theirs = ((each.float() - truth).norm() for each in (y, stock))
    assert ours <= 2 * theirs
    graph, captured = torch.cuda.CUDAGraph(), copy.deepcopy(ffn)
    captured(x)
    with torch.cuda.graph(graph):
        y_graph = captured(x)
    graph.replay()
    torch.testing.assert_close(y_graph, y, rtol=0, atol=0)


@torch.no_grad()
def test_a_block_that_became_dense_goes_by_its_linears(kind, block):
    ffn, x = block
    for _ in range(3):
        ffn(x)
    assert takes_kernels(ffn, x[:8])
    busy = x.clone()
    busy[:, 0] = 0  # the column that holds gates down
    gate = bits(ffn.gate_proj.weight.qdata)
    gate.abs_() if kind == "int8" else gate.bitwise_and_(0x7F)
    busy.abs_()
    for _ in range(200):
        ffn(busy)
        torch.cuda.synchronize()
    assert not takes_kernels(ffn, busy)


@torch.no_grad()
@pytest.mark.parametrize("evaluated", [False, True])
def test_a_compiled_block_goes_by_its_stored_density(block, evaluated):
    """`evaluated`: down_proj lies by columns, as an eager call has left it."""
    assert_goes_by_its_stored_density(*block, evaluated, (1, 64))


def assert_goes_by_its_stored_density(ffn, x, evaluated, few):
    """Too dense for kernels but at these numbers of tokens, where the plain block's answer may differ."""
    torch._dynamo.reset()
    if evaluated:
        ffn(x)
    plain = copy.deepcopy(ffn)
    plain.twell.backend = "reference"
    store_density([ffn], [0.5])
    compiled, compiled_plain = (torch.compile(each, fullgraph=True, dynamic=False) for each in (ffn, plain))
    for tokens in (*few, 65, 300):
        part = x[:tokens]
        y, y_plain = compiled(part), compiled_plain(part)
        assert tokens in few or torch.equal(y, y_plain)
        assert runs_kernels(lambda part=part: compiled(part)) == (tokens in few)
        assert not runs_kernels(lambda part=part: compiled_plain(part))
