"""The CUDA kernels where x is quantized (dynamic fp8), on a GPU: against fp64 on the same quantized x.

No better sums are asked for than those of torch._scaled_mm, which torchao calls: see `eager_by_rows`.
"""

import copy
import functools
import threading

import pytest
import torch
from torch import library

from hf_twell.blocks.calls import takes_kernels
from hf_twell.blocks.modeling import SparseFfn, sparse_ffns
from hf_twell.dispatch.limits import limit
from hf_twell.models.quantizing import make_dynamic, quantize_block
from hf_twell.ops import api, build, reference
from hf_twell.ops.reference import dequantized_rows, quantized_rows
from tests.conftest import tiny_llama
from tests.ffn_cases import make_case, relative_rms
from tests.kernels import test_cuda_kernels
from tests.kernels.test_cuda_kernels import DTYPES, by_columns, on_gpu, poison, scattered_case
from tests.kernels.test_cuda_models import on_reference, sparse_model, tokens_of
from tests.kernels.test_cuda_quantized import assert_goes_by_its_stored_density
from tests.ops.test_quantized_x import awkward_rows, same
from tests.quantized_cases import (
    assert_as_good_as_eager,
    assert_compiles_and_replays,
    assert_nan_weights_reach_their_own_sums,
    assert_scales_reach_their_own_sums,
    eager_by_rows,
    quantized,
    quantized_case,
    strided,
    truth_of,
)

pytestmark = [
    *test_cuda_kernels.pytestmark,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="kernels quantize x on GPUs of compute capability 9.0",
    ),
]
ORDER = ("x", "w_up", "w_down", "w_gate", "b_up", "b_down", "b_gate", "s_up", "s_down", "s_gate")
TOKENS = (1, 64, 65, 127, 128, 129, 1000, 4097)
SIZES = ((144, 769), (576, 1536), (2048, 5632), (144, 5632), (2048, 769))


@pytest.fixture(autouse=True, scope="module")
def library_of_kernels():
    assert build.status("cuda", build=True).available


@torch.no_grad()
def dynamic_ffn(**case):
    return api.ffn(**case, quantize_x=True, backend="cuda")


@torch.no_grad()
def plain_ffn(**case):
    return api.ffn(**case, backend="cuda")


def case_of(*args, **options):
    return on_gpu(quantized_case(*args, kind="fp8", **options))


@functools.cache
def wide_case(hidden, width, density, dtype, gated, biases, by_column):
    """Of the most tokens, made once: the processor takes seconds for it."""
    return case_of(max(TOKENS), hidden, width, density, dtype, gated=gated, biases=biases, by_column=by_column)


def assert_right(case):
    poison()
    many = case["x"].numel() > limit("kDecodeMaxTokens") * case["x"].shape[-1]
    assert_as_good_as_eager(dynamic_ffn, case, quantize_x=True, other_eager=eager_by_rows if many else None)
    torch.testing.assert_close(dynamic_ffn(**case), dynamic_ffn(**case), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("hidden", "width"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("gated", "biases", "by_column"), [(True, False, True), (True, True, False), (False, True, True)]
)
def test_awkward_shapes(hidden, width, dtype, gated, biases, by_column):
    case = wide_case(hidden, width, 0.02, dtype, gated, biases, by_column)
    for tokens in TOKENS:
        assert_right(case | {"x": case["x"][:tokens]})
    wide_case.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.0, "one", 0.2, 1.0])
@pytest.mark.parametrize(("hidden", "width"), [(144, 769), (576, 1536), (2048, 5632)])
def test_every_density(dtype, density, hidden, width):
    for tokens in (65, 129, 1000):
        for gated in (True, False):
            assert_right(case_of(tokens, hidden, width, density, dtype, gated=gated, by_column=True))


@pytest.mark.parametrize(("hidden", "width"), [(16, 1), (16, 70), (48, 129), (16384, 520), (4096, 14336), (112, 65536)])
def test_narrow_and_wide_blocks(hidden, width):
    for tokens in (65, 300):
        for biases in (True, False):
            assert_right(case_of(tokens, hidden, width, 0.03, torch.bfloat16, biases=biases, by_column=True))


@pytest.mark.parametrize("density", [0.005, 0.05, 0.5])
def test_tokens_that_share_no_neurons(density):
    """Gates here are sums of many terms, some of them nearly 0, so that the mask itself follows the quantized x."""
    for dtype in DTYPES:
        for tokens in (65, 500, 4097):
            assert_right(quantized(by_columns(scattered_case(tokens, 1024, 3072, density, dtype)), "fp8"))


def test_no_tokens():
    case = case_of(0, 144, 769, 0.05, torch.bfloat16)
    assert dynamic_ffn(**case).shape == (0, 144)


def test_few_tokens_stay_as_they_are():
    case = case_of(limit("kDecodeMaxTokens") + 1, 576, 1536, 0.05, torch.bfloat16, by_column=True)
    for tokens in (1, 2, 8, 16, 33, limit("kDecodeMaxTokens")):
        few = case | {"x": case["x"][:tokens]}
        assert torch.equal(dynamic_ffn(**few), plain_ffn(**few)), tokens
    assert not torch.equal(dynamic_ffn(**case), plain_ffn(**case))
    odd = case_of(64, 33, 70, 0.05, torch.bfloat16)  # whose weights no kernel reads
    assert torch.equal(dynamic_ffn(**odd), plain_ffn(**odd))


def test_gates_are_of_the_quantized_x():
    """What is active follows x_hat and not x: neurons that only one of the two switches on."""
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(300, 256, generator=g, device="cuda").bfloat16()
    x_hat = dequantized_rows(*quantized_rows(x), torch.float64)
    ones, width = torch.ones(512, 1, device="cuda"), 512
    w_gate = torch.zeros(width, 256, device="cuda")
    columns = torch.arange(width, device="cuda") % 256
    w_gate[torch.arange(width, device="cuda"), columns] = 1.0
    w_gate[torch.arange(width, device="cuda"), (columns + 1) % 256] = -1.0
    gate = x_hat @ w_gate.double().t()
    other = x.double() @ w_gate.double().t()
    assert ((gate > 0) != (other > 0)).sum() > 50
    w_down = torch.eye(256, width, device="cuda").to(torch.float8_e4m3fn)
    case = {"x": x, "w_up": w_gate.to(torch.float8_e4m3fn), "s_up": ones, "w_down": w_down, "s_down": ones[:256]}
    y = dynamic_ffn(**case)
    torch.testing.assert_close(y.double(), gate.relu()[:, :256], rtol=2**-7, atol=2**-6)
    assert torch.equal(y[gate[:, :256] == 0], torch.zeros_like(y[gate[:, :256] == 0])), "differences of equal values"


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_is_itself(dtype):
    """x of 28 alone in its row has scale 1 / 16 and value 448: as gate, as up and as down, subnormal weights too."""
    q = torch.arange(-128, 128, dtype=torch.int8, device="cuda")
    q[q & 0x7F == 0x7F] = 0  # NaN, which would reach all that it is summed up with
    numbers, e4m3 = q.view(torch.float8_e4m3fn).float(), torch.float8_e4m3fn
    x = torch.zeros(256, 256, dtype=dtype, device="cuda")
    rows = torch.arange(256, device="cuda")
    x[rows, rows * 37 % 256] = 28.0
    value = (28 * numbers[rows * 37 % 256]).to(dtype)
    one, ones = torch.ones(16, device="cuda"), torch.ones(256, device="cuda")
    spread, rows_of_q = torch.eye(256, 16, device="cuda").to(e4m3), q.repeat(16, 1).view(e4m3)
    y = dynamic_ffn(x=x, w_up=rows_of_q, w_down=spread, s_up=one, s_down=ones)
    assert torch.equal(y[:, :16], value.relu()[:, None].expand(-1, 16)), "as up alone"
    gate = torch.full((16, 256), 1 / 16, device="cuda").to(e4m3)  # 28 / 16 times 4 / 7
    y = dynamic_ffn(x=x, w_up=rows_of_q, w_down=spread, w_gate=gate, s_up=one, s_down=ones, s_gate=one)
    assert torch.equal(y[:, :16], (value.float() * 1.75).to(dtype)[:, None].expand(-1, 16)), "as up behind a gate"
    y = dynamic_ffn(x=x, w_up=gate, w_down=spread, w_gate=rows_of_q, s_up=one, s_down=ones, s_gate=one)
    assert torch.equal(y[:, :16], (value.relu().float() * 1.75).to(dtype)[:, None].expand(-1, 16)), "as gate"
    lone = torch.zeros(256, 16, dtype=torch.int8, device="cuda")
    lone[:, 3] = q
    y = dynamic_ffn(x=x, w_up=gate, w_down=lone.view(e4m3), s_up=one, s_down=ones)
    assert torch.equal(y, (1.75 * numbers).to(dtype).expand(256, -1)), "as down"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(65, 16), (300, 144), (300, 272), (8400, 272), (8400, 1040)])
def test_down_is_rounded_once(tokens, hidden, dtype):
    """One neuron a token, whose h is 1.75: y is its column of w_down times scales, of which many leave fp16's range."""
    g = torch.Generator("cuda").manual_seed(hidden)
    codes = torch.randint(-128, 128, (hidden, hidden), generator=g, device="cuda").to(torch.int8)
    codes[codes & 0x7F == 0x7F] = 0
    scales = torch.randn(hidden, 1, generator=g, device="cuda").mul(8).exp2() * 2.0**-12
    rows = torch.arange(tokens, device="cuda")
    x = torch.zeros(tokens, hidden, dtype=dtype, device="cuda")
    x[rows, rows % hidden] = 28.0
    w_up = (torch.eye(hidden, device="cuda") / 16).to(torch.float8_e4m3fn)
    case = {"x": x, "w_up": w_up, "s_up": torch.ones(hidden, device="cuda"), "s_down": scales}
    w_down = codes.view(torch.float8_e4m3fn)
    expected = ((1.75 * w_down.float()) * scales).to(dtype).t()[rows % hidden]
    for stored in (w_down, w_down.t().contiguous().t()):
        poison()
        assert torch.equal(dynamic_ffn(**case, w_down=stored), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_on_a_gpu_are_torchaos_and_a_cpus(dtype):
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.quantization.quantize_.common import KernelPreference

    x = awkward_rows(dtype)
    values, scales = quantized_rows(x.cuda())
    on_cpu = quantized_rows(x)
    assert same(values.cpu(), on_cpu[0])
    assert same(scales.cpu(), on_cpu[1])
    theirs = quantization.Float8Tensor.from_hp(x.cuda(), kernel_preference=KernelPreference.TORCH)
    ordinary = theirs.scale.flatten() != 0
    assert same(values[ordinary].cpu(), theirs.qdata[ordinary].cpu())
    assert same(scales[ordinary].cpu(), theirs.scale[ordinary].cpu())


def assert_same_but_order(y, expected):
    """Equal but for a rare rounding: y's sums run over all neurons that any of 128 tokens activates, in their order."""
    assert y.isfinite().all()
    assert relative_rms(y, expected) < torch.finfo(y.dtype).eps / 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_tokens(dtype):
    """Zeros, tiny and huge rows beside ordinary ones: each token as accurate as if it were alone with its like."""
    case = case_of(240, 272, 769, 0.05, dtype, biases=True, by_column=True)
    rows = awkward_rows(dtype).cuda()
    x = case["x"].view(4, 60, 272)
    x[0, :, :257] = rows
    x[0, :, 257:] = 0
    finite = x[0].isfinite().all(1)
    y = dynamic_ffn(**case | {"x": x})
    assert y[0, ~finite].isnan().all(), "NaN and infinity reach all of their token"
    assert y[0, [4, 5]].isfinite().all(), "tokens of zeros have their biases alone"
    alone = case | {"x": case["x"][60:]}
    assert_same_but_order(y[1:].reshape(180, 272), dynamic_ffn(**alone))  # and none of another's
    truth = truth_of(case | {"x": x}, quantize_x=True)
    eager = eager_by_rows(**case | {"x": x})
    for row in torch.arange(60)[finite.cpu()].tolist():
        wide = truth[0, row]
        if not wide.abs().max() < torch.finfo(dtype).max / 2:  # h overflows in this type, as eager's does
            continue
        bound = max(3 * relative_rms(eager[0, row], wide), 2**-6 if dtype == torch.bfloat16 else 2**-8)
        assert relative_rms(y[0, row], wide) <= bound, row


def test_a_token_of_zeros_is_its_biases():
    case = case_of(200, 144, 769, 0.05, torch.bfloat16, by_column=True)
    case["x"][[0, 77, 199]] = 0
    y = dynamic_ffn(**case)
    assert not y[[0, 77, 199]].any()
    assert_right(case)
    case = case_of(200, 144, 769, 0.05, torch.bfloat16, biases=True, by_column=True)
    case["x"][::3] = 0
    assert_right(case)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("gated", [True, False])
def test_nan_and_infinite_tokens_stay_alone(value, gated):
    case = case_of(300, 144, 769, 0.05, torch.bfloat16, gated=gated, by_column=True)
    plain = dynamic_ffn(**case)
    for token in (0, 127, 128, 299):
        broken = case | {"x": case["x"].clone()}
        broken["x"][token, 17] = value
        y = dynamic_ffn(**broken)
        assert y[token].isnan().all()
        kept = torch.arange(300) != token
        assert_same_but_order(y[kept], plain[kept])


@pytest.mark.parametrize("by_column", [True, False])
@pytest.mark.parametrize(("tokens", "hidden", "width"), [(65, 144, 769), (300, 576, 1536)])
def test_scales_of_zero_nan_and_infinity(tokens, hidden, width, by_column):
    case = case_of(tokens, hidden, width, 0.06, torch.bfloat16, by_column=by_column)
    assert_scales_reach_their_own_sums(dynamic_ffn, case, assert_right)


@pytest.mark.parametrize("tokens", [65, 300])
def test_nan_weights_reach_what_they_are_summed_with(tokens):
    assert_nan_weights_reach_their_own_sums(dynamic_ffn, case_of(tokens, 144, 769, 0.06, torch.bfloat16))


def test_noncontiguous_x_scales_and_weights():
    case = case_of(180, 144, 769, 0.05, torch.bfloat16, biases=True)
    flat = dynamic_ffn(**case)
    assert torch.equal(dynamic_ffn(**strided(case)).flatten(0, 2), flat)
    by_column = case | {"x": case["x"].t().contiguous().t()}
    assert torch.equal(dynamic_ffn(**by_column), flat)


@pytest.mark.parametrize("tokens", [33, 65, 1000])
def test_opcheck_compilation_and_graphs(tokens):
    case = case_of(tokens, 144, 769, 0.05, torch.bfloat16, biases=True, by_column=True)
    # PyTorch cannot compare arguments in fp8, as its other check wants.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = [case.get(name) for name in ORDER]
    library.opcheck(torch.ops.hf_twell.infer.default, (*arguments, True), test_utils=checks)
    assert_compiles_and_replays(dynamic_ffn, case)


def test_a_captured_graph_follows_its_density():
    sparse, dense = (
        quantized(by_columns(scattered_case(1000, 512, 2048, density, torch.bfloat16)), "fp8")
        for density in (0.01, 0.6)
    )
    case = {name: None if tensor is None else tensor.clone() for name, tensor in sparse.items()}
    dynamic_ffn(**case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = dynamic_ffn(**case)
    for now in (sparse, dense, sparse):
        for name, tensor in now.items():
            if tensor is not None:
                case[name].copy_(tensor)
        graph.replay()
        assert torch.equal(y, dynamic_ffn(**now)), "as the same call outside the graph"


def test_one_compiled_graph_for_all_numbers_of_tokens():
    """Kernels see for themselves how many tokens there are."""
    case, graphs = case_of(300, 144, 769, 0.05, torch.bfloat16, by_column=True), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda **inputs: dynamic_ffn(**inputs), backend=count, fullgraph=True)
    for tokens in (65, 300, 64, 2, 63, 129, 17, 200):
        part = case | {"x": case["x"][:tokens].clone()}
        torch._dynamo.mark_dynamic(part["x"], 0)
        assert torch.equal(compiled(**part), dynamic_ffn(**part))
    assert len(graphs) == 1


def test_the_current_stream_and_two_threads():
    cases = [
        case_of(tokens, 256, width, 0.05, torch.bfloat16, by_column=True)
        for tokens, width in ((200, 1024), (500, 3000))
    ]
    expected, equal, stream = [dynamic_ffn(**case) for case in cases], [], torch.cuda.Stream()
    x = torch.zeros_like(cases[0]["x"])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # ten milliseconds
        x.copy_(cases[0]["x"])
        y = dynamic_ffn(**cases[0] | {"x": x})
    stream.synchronize()
    assert torch.equal(y, expected[0])

    def use(case, truth):
        with torch.cuda.stream(torch.cuda.Stream()):
            equal.append(all(torch.equal(dynamic_ffn(**case), truth) for _ in range(100)))

    threads = [threading.Thread(target=use, args=pair) for pair in zip(cases, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True, True]


def test_autocast_quantizes_what_it_casts_to():
    case = case_of(200, 144, 769, 0.05, torch.float32, biases=True)
    cast = {name: t.bfloat16() if name[:2] in ("x", "b_") else t for name, t in case.items()}
    with torch.autocast("cuda", torch.bfloat16):
        y = dynamic_ffn(**case)
    assert torch.equal(y, dynamic_ffn(**cast))


def test_what_kernels_do_not_take():
    for options, message in (
        ((200, 40, 172, 0.05, torch.bfloat16), "D = 40"),
        ((200, 48, 172, 0.05, torch.float32), "float32"),
    ):
        case = case_of(*options)
        says = f"backend 'cuda' cannot compute this: x of more than 64 tokens.*{message}"
        with pytest.raises(ValueError, match=says):
            dynamic_ffn(**case)
        with torch.no_grad():
            assert torch.equal(api.ffn(**case, quantize_x=True), reference.ffn(**case, quantize_x=True))


def block_of(dynamic_down):
    """A block in torchao's dynamic fp8 and an x of 300 tokens, so sparse that kernels are chosen for 65 tokens, too."""
    pytest.importorskip("torchao.quantization")
    from hf_twell.bench.workload import patched_block

    case = on_gpu(make_case(300, 80, 528, 0.005, torch.bfloat16))
    ffn = patched_block(case["w_gate"], case["w_up"], case["w_down"])
    quantize_block(ffn, ffn.twell.form, "fp8-dynamic")
    if dynamic_down:  # as torchao's own config has it
        make_dynamic(ffn.down_proj.weight)
    return ffn.eval(), case["x"]


@torch.no_grad()
@pytest.mark.parametrize("dynamic_down", [True, False])
@pytest.mark.parametrize("tokens", [20, 65, 300])
def test_a_block_of_torchao(dynamic_down, tokens, monkeypatch):
    ffn, x = block_of(dynamic_down)
    x, calls, fused = x[:tokens], [], SparseFfn._compute
    monkeypatch.setattr(SparseFfn, "_compute", lambda *args: calls.append(1) or fused(*args))
    held = {name: getattr(ffn, f"{name}_proj").weight for name in ("gate", "up", "down")}
    case = {"x": x, "b_up": None, "b_gate": None, "b_down": None}
    case |= {f"w_{name}": weight.qdata.clone() for name, weight in held.items()}
    case |= {f"s_{name}": weight.scale for name, weight in held.items()}
    truth = truth_of(case, quantize_x=True)
    for _ in range(3):
        y = ffn(x)
    assert calls
    assert takes_kernels(ffn, x)
    assert held["down"].qdata.stride() == (1, 80)
    assert torch.equal(y, dynamic_ffn(**case | {"w_down": held["down"].qdata}))
    eager = [reference.ffn(**case, quantize_x=True), eager_by_rows(**case) if tokens > 64 else y]
    assert relative_rms(y, truth) <= 2 * max(relative_rms(each, truth) for each in eager)
    stock = ffn._through_submodules(x, None)
    assert stock.isfinite().all()
    assert relative_rms(stock, truth) < (0.1 if dynamic_down or tokens <= 64 else 0.01)
    graph, captured = torch.cuda.CUDAGraph(), copy.deepcopy(ffn)
    captured(x)
    with torch.cuda.graph(graph):
        y_graph = captured(x)
    graph.replay()
    assert torch.equal(y_graph, y)


@torch.no_grad()
@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("dynamic_down", [True, False])
def test_a_compiled_block_goes_by_its_stored_density(dynamic_down, evaluated):
    """`evaluated`: down_proj lies by columns, as an eager call has left it."""
    assert_goes_by_its_stored_density(*block_of(dynamic_down), evaluated, (20,))


@torch.no_grad()
def test_tokens_without_active_neurons_are_no_nan_by_torchaos_linears():
    ffn, x = block_of(True)
    x[3:7] = 0
    y = ffn._through_submodules(x, None)
    assert y.isfinite().all()
    assert not y[3:7].any()


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("dynamic_down", [True, False])
def test_whole_models(name, dynamic_down):
    """Prefill of more than 64 tokens and decoding of few: forward and generation, beside the reference backend."""
    pytest.importorskip("torchao.quantization")
    model = sparse_model(name, backend="cuda")
    for ffn in sparse_ffns(model):
        quantize_block(ffn, ffn.twell.form, "fp8-dynamic")
        if dynamic_down:
            make_dynamic(ffn.down_proj.weight)
    for shape in ((2, 20), (2, 50), (3, 100)):
        found = model(input_ids=tokens_of(*shape)).logits
        assert found.isfinite().all()
        by_reference = _by_reference(model, tokens_of(*shape))
        assert relative_rms(found, by_reference) < 0.03
    prompt = tokens_of(2, 50)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    generated = model.generate(prompt, **options, attention_mask=torch.ones_like(prompt))
    assert generated.shape == (2, 62)
    steps = model(input_ids=generated).logits[:, 49:-1]
    if (eos := model.generation_config.eos_token_id) is not None:
        steps[..., eos] = -float("inf")  # which nothing may be before so many
    best = steps.max(-1).values
    chosen = steps.gather(-1, generated[:, 50:, None]).squeeze(-1)
    assert (best - chosen).max() <= 0.1 * best.max(), "what was decoded is what prefill finds likely"


def _by_reference(model, ids):
    """The model's logits where each block computes its meaning in plain PyTorch."""
    model, fused = on_reference(model), SparseFfn._through_submodules

    def meant(ffn, x, l1):
        held = {name: getattr(ffn, f"{name}_proj").weight for name in ("up", "down", "gate")}
        values = [weight.qdata for weight in held.values()]
        scales = {f"s_{name}": weight.scale for name, weight in held.items()}
        return reference.ffn(x, *values, **scales, quantize_x=True)

    SparseFfn._through_submodules = meant
    try:
        return model(input_ids=ids).logits
    finally:
        SparseFfn._through_submodules = fused


@torch.no_grad()
def test_a_model_compiled_without_breaks():
    pytest.importorskip("torchao.quantization")
    model = tiny_llama(hidden_size=64, intermediate_size=688, num_hidden_layers=2).bfloat16().cuda().eval()
    import hf_twell

    model = hf_twell.sparsify(model)
    for ffn in sparse_ffns(model):
        quantize_block(ffn, ffn.twell.form, "fp8-dynamic")
    expected = [model(input_ids=tokens_of(2, length)).logits for length in (10, 50)]
    compiled = torch.compile(model, fullgraph=True)
    for length, logits in zip((10, 50), expected, strict=True):
        assert relative_rms(compiled(input_ids=tokens_of(2, length)).logits, logits) < 0.05
