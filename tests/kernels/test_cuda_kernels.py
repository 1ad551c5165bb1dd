"""The CUDA kernels on a GPU: every path, dtype, size and density against an exact result; streams, graphs, compile."""

import functools
import itertools
import math
import threading

import pytest
import torch
from torch import library

from hf_twell.ops import api, build, reference, toolchain
from tests.ffn_cases import FEW_PAIRS, make_case, relative_rms


def _missing() -> str:
    """What this machine lacks. A compilation that fails is no reason to skip: it fails the tests."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA GPU"
    try:
        if not any(build.find_libraries("cuda")):
            toolchain.nvcc()
    except toolchain.BuildError as error:
        return str(error)
    return ""


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_missing()), reason=_missing())]
PATHS = ("decode", "sm90", "portable")
DTYPES = (torch.bfloat16, torch.float16)
NAMES = ("x", "w_up", "w_down", "w_gate", "b_up", "b_down", "b_gate")
POISON_MIB = 512


@pytest.fixture(autouse=True)
def exact_fp32():
    # Sets the old switch and the new one, which a Trainer with `tf32` sets alone: reading one then fails.
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    monkeypatch.setenv("HF_TWELL_CUDA_PATH", request.param)
    if request.param == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the sm90 path needs a GPU of compute capability 9.0")
    return request.param


def sizes(path, *tokens):
    """Those that the path can take."""
    return [count for count in tokens if path != "decode" or count <= 64]


def on_gpu(case, device="cuda"):
    return {name: None if tensor is None else tensor.to(device) for name, tensor in case.items()}


def gpu_case(*args, **options):
    return on_gpu(make_case(*args, **options))


@functools.cache
def wide_case(tokens, hidden, intermediate, density):
    """In fp32, made once: the processor takes seconds for it."""
    return gpu_case(tokens, hidden, intermediate, density, torch.float32)


def first_tokens(case, count):
    return case | {"x": case["x"][:count]}


def by_columns(case):
    return case | {"w_down": case["w_down"].t().contiguous().t()}


def scattered_case(tokens, hidden, intermediate, density, dtype):
    """Every token has active neurons of its own, and as many as chance gives it. The bias sets the density."""
    g = torch.Generator("cuda").manual_seed(tokens)

    def randn(*shape):
        return torch.randn(*shape, generator=g, device="cuda")

    threshold = 2**0.5 * torch.erfinv(torch.tensor(1 - 2 * density)).item()
    case = {
        "x": randn(tokens, hidden),
        "w_up": randn(intermediate, hidden) * hidden**-0.5,
        "w_down": randn(hidden, intermediate) * intermediate**-0.5,
        "w_gate": randn(intermediate, hidden) * hidden**-0.5,
        "b_gate": torch.full((intermediate,), -threshold, device="cuda"),
        "b_up": None,
        "b_down": None,
    }
    return {name: None if tensor is None else tensor.to(dtype) for name, tensor in case.items()}


def patterned_case(active_TF, hidden, dtype):
    """Just these pairs are active: a column of x for each token decides. hidden > tokens."""
    tokens, intermediate = active_TF.shape
    case = scattered_case(tokens, hidden, intermediate, 0.5, torch.float32)
    case["b_gate"] = None
    case["x"][:, :tokens] = torch.eye(tokens, device="cuda")
    case["w_gate"] *= 0.1
    case["w_gate"][:, :tokens] = torch.where(active_TF.t(), 2.0, -2.0)
    return {name: None if tensor is None else tensor.to(dtype) for name, tensor in case.items()}


def poison():
    """Memory that the allocator hands out next, in large blocks and small, is full of NaN, or of -1 as integers.

    So is shared memory, where a product of NaN matrices has lain on every multiprocessor.
    """
    nan = torch.full((4096, 4096), math.nan, dtype=torch.bfloat16, device="cuda")
    torch.mm(nan, nan)
    del nan
    torch.cuda.empty_cache()
    blocks = [torch.full((POISON_MIB << 20,), 255, dtype=torch.uint8, device="cuda")]
    blocks += [torch.full((1 << 19,), 255, dtype=torch.uint8, device="cuda") for _ in range(64)]
    del blocks


@torch.no_grad()
def cuda_ffn(case):
    return api.ffn(**case, backend="cuda")


@torch.no_grad()
def assert_as_good_as_eager(case, y=None):
    """At most twice the error of same-dtype eager PyTorch against fp32; zero where that is zero; two runs alike."""
    dtype = case["x"].dtype
    if y is None:
        poison()
        y = cuda_ffn(case)
        # A NaN that both runs give fails below.
        torch.testing.assert_close(cuda_ffn(case), y, rtol=0, atol=0, equal_nan=True, msg="two runs differ")
    wide = {name: None if tensor is None else tensor.float() for name, tensor in case.items()}
    truth, eager = reference.ffn(**wide), reference.ffn(**case)
    assert (y.shape, y.dtype, y.device) == (eager.shape, dtype, eager.device)
    assert y.is_contiguous()
    assert not y.isnan().any()
    dead = ~truth.any(-1)
    assert not y[dead].any(), "tokens whose result is zero must be exactly zero"
    if not truth.any():
        return
    first, bias = (case["w_up"], case["b_up"]) if case["w_gate"] is None else (case["w_gate"], case["b_gate"])
    pairs = (torch.nn.functional.linear(case["x"], first, bias) > 0).sum()
    bound = max(2 * relative_rms(eager, truth), 2**-21)
    if pairs < 64:
        bound = max(bound, FEW_PAIRS[dtype])
    error = relative_rms(y, truth)
    assert error <= bound, f"error {error:.2e}, at most {bound:.2e} is allowed"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.0, "one", 0.005, 0.02, 0.5, 1.0])
def test_every_path_is_as_good_as_eager(path, dtype, density):
    for tokens in sizes(path, 0, 1, 2, 3, 4, 15, 63, 64, 65, 199, 257, 4097):
        assert_as_good_as_eager(gpu_case(tokens, 72, 344, density, dtype))


@pytest.mark.parametrize(("hidden", "intermediate"), [(8, 16), (33, 70), (64, 1), (100, 129), (576, 1536), (1000, 999)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_sizes_biases_no_gate_and_both_orders_of_down(path, dtype, hidden, intermediate):
    for gated, biases, columns in (
        (True, True, False),
        (True, False, True),
        (False, True, True),
        (False, False, False),
    ):
        case = gpu_case(257, hidden, intermediate, 0.05, dtype, gated=gated, biases=biases)
        if columns:
            case = by_columns(case)
        for tokens in sizes(path, 1, 15, 64, 65, 257):
            assert_as_good_as_eager(first_tokens(case, tokens))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(896, 4864), (2048, 5632), (100, 65536), (16384, 520), (3584, 18944)]
)
def test_wide_blocks(path, dtype, hidden, intermediate):
    tokens = 4097 if hidden * intermediate < 2**24 else 300
    for density in (0.005, 1.0):
        wide = wide_case(tokens, hidden, intermediate, density)
        case = by_columns({name: None if tensor is None else tensor.to(dtype) for name, tensor in wide.items()})
        for count in sizes(path, 1, 3, 4, 16, 64, 199, tokens):
            assert_as_good_as_eager(first_tokens(case, count))


@pytest.mark.parametrize("density", [0.005, 0.02, 0.2, 0.5])
def test_tokens_that_share_no_neurons(path, density):
    for dtype in DTYPES:
        for tokens in sizes(path, 1, 2, 3, 4, 5, 33, 64, 300, 1000):
            assert_as_good_as_eager(by_columns(scattered_case(tokens, 1024, 3072, density, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [896, 2048, 4096])
def test_tiles_at_the_borders_of_how_they_are_multiplied(path, dtype, hidden):
    """Tiles of 40 or 48 neurons choose by pairs (64), active neurons (16 and 32) and their share (three quarters)."""
    if path != "decode":
        pytest.skip("up to 64 tokens")
    g = torch.Generator("cuda").manual_seed(0)
    intermediate = 5632

    def chosen(*shape, share):
        return torch.rand(*shape, generator=g, device="cuda") < share

    for tokens in (5, 16, 33, 64):
        patterns = [chosen(tokens, intermediate, share=64 / (tokens * 43))]
        for share in (0.35, 0.55, 0.75):
            hot_F = chosen(intermediate, share=share)
            patterns.append(chosen(tokens, intermediate, share=0.5) & hot_F)
        for active_TF in patterns:
            case = patterned_case(active_TF, hidden, dtype)
            assert ((case["x"] @ case["w_gate"].t() > 0) == active_TF).all()
            assert_as_good_as_eager(case)


@pytest.mark.parametrize(
    ("hidden", "intermediate"),
    [(896, 4864), (2048, 5632), (4096, 3200), (16384, 520), (1536, 8960), (4096, 14336), (8192, 7000)],
)
def test_every_cluster_that_shares_down_proj(hidden, intermediate):
    """Of 1, 2, 3, 4 and 8 thread blocks, which find room beside those of the kernel ahead or not (`few_splits`)."""
    for tokens, dtype in itertools.product((3, 8, 9, 33, 64), DTYPES):
        assert_as_good_as_eager(by_columns(scattered_case(tokens, hidden, intermediate, 0.05, dtype)))


def test_the_largest_block(path):
    if torch.cuda.get_device_properties(0).total_memory < 60 << 30:
        pytest.skip("needs a GPU of 60 GiB")
    case = by_columns(scattered_case(70, 16384, 65536, 0.005, torch.bfloat16))
    for tokens in sizes(path, 1, 64, 70):
        assert_as_good_as_eager(first_tokens(case, tokens))


@pytest.mark.parametrize("tokens", [65_537, 131_072])
@pytest.mark.parametrize("density", [0.02, 1.0])
def test_more_tokens_than_sixteen_bits_count(path, tokens, density):
    if path == "decode":
        pytest.skip("takes up to 64 tokens")
    assert_as_good_as_eager(gpu_case(tokens, 40, 344, density, torch.bfloat16))


def test_one_full_token_among_empty_ones(path):
    """It overflows every bounded buffer of its own, and may cost the others nothing in exactness."""
    for dtype in DTYPES:
        for tokens in sizes(path, 1, 64, 300, 4097):
            for density in (0.0, 0.01):
                case = gpu_case(tokens, 40, 5632, density, dtype)
                case["x"][tokens // 2, :8] = (-torch.eye(8)[0] - float(density > 0)).to(dtype)
                assert (case["x"][tokens // 2] @ case["w_gate"].t() > 0).all()
                assert_as_good_as_eager(case)


def test_dense_tokens_between_sparse_ones(path):
    for tokens, first, last in [(64, 16, 32), (2304, 256, 512), (2304, 300, 1100)]:
        if tokens in sizes(path, tokens):
            case = gpu_case(tokens, 40, 1376, 0.01, torch.bfloat16, biases=True)
            case["x"][first:last, :8] *= -1
            assert_as_good_as_eager(case)


def test_nan_gates_count_as_active(path):
    for tokens in sizes(path, 6, 64, 199, 1025):
        case = gpu_case(tokens, 40, 172, 0.01, torch.bfloat16)
        case["x"][5] = float("nan")
        y, others = cuda_ffn(case), torch.arange(tokens) != 5
        assert y[5].isnan().all()
        assert_as_good_as_eager(case | {"x": case["x"][others]}, y[others])
        case["w_gate"][7] = float("nan")
        assert cuda_ffn(case).isnan().all(), "every token has a NaN gate"


def test_strided_misaligned_and_many_dimensional_inputs(path):
    for tokens in sizes(path, 60, 240):
        case = gpu_case(tokens, 40, 172, 0.05, torch.bfloat16, biases=True)
        flat = cuda_ffn(case)
        strided = case["x"].view(3, 4, -1, 40).transpose(0, 2).contiguous().transpose(0, 2)
        assert not strided.is_contiguous()
        assert torch.equal(cuda_ffn(case | {"x": strided}), flat.view(3, 4, -1, 40))
        shifted = {}
        for name, tensor in case.items():  # contiguous, but at no 16-byte border
            buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
            shifted[name] = buffer[1:].view(tensor.shape).copy_(tensor)
        assert torch.equal(cuda_ffn(shifted), flat)
        everywhere = case["x"][:1].expand(tokens, 40)
        assert torch.equal(cuda_ffn(case | {"x": everywhere}), cuda_ffn(case | {"x": everywhere.contiguous()}))


def test_repeats_are_equal_in_deterministic_mode(path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        for tokens in sizes(path, 1, 64, 1000):
            case = scattered_case(tokens, 512, 2048, 0.05, torch.bfloat16)
            first = cuda_ffn(case)
            assert all(torch.equal(cuda_ffn(case), first) for _ in range(5))
    finally:
        torch.use_deterministic_algorithms(False)


def test_fp32_is_pytorchs():
    for tokens in (0, 1, 70, 300):
        assert_as_good_as_eager(gpu_case(tokens, 33, 70, 0.05, torch.float32, biases=True))


def test_current_stream(path):
    """The call waits for its own stream's work, and for that alone."""
    stream = torch.cuda.Stream()
    for tokens in sizes(path, 16, 200):
        case = gpu_case(tokens, 256, 1024, 0.05, torch.bfloat16)
        expected, x = cuda_ffn(case), torch.zeros_like(case["x"])
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # ten milliseconds
            x.copy_(case["x"])
            y = cuda_ffn(case | {"x": x})
        stream.synchronize()
        assert torch.equal(y, expected)


def test_two_threads_with_models_of_their_own(path):
    cases = [gpu_case(tokens, 256, width, 0.05, torch.bfloat16) for tokens, width in [(48, 1024), (64, 3000)]]
    expected, equal = [cuda_ffn(case) for case in cases], []

    def use(case, truth):
        with torch.cuda.stream(torch.cuda.Stream()):
            equal.append(all(torch.equal(cuda_ffn(case), truth) for _ in range(100)))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=use, args=pair) for pair in zip(cases, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True, True], "a thread that raises appends nothing"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu(path):
    case = make_case(48, 72, 344, 0.05, torch.bfloat16)
    first = cuda_ffn(on_gpu(case))
    second = cuda_ffn(on_gpu(case, "cuda:1"))
    assert second.device == torch.device("cuda:1")
    assert torch.equal(first.cpu(), second.cpu())
    assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="x is on cuda:1 and w_up on cuda:0; move them to one device"):
        cuda_ffn(on_gpu(case) | {"x": case["x"].to("cuda:1")})


def test_nothing_waits_for_the_device(path):
    for tokens in sizes(path, 1, 64, 1000):
        case = gpu_case(tokens, 72, 344, 0.05, torch.bfloat16)
        cuda_ffn(case)
        torch.cuda.set_sync_debug_mode("error")
        try:
            cuda_ffn(case)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_captured_graph_follows_its_inputs(path):
    """Replayed with other tokens and another density than it was captured with."""
    for tokens in sizes(path, 1, 64, 1000):
        sparse = by_columns(scattered_case(tokens, 512, 2048, 0.01, torch.bfloat16))
        dense = by_columns(scattered_case(tokens, 512, 2048, 0.6, torch.bfloat16))
        case = {name: None if tensor is None else tensor.clone() for name, tensor in sparse.items()}
        case = by_columns(case)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            cuda_ffn(case)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = cuda_ffn(case)
        for now in (sparse, dense, sparse):
            for name, tensor in now.items():
                if tensor is not None:
                    case[name].copy_(tensor)
            graph.replay()
            assert_as_good_as_eager(now, y)
            assert torch.equal(y, cuda_ffn(now)), "as the same call outside the graph"
        graph.replay()
        again = y.clone()
        graph.replay()
        assert torch.equal(y, again)


@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate"),
    [*((tokens, 2048, 5632) for tokens in (1, 2, 3, 4, 8, 9, 16, 64, 128)), (1, 4096, 4096), (300, 1024, 3072)],
)
def test_calls_of_a_chain_overlap_and_change_nothing(tokens, hidden, intermediate, threshold):
    """Captured chains on four streams at a time: each replay gives bit by bit what single calls give.

    A call's kernels start before those of the call ahead have ended, and share their workspace. With four streams they
    also wait for multiprocessors, so that some thread blocks give up waiting for others that have not started.
    """
    layers, streams, replays = 24, 4, 60
    g = torch.Generator("cuda").manual_seed(tokens)

    def randn(*shape, scale):
        return (torch.randn(*shape, generator=g, device="cuda") * scale).bfloat16()

    blocks = [
        {
            "w_up": randn(intermediate, hidden, scale=hidden**-0.5),
            "w_gate": randn(intermediate, hidden, scale=hidden**-0.5),
            "w_down": randn(intermediate, hidden, scale=intermediate**-0.5).t(),
            "b_up": randn(intermediate, scale=0.5),
            "b_gate": randn(intermediate, scale=0.25) - threshold,
            "b_down": randn(hidden, scale=0.01),
        }
        for _ in range(layers)
    ]
    x = randn(tokens, hidden, scale=1.0)
    y, expected = x, []
    for block in blocks:
        y = cuda_ffn(block | {"x": y})
        torch.cuda.synchronize()
        expected.append(y)
    assert y.isfinite().all()
    expected = torch.stack(expected).view(torch.int16)
    wrong = torch.zeros(streams, dtype=torch.int64, device="cuda")
    graphs = []
    for index in range(streams):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y, results = x, []
            for block in blocks:
                y = cuda_ffn(block | {"x": y})
                results.append(y)
            wrong[index].add_((torch.stack(results).view(torch.int16) != expected).sum())
            for result in results:
                result.fill_(math.nan)
        graphs.append((stream, graph))
    torch.cuda.synchronize()
    for _ in range(replays):
        for stream, graph in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0] * streams


def test_compiles_without_breaks_and_recompiles():
    case = by_columns(gpu_case(200, 72, 344, 0.05, torch.bfloat16))

    @torch.no_grad()
    def twice(x):
        return cuda_ffn(case | {"x": x}) * 2

    torch._dynamo.reset()
    compiled = torch.compile(twice, fullgraph=True, dynamic=True)
    assert torch.equal(compiled(case["x"]), twice(case["x"]))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (3, 64, 130):
            x = case["x"][:tokens].clone()
            assert torch.equal(compiled(x), twice(x))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_opcheck(gated, dtype):
    for tokens in (10, 100):
        case = gpu_case(tokens, 40, 172, 0.05, dtype, gated=gated, biases=True)
        case["x"] = case["x"].view(2, -1, 40)
        for arguments in (case, by_columns(case)):
            plain = [arguments[name] for name in NAMES]
            library.opcheck(torch.ops.hf_twell.infer.default, plain)
            library.opcheck(torch.ops.hf_twell.ffn.default, (*plain, None, None, None, 0))


def test_what_cannot_be_computed_is_refused_before_any_launch(monkeypatch):
    case = gpu_case(70, 40, 172, 0.05, torch.bfloat16)
    with pytest.raises(ValueError, match="x is on cpu and w_up on cuda:0; move them to one device"):
        api.ffn(**(case | {"x": case["x"].cpu()}))
    with pytest.raises(ValueError, match=r"dtype torch\.float64; the kernels take float32, bfloat16 and float16"):
        cuda_ffn({name: None if t is None else t.double() for name, t in case.items()})
    monkeypatch.setenv("HF_TWELL_CUDA_PATH", "decode")
    with pytest.raises(RuntimeError, match="HF_TWELL_CUDA_PATH=decode cannot compute 70 tokens on a GPU of"):
        cuda_ffn(case)
    monkeypatch.setenv("HF_TWELL_CUDA_PATH", "fast")
    with pytest.raises(RuntimeError, match=r"HF_TWELL_CUDA_PATH=fast cannot .* allowed here: .*portable"):
        cuda_ffn(case)
    monkeypatch.delenv("HF_TWELL_CUDA_PATH")
    assert_as_good_as_eager(case)


def test_autocast_computes_in_its_dtype():
    case = gpu_case(70, 40, 172, 0.05, torch.float32, biases=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = cuda_ffn(case)
    assert_as_good_as_eager({name: tensor.bfloat16() for name, tensor in case.items()}, y)


def test_memory_of_a_long_prefill():
    """The dense block holds gate, up and h, each (T, F); at most a quarter of that is allowed beside y."""
    case = by_columns(scattered_case(65_536, 512, 5632, 0.005, torch.bfloat16))

    def peak(function):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = function(case)
        return torch.cuda.max_memory_allocated() - before - y.numel() * y.element_size()

    with torch.no_grad():
        assert peak(cuda_ffn) <= 0.25 * peak(lambda case: reference.ffn(**case))
