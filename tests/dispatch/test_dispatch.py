"""Which way a call goes: the one function that says so, and that all who compute blocks do what it says."""

import functools
import itertools
import re
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from hf_twell.bench import workload
from hf_twell.blocks import calls
from hf_twell.dispatch import key as dispatch_key
from hf_twell.dispatch import limits
from hf_twell.dispatch.activity import Activity, RecentInputs, shares_of_runs
from hf_twell.dispatch.choose import (
    choice_for,
    choices_by_tokens,
    choose,
    choose_experts,
    columns_pay,
    highest_alike,
    max_density,
    max_density_of_size,
    max_experts_density,
    sample_weight,
    takes_experts,
    too_small,
)
from hf_twell.dispatch.constant import assume_constant_result
from hf_twell.dispatch.key import CallKey, key_of
from hf_twell.dispatch.limits import limit
from hf_twell.models.quantizing import quantize_block
from hf_twell.ops import api, build, toolchain
from hf_twell.serving.vllm_plugin import operator  # noqa: F401  defines torch.ops.hf_twell_vllm.ffn
from tests.ffn_cases import ISAS, KINDS, make_case

BF16 = torch.bfloat16
SIZES = {"small": (2048, 5632), "medium": (2048, 6144), "large": (2560, 8192), "cached": (512, 512)}
TOKENS = (*range(1, 70), 511, 512, 513, 896, 897, 1023, 1024, 1025, 2048, 2049, 65537, 1 << 20)
UNIONS = (0.0, 0.22, 0.28, 0.33, 0.38, 0.43, 0.5, 0.58, 0.61, 0.65, 0.75, 0.85, 1.0)  # on both sides of every limit
DENSITIES = (0.0, 0.005, 0.012, 0.0121, 0.015, 0.03, 0.05, 0.1, 0.25, 0.6, 1.0)
needs_cpu_kernels = pytest.mark.skipif(
    not build.status("cpu", build=True).available, reason=build.status("cpu", build=True).reason
)


SIZES_ON_A_GPU = ("small", "medium", "large")


def gpu_key(tokens=1, size="small", weights=BF16, **members) -> CallKey:
    return CallKey("cuda", "9.0", BF16, weights, tokens, *SIZES[size], **members)


def cpu_key(tokens, dtype, size="small", amx=False, **members) -> CallKey:
    return CallKey("cpu", "amx" if amx else "", dtype, dtype, tokens, *SIZES[size], **members)


def takes(key, density) -> bool:
    return choose(key, Activity(density)) == "kernels"


# The numbers


def test_every_number_is_the_headers():
    header = (toolchain.kernels_dir() / "shared" / "twell_limits.h").read_text()
    assert set(re.findall(r"^constexpr \w+ (k\w+)", header, re.MULTILINE)) - {"kMany"} == limits.read().keys()
    assert (limit("kMaxHidden"), limit("kMaxWidth"), limit("kCudaMediumElements")) == (16384, 65536, 12 << 20)
    assert limit("kCpuLimits") == ((2, 1.0), (8, 0.3), (32, 0.2), (float("inf"), 0.18))


def test_no_number_stands_in_the_code_that_decides():
    """But 0 and 1, by which it counts, and the size of a tile."""
    golden, own = {"0.618", "2"}, {"0", "0.0", "1", "1.0", "16"}
    for name in ("activity", "choose", "key", "limits", "training"):
        source = (toolchain.kernels_dir().parent / "hf_twell" / "dispatch" / f"{name}.py").read_text()
        code = re.sub(r'"""[\s\S]*?"""|#.*|f?"[^"\n]*"', "", source)
        assert set(re.findall(r"(?<![\w.])\d[\d.]*", code)) <= own | (golden if name == "activity" else set()), name
    for name in ("forward", "find"):
        code = re.sub(r"//.*", "", (toolchain.kernels_dir() / "twell_cpu" / "forward" / f"{name}.cpp").read_text())
        shares = set(re.findall(r"(?<![\w.])\d+\.\d+(?!f)", code))
        assert shares <= {"1.0", "0.25"}, "but whether signs from high digits alone pay"


@pytest.mark.parametrize(("size", "column"), [("small", 1), ("medium", 2), ("large", 3)])
def test_a_gpus_limits_are_the_tables(size, column):
    first = 1
    for row in limit("kCudaLimits"):
        for tokens in {first, min(row[0], 1 << 20)}:
            most = row[column]
            assert max_density(gpu_key(tokens, size)) == most
            assert takes(gpu_key(tokens, size), most)
            assert not takes(gpu_key(tokens, size), most + 0.001)
        first = row[0] + 1


@pytest.mark.parametrize(
    ("shape", "density", "sequences", "gained"),
    [
        ((2048, 5632), 0.005, (1, 16, 64), "111"), ((896, 4864), 0.054, (1, 16, 64), "111"),
        ((2048, 5632), 0.107, (1, 16, 64), "110"), ((1536, 8960), 0.043, (1, 16, 64), "111"),
        ((1536, 8960), 0.105, (1, 16, 64), "100"), ((4096, 14336), 0.005, (1, 16, 64), "111"),
    ],
)  # fmt: skip
def test_in_vllm_few_tokens_go_the_way_by_which_whole_steps_were_faster(shape, density, sequences, gained):
    """The rows of kernels/twell_cuda/bench/h200-vllm-2026-11-27 and of both Qwen2.5-Coders' model cards."""
    keys = [CallKey("cuda", "9.0", BF16, BF16, tokens, *shape, rival="vllm") for tokens in sequences]
    assert "".join(str(int(takes(key, density))) for key in keys) == gained
    assert "".join(str(int(takes(key._replace(asked=True), density))) for key in keys) == gained, "asked: 8-bit alone"


def test_in_vllm_no_number_of_tokens_gets_kernels_at_a_higher_density_than_in_pytorch():
    for size, tokens in itertools.product(SIZES_ON_A_GPU, TOKENS):
        assert max_density(gpu_key(tokens, size, rival="vllm")) <= max_density(gpu_key(tokens, size))


@pytest.mark.parametrize("amx", [False, True])
def test_a_cpus_limits_by_tokens_and_dtype(amx):
    limits = (2, 1.0, 1.0), (4, 0.3, 0.3), (8, 0.3, 0.15), (16, 0.2, 0.1), (32, 0.2, 0.075), (64, 0.18, 0.075)
    for tokens, most, with_units in (*limits, (257, 0.18, 0.035)):
        assert max_density(cpu_key(tokens, torch.float16, amx=amx)) == most
        assert max_density(cpu_key(tokens, torch.float32, amx=amx)) == (0.14 if tokens == 257 else most)
        assert max_density(cpu_key(tokens, torch.float32)._replace(weights=torch.int8)) == most
        assert max_density(cpu_key(tokens, BF16, amx=amx)) == (with_units if amx else most)


@pytest.mark.parametrize(("amx", "most"), [(False, 0.05), (True, 0.025)])
def test_beside_vllms_matmuls_on_a_cpu_all_tokens_have_one_limit(amx, most):
    for tokens in (1, 64, 1024):
        key = cpu_key(tokens, BF16, amx=amx, rival="vllm")
        assert (max_density(key), max_density(key._replace(weights=torch.int8))) == (most, 0.02)


def test_a_cpus_limits_of_small_matrices(monkeypatch):
    monkeypatch.undo()  # sizes as users have them

    def most(tokens, hidden, width, dtype=torch.float32):
        return max_density(CallKey("cpu", "", dtype, dtype, tokens, hidden, width))

    assert [most(1, *sizes) for sizes in ((64, 172), (288, 768), (2048, 5632))] == [0, 0.1, 1]
    assert [most(tokens, 192, 512) for tokens in (1, 4, 16)] == [0, 0, 0.1]
    assert most(256, 64, 172) == 0
    # PyTorch's own bfloat16 matmuls take so long to begin that kernels win at any size, and 8-bit weights would have to
    # be dequantized.
    assert most(1, 64, 172, BF16) == 1
    assert max_density(CallKey("cpu", "", torch.float32, torch.int8, 4, 64, 172)) == 0.3


def test_kernels_are_never_faster_on_other_devices():
    assert choose(CallKey("mps", "", BF16, BF16, 1, *SIZES["small"]), Activity(0.0)) == "plain"


@pytest.mark.parametrize(("tokens", "most"), [(1024, 0.0), (1025, 0.008), (2049, 0.018), (1 << 20, 0.025)])
def test_training_on_a_gpu_which_a_block_leaves_later_than_it_came(tokens, most):
    for on_kernels, factor in ((False, 1.0), (True, limit("kCudaTrainingBack"))):
        for share, pays in ((0.99, most > 0), (1.01, False)):
            activity = Activity(share * factor * most, on_kernels)
            assert (choose(gpu_key(tokens, training=True), activity) == "kernels") == pays


@pytest.mark.parametrize(("amx", "most"), [(False, 0.18), (True, 0.03)])
def test_training_on_a_cpu(amx, most):
    for density, way in ((most, "kernels"), (most + 0.001, "dense")):
        assert choose(cpu_key(100, BF16, amx=amx, training=True), Activity(density)) == way


@pytest.mark.parametrize(("amx", "most"), [(False, 0.18), (True, 0.03)])
def test_training_on_a_cpu_where_runs_count(amx, most):
    """Up to the same density; and plain matmuls without kernels between them, which know no runs."""
    key = cpu_key(100, BF16, amx=amx, training=True, runs=True)
    for density, way in ((most, "kernels"), (most + 0.001, "plain"), (None, "plain")):
        assert choose(key, Activity(density)) == way
    assert choose(key._replace(asked=True)) == "kernels"


@pytest.mark.parametrize("tokens", TOKENS)
def test_training_on_a_gpu_where_runs_count_goes_by_the_union(tokens):
    """However low the density is, as kernels that keep pairs know no runs."""
    key = gpu_key(tokens, training=True, runs=True)
    most = next(row[3] for row in limit("kCudaTrainingUnionLimits") if tokens <= row[0])
    for union, factor in itertools.product(UNIONS[1:], (1.0, limit("kCudaTrainingBack"))):
        activity = Activity(0.001, on_kernels=factor > 1, union=union)
        assert choose(key, activity) == ("kernels" if union <= most * factor else "plain")
    assert choose(key, Activity(0.001)) == "plain"
    assert choose(key._replace(asked=True), Activity(1.0, union=1.0)) == "kernels"


def test_kernels_that_are_asked_for_are_taken_at_every_density_on_a_gpu_and_at_every_size_on_a_cpu(monkeypatch):
    for training in (False, True):
        assert choose(gpu_key(512, training=training, asked=True), Activity(1.0)) == "kernels"
    monkeypatch.undo()  # sizes as users have them
    small = CallKey("cpu", "", torch.float32, torch.float32, 1, 64, 172)
    assert [choose(small._replace(asked=asked), Activity(0.5)) for asked in (True, False)] == ["kernels", "plain"]


@needs_cpu_kernels
@pytest.mark.parametrize("density", [0.01, 0.5])
@torch.no_grad()
def test_a_cpus_backend_by_name_goes_by_the_density_as_its_operator_does(density):
    for tokens in (4, 128):
        x, block = block_of(density, tokens, BF16)
        block.twell.backend = "cpu"
        weights = block.up_proj.weight, block.down_proj.weight, block.gate_proj.weight
        expected = choose(key_of(x, *weights[:2], asked=True), Activity(density)) != "kernels"
        assert expected == (density == 0.5)
        block(x)
        assert by_matmuls(block, x) == expected
        assert by_matmuls(functools.partial(api.ffn, backend="cpu"), x, *weights) == expected


@needs_cpu_kernels
@pytest.mark.parametrize("isa", ISAS, indirect=True)
def test_whether_there_is_a_matrix_unit_says_the_library(isa):
    """And neither the processor, whose instruction sets the environment may cap, nor the build alone."""
    assert torch.ops.hf_twell.cpu_matrix_unit() == (isa == "amx")
    assert dispatch_key.device_class("cpu") == ("cpu", "amx" if isa == "amx" else "")


@pytest.mark.parametrize(
    ("weights", "asked", "ways"),
    [(torch.int8, False, "100"), (torch.int8, True, "110"), (torch.float8_e4m3fn, False, "101")],
)
def test_8_bit_weights_beside_vllms_matmuls(weights, asked, ways):
    key = gpu_key(weights=weights, rival="vllm", asked=asked)
    found = (takes(key, 0.01), takes(key, 0.02), takes(key._replace(tokens=65), 0.01))
    assert "".join(str(int(way)) for way in found) == ways
    assert takes(gpu_key(65, weights=weights), 0.01), "beside PyTorch's there is no such limit"


# All do what it says


DENSE = {"aten::linear", "aten::mm", "aten::addmm", "aten::matmul"}


def ran(function, *args) -> set[str]:
    """The operators that run, those that C++ calls too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function(*args)
    return {event.key for event in profile.key_averages()}


def by_matmuls(function, *args) -> bool:
    """Whether any plain matmul runs, in C++ too."""
    return not DENSE.isdisjoint(ran(function, *args))


@functools.cache
def tokens_of(density, hidden, width):
    """Nearest to this density first, and the weights."""
    x, *weights = workload.make_ffn(2048, hidden, width, density * width, dtype=torch.float32)
    shares = workload.active_neurons(x, weights[0]).double().mean(1)
    return x[(shares - density).abs().argsort()], weights


def block_of(density, tokens, dtype, hidden=64, width=1536):
    x, weights = tokens_of(density, hidden, width)
    return x[:tokens].to(dtype), workload.patched_block(*(weight.to(dtype, copy=True) for weight in weights))


# Of float32 matrices the first two lie in a CPU's cache, where few tokens of the smaller are no work for kernels.
ON_A_CPU = [("float32", 64), ("float32", 192), ("float32", 384), ("bfloat16", 64), ("int8", 64)]


@needs_cpu_kernels
@pytest.mark.parametrize(("kind", "hidden"), ON_A_CPU)
@pytest.mark.parametrize("density", [0.01, 0.05, 0.15, 0.25, 0.5])
@torch.no_grad()
def test_all_go_the_same_way_on_a_cpu(kind, hidden, density, monkeypatch):
    monkeypatch.undo()  # sizes as users have them
    dtype = torch.float32 if kind == "float32" else BF16
    for tokens in (1, 4, 16, 128):
        torch._dynamo.reset()
        x, block = block_of(density, tokens, dtype, hidden)
        gate, up, down = (getattr(block, name).weight for name in ("gate_proj", "up_proj", "down_proj"))
        plain = key_of(x, up, down)
        if kind == "int8":
            pytest.importorskip("torchao")
            quantize_block(block, block.twell.form, "int8")
            gate, up, down = (getattr(block, name).weight for name in ("gate_proj", "up_proj", "down_proj"))
        values = [weight.qdata if kind == "int8" else weight for weight in (up, down, gate)]
        scales = [weight.scale if kind == "int8" else None for weight in (up, down, gate)]
        key = plain._replace(weights=values[0].dtype)
        expected = choose(key, Activity(density)) != "kernels"
        compiled = torch.compile(block, backend="eager", fullgraph=True)
        block(x), compiled(x)
        named = dict(zip(("s_up", "s_down", "s_gate"), scales, strict=True))
        ways = {
            "eager block": by_matmuls(block, x),
            "bare operator": by_matmuls(functools.partial(api.ffn, x, *values, **named)),
            "compiled block": by_matmuls(compiled, x),
        }
        if not too_small(key):  # else nobody calls it
            most = max_density_of_size(key)
            ways["C++"] = by_matmuls(torch.ops.hf_twell.infer, x, *values, None, None, None, *scales, False, most)
        assert ways == dict.fromkeys(ways, expected), (tokens, key)
        if kind != "int8":
            told = choose(key._replace(rival="vllm"), Activity(density)) != "kernels"
            found = by_matmuls(torch.ops.hf_twell_vllm.ffn, x, torch.cat([gate, up]), down, density, None)
            assert found == told, (tokens, "vLLM's operator")


@needs_cpu_kernels
@pytest.mark.parametrize("density", [0.01, 0.1, 0.25])
def test_all_train_the_same_way_on_a_cpu(density):
    x, block = block_of(density, 64, BF16)
    block.train().requires_grad_()
    weights = block.up_proj.weight, block.down_proj.weight, block.gate_proj.weight
    expected = choose(key_of(x, *weights[:2], training=True), Activity(density)) != "kernels"
    cpp = torch.ops.hf_twell.ffn

    def in_cpp():
        return cpp(x, *weights, None, None, None, None, None, None, 96)

    matmuls = {}
    for name, function in {"block": lambda: block(x), "operator": lambda: api.ffn(x, *weights), "C++": in_cpp}.items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            function()
        counts = {event.key: event.count for event in profile.key_averages()}
        matmuls[name] = counts.get("aten::linear", 0) - (name != "C++")  # but that of the operator's sample
    assert matmuls == dict.fromkeys(matmuls, 3 * expected)


@needs_cpu_kernels
@pytest.mark.parametrize("density", [0.01, 0.25])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_checkpoints_forward_without_gradients_goes_as_its_recomputation(density, compiled):
    """At 25 % 8 tokens take kernels in evaluation and none in training."""
    x, block = block_of(density, 8, BF16)
    block.train().requires_grad_()
    function = torch.compile(block, backend="eager", fullgraph=True) if compiled else block
    counts = []
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            function(x)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                function(x)
        counts.append({event.key: event.count for event in profile.key_averages()}.get("aten::linear", 0))
    assert counts == [3 * (density == 0.25) + (not compiled)] * 2, "the same matmuls, and the sample's"


@needs_cpu_kernels
@torch.no_grad()
def test_blocks_too_small_for_kernels_go_the_same_way(monkeypatch):
    monkeypatch.undo()  # sizes as users have them
    for tokens, hidden, width in ((1, 64, 172), (4, 192, 512), (16, 192, 512)):
        x, block = block_of(0.01, tokens, torch.float32, hidden, width)
        weights = block.up_proj.weight, block.down_proj.weight, block.gate_proj.weight
        torch._dynamo.reset()
        compiled = torch.compile(block, backend="eager", fullgraph=True)
        block(x), compiled(x)
        expected = too_small(key_of(x, *weights[:2]))
        assert expected == (width * hidden * tokens < 1 << 20)
        for function in (block, compiled, lambda x, w=weights: api.ffn(x, *w)):
            assert by_matmuls(function, x) == expected
        up, down, gate = weights
        in_vllm = torch.ops.hf_twell_vllm.ffn, x, torch.cat([gate, up]), down, 0.01, None
        assert (by_matmuls(*in_vllm), by_matmuls(*in_vllm, True)) == (expected, False), "or where they are asked for"
    several = ({0: torch.export.Dim("tokens", min=2, max=99)},)
    exported = torch.export.export(block, (x[:2],), dynamic_shapes=several, strict=True).module()
    assert not by_matmuls(exported, x[:3]), "for every number of tokens"


GRID = [
    (size, weights, quantize_x, capability)
    for size in SIZES_ON_A_GPU
    for weights, quantize_x in (
        (BF16, False),
        (torch.int8, False),
        (torch.float8_e4m3fn, False),
        (torch.float8_e4m3fn, True),
    )
    for capability in ("8.0", "9.0", "10.0")
]


@pytest.mark.parametrize(("size", "weights", "quantize_x", "capability"), GRID)
def test_what_graphs_and_vllm_store_has_the_answers_of_the_density(size, weights, quantize_x, capability):
    key = gpu_key(1, size, weights, quantize_x=quantize_x)._replace(capability=capability)
    stored = gpu_key(1, size, weights)._replace(capability="9.0" if capability == "9.0" else "8.0")
    for activity in (*map(Activity, DENSITIES), *(Activity(0.1, union=union) for union in UNIONS)):
        [known] = choices_by_tokens([(stored, activity)])
        assert activity.union is not None or all(known.values()) == (activity.density <= 0.012)
        of_vllm = key._replace(rival="vllm")
        same = highest_alike(of_vllm, activity)
        for tokens in TOKENS:
            eager = choose(key._replace(tokens=tokens), activity) == "kernels"
            traced = key._replace(tokens=tokens, compiled=True)
            graph = choose(traced, Activity(chosen=choice_for(known, tokens)))
            assert eager == (graph == "kernels")
            exact = choose(of_vllm._replace(tokens=tokens), activity)
            assert exact == choose(of_vllm._replace(tokens=tokens), same), (tokens, activity, same)


@pytest.mark.parametrize("size", SIZES_ON_A_GPU)
def test_many_tokens_go_by_the_union_where_it_is_known(size):
    for tokens in (1024, 2048, 16384):
        dense, shared = Activity(0.03, union=0.9), Activity(0.1, union=0.25)
        assert choose(gpu_key(tokens, size), shared) == "kernels"
        assert choose(gpu_key(tokens, size), dense) == "dense"
        for untimed in ({"capability": "8.0"}, {"weights": torch.int8}):
            key = gpu_key(tokens, size)._replace(**untimed)
            assert choose(key, shared) == choose(key, Activity(0.1))
    few = Activity(0.1, union=0.0)
    assert choose(gpu_key(4, "large"), few) == choose(gpu_key(4, "large"), Activity(0.1))
    strangers = gpu_key(256, size, rival="vllm")
    assert choose(strangers, few) == choose(strangers, Activity(0.1))


@pytest.mark.parametrize(("dtype", "amx"), [(torch.float32, False), (torch.float32, True), (BF16, False), (BF16, True)])
def test_many_tokens_on_a_cpu_go_by_the_union_where_they_are_too_dense(dtype, amx):
    most, densest = (0.4, 0.1) if amx and dtype == BF16 else (0.65, 0.3)
    many = cpu_key(limit("kNeighbours"), dtype, amx=amx)
    assert choose(many, Activity(densest, union=most)) == "kernels"
    assert choose(many, Activity(0.03, union=1.0)) == "kernels", "the density alone says so"
    for activity in (Activity(densest), Activity(densest, union=most + 0.01), Activity(densest + 0.01, union=0.4)):
        assert choose(many, activity) != "kernels"
    shared = Activity(densest, union=densest)
    for untimed in ({"tokens": many.tokens - 1}, {"training": True}, {"weights": torch.int8}, {"rival": "vllm"}):
        assert choose(many._replace(**untimed), shared) != "kernels"


@needs_cpu_kernels
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("density", [0.008, 0.06])
@torch.no_grad()
def test_all_go_the_same_way_on_a_gpu(kind, density, monkeypatch):
    """Tensors on a CPU, taken for a GPU's: whether the operator is called, which there counts nothing."""
    monkeypatch.setattr(dispatch_key, "device_class", lambda kind, index=None: ("cuda", "9.0"))
    for tokens in (1, 64, 65, 513, 2048):
        torch._dynamo.reset()
        x, block = block_of(density, tokens, BF16)
        gate, up, down = (getattr(block, name).weight for name in ("gate_proj", "up_proj", "down_proj"))
        key = CallKey("cuda", "9.0", BF16, BF16, tokens, *gate.shape[::-1])
        way = choose(key, Activity(density))
        of_operator = {
            "bare operator": (choose(key), ran(api.ffn, x, up, down, gate)),
            "vLLM's operator": (
                choose(key._replace(rival="vllm"), Activity(density)),
                ran(torch.ops.hf_twell_vllm.ffn, x, torch.cat([gate, up]), down, density, None),
            ),
        }
        if kind == "int8":
            pytest.importorskip("torchao")
            quantize_block(block, block.twell.form, "int8")
            way = choose(key._replace(weights=torch.int8), Activity(density))
        calls.store_density([block], [density])
        compiled = torch.compile(block, backend="eager", fullgraph=True)
        block(x), compiled(x)
        found = of_operator | {"eager block": (way, ran(block, x)), "compiled block": (way, ran(compiled, x))}
        ways = {name: ("hf_twell::infer" in names) == (way == "kernels") for name, (way, names) in found.items()}
        assert all(ways.values()), (tokens, ways)


def test_a_density_is_looked_at_in_some_calls_alone():
    recent, gate, x = RecentInputs(), -torch.ones(2048, 16), torch.ones(3, 16)
    assert [recent.look(x, gate) for _ in range(65)] == [number % 32 == 0 for number in range(65)]
    assert recent.density == 0
    recent.look_in = 0
    assert recent.look(x, -gate)
    assert recent.density == 1


def test_calls_of_many_tokens_are_looked_at_more_often_on_a_cpu():
    recent, gate, x = RecentInputs(), -torch.ones(2048, 16), torch.ones(3, 16)
    weights = {tokens: sample_weight(cpu_key(tokens, BF16)) for tokens in (1, 128, 1024, 16384)}
    assert weights == {1: 1, 128: 1, 1024: 8, 16384: 128}
    assert [recent.look(x, gate, calls=8) for _ in range(13)] == [number % 4 == 0 for number in range(13)]
    assert sample_weight(gpu_key(16384)) == 1, "which waits for no sample"


def test_a_cpu_looks_at_the_union_where_that_decides():
    recent, gate = RecentInputs(), torch.eye(16).repeat(16, 1)
    for density in (1 / 16, 0.5):  # alike neighbours: their union is no more
        x = (torch.arange(16) < 16 * density).float().repeat(128, 1)
        recent.look_in = 0
        recent.look(x, gate, asks_union=lambda density: density > 0.2)
        assert (recent.density, recent.union) == (density, density if density > 0.2 else None)
    recent.look_in = 0
    recent.look(x[:3], gate, asks_union=lambda density: True)
    assert recent.union == 0.5, "few tokens say nothing of it"
    recent.look(x[:, :1].mul(torch.eye(16).repeat(8, 1)), gate, asks_union=lambda density: True)
    assert (recent.density, recent.union) == (1 / 16, 1.0), "the next many are looked at again"


@needs_cpu_kernels
@torch.inference_mode()
def test_a_prefill_behind_decoding_is_looked_at_for_its_union():
    case = make_case(128, 40, 320, 0.0, torch.float32)
    case["w_gate"][::4, :KINDS] = 2.0  # active for all tokens, and too many for the density to say that kernels pay
    block = workload.patched_block(case["w_gate"], case["w_up"], case["w_down"])
    block(case["x"][:4])
    assert block.twell_state.recent.union is None
    block(case["x"])
    assert block.twell_state.recent.union == pytest.approx(0.25, abs=0.05)
    assert calls.takes_kernels(block, case["x"])


@pytest.mark.parametrize("tokens", [128, 300, 16384])
def test_a_sample_of_runs_says_what_neighbours_share(tokens):
    of_token, eye = torch.arange(tokens), torch.eye(16)
    gate = eye.repeat(64, 1)  # neuron f is active where coordinate f % 16 is
    alike, different = (shares_of_runs(eye[place % 16], gate, None) for place in (of_token // 128, of_token))
    assert alike.tolist() == [1 / 16, 1 / 16]
    assert different.tolist() == [1 / 16, 1.0]
    sequences = torch.zeros(tokens, 16)
    sequences[::1024] = 1.0  # first tokens activate everything, others nothing
    density, _ = shares_of_runs(sequences, gate, None)
    assert density <= 1 / 128


# What a graph asks


class Chooses(torch.nn.Module):
    def __init__(self, choices):
        super().__init__()
        self.choices = choices

    def forward(self, x):
        return x + 1 if choice_for(self.choices, x.shape[0] * x.shape[1]) else x - 1


def layers_that_choose(densities, size) -> list[Chooses]:
    """The layers of one model."""
    return [Chooses(each) for each in choices_by_tokens([(gpu_key(1, size), Activity(d)) for d in densities])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("density", "size", "changes"),
    [
        (0.005, "large", 0),
        (0.6, "large", 0),
        (0.6, "small", 1),
        (0.05, "large", 2),
        (0.015, "small", 2),
        (0.25, "medium", 3),
    ],
)
def test_compiled_code_has_a_graph_for_each_answer_in_turn(density, size, changes):
    """Beside the graph for the first number of tokens, and the one that Dynamo makes for a single token."""
    torch._dynamo.reset()
    graphs = CompileCounter()
    compiled = torch.compile(*layers_that_choose([density], size), backend=graphs, fullgraph=True)
    for tokens in (40, 50, 1, 3, 5, 9, 12, 17, 33, 40, 64, 65, 100, 512, 513, 1024, 1025, 2048, 2049, 5000, 40, 1, 65):
        answer = takes(gpu_key(tokens, size), density)
        assert (compiled(torch.zeros(1, tokens)) > 0).all() == answer, tokens
    assert graphs.frame_count == 3 + changes


@pytest.mark.slow
def test_layers_of_any_density_share_code_where_they_go_the_same_way():
    layers = layers_that_choose(DENSITIES, "large")
    for dynamic, shapes in ((False, [(2, 512)]), (True, [(2, 512), (3, 300), (2, 1024), (4, 500)])):  # in two rows
        torch._dynamo.reset()
        graphs = CompileCounter()
        for layer, shape in itertools.product(layers, shapes):
            torch.compile(layer, backend=graphs, fullgraph=True, dynamic=dynamic)(torch.zeros(shape))
        assert graphs.frame_count == (4 if dynamic else 2)


class Exports(torch.nn.Module):
    def forward(self, x):
        return x + 1 if dispatch_key.exports() else x - 1


@pytest.mark.slow
def test_a_compiled_graph_is_not_an_exported_one():
    """Before PyTorch 2.13 `torch.compiler.is_exporting()` is True in any graph that Dynamo traces."""
    x, zeros = torch.zeros(1), torch.zeros(1)
    assert torch.compile(Exports(), backend="eager", fullgraph=True)(x) < zeros
    for strict in (True, False):
        assert torch.export.export(Exports(), (x,), strict=strict).module()(x) > zeros


@pytest.mark.slow
def test_tokens_that_no_guard_may_count_are_few():
    torch._dynamo.reset()
    x = torch.zeros(4, 100)
    torch._dynamo.decorators.mark_unbacked(x, 1)
    for density, kernels in ((0.05, True), (0.6, False)):
        compiled = torch.compile(*layers_that_choose([density], "large"), backend="eager", fullgraph=True)
        assert (compiled(x) > 0).all() == kernels


@pytest.mark.slow
def test_an_engine_asks_without_transformers_and_without_a_compiled_library(tmp_path):
    code = (
        "import sys, torch; from hf_twell.dispatch.choose import Activity, CallKey, choose; kind = torch.bfloat16; "
        "print(choose(CallKey('cpu', '', kind, kind, 4, 4096, 4096), Activity(0.01)), 'transformers' in sys.modules)"
    )
    env = {"HF_TWELL_CACHE": str(tmp_path / "cache"), "PATH": "/nowhere", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["kernels", "False"], done.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("device", "size"), [("cuda", "small"), ("cuda", "large"), ("cpu", "small"), ("cpu", "cached")]
)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("rival", ["torch", "vllm"])
def test_the_density_in_compiled_code_gets_the_answers_of_the_layers_own(monkeypatch, device, size, dtype, rival):
    monkeypatch.undo()  # sizes as users have them
    known, key = set(), CallKey(device, "", dtype, dtype, 1, *SIZES[size], rival=rival)
    for density in (0.0, 0.001, 0.012, 0.0121, 0.05, 0.18, 0.3, 1.0):
        same = highest_alike(key, Activity(density)).density
        known.add(same)
        assert same >= density
        for tokens in TOKENS:
            ways = [choose(key._replace(tokens=tokens), Activity(each)) for each in (density, same)]
            assert ways[0] == ways[1], (tokens, density, same)
    assert len(known) < 8


def test_on_a_device_without_kernels_no_density_gets_them():
    same = highest_alike(CallKey("mps", "", BF16, BF16, 1, *SIZES["small"]), Activity(0.0))
    assert same == Activity(float("inf"))


def test_a_device_without_kernels_goes_by_plain_pytorch():
    key = CallKey("mps", "", BF16, BF16, 1, *SIZES["small"])
    assert {choose(key), choose(key, Activity(0.0)), choose(key._replace(asked=True))} == {"plain"}


@pytest.mark.parametrize("density", [0.21, 0.22, 0.27])
def test_a_stored_density_keeps_its_answers_whatever_the_rows_of_the_table(density, monkeypatch):
    """Limits of rows that end at other numbers than powers of two."""
    table = ((2, 1.0, 1.0, 1.0), (12, 0.3, 0.3, 0.3), (14, 0.25, 0.25, 0.25), (float("inf"), 0.2, 0.2, 0.2))
    monkeypatch.setitem(limits.read(), "kCudaLimits", table)
    key = CallKey("cuda", "9.0", BF16, BF16, 1, *SIZES["small"])
    same = highest_alike(key, Activity(density)).density
    for tokens in range(1, 100):
        ways = {choose(key._replace(tokens=tokens), Activity(stored)) for stored in (density, same)}
        assert len(ways) == 1, (tokens, same)


def test_the_mark_of_constants_is_torch_compilers():
    marked = torch.compiler.assume_constant_result(lambda: 1)
    assert vars(assume_constant_result(lambda: 1)) == vars(marked)


@pytest.mark.parametrize(
    ("tokens", "density", "union", "expected"),
    [
        (16_384, 0.0364, 0.181, "columns"), (16_384, 0.0586, 0.293, "columns"), (16_384, 0.0957, 0.458, "columns"),
        (4096, 0.036, 0.181, "pairs"), (4096, 0.058, 0.297, "columns"), (4096, 0.095, 0.459, "dense"),
        (16_384, 0.005, 0.229, "pairs"), (16_384, 0.02, 0.505, "pairs"), (16_384, 0.05, 0.73, "dense"),
        (2048, 0.036, 0.181, "dense"),
    ],
)  # fmt: skip
def test_training_on_a_gpu_goes_the_way_that_was_measured_to_be_fastest(tokens, density, union, expected):
    """The rows of kernels/twell_cuda/LOG.md, "Columns" and "Weights' gradients"; nothing was measured at 2,048."""
    key = CallKey("cuda", "9.0", BF16, BF16, tokens, 2048, 5632, training=True)
    activity = Activity(density, union=union)
    taken = "dense" if choose(key, activity) != "kernels" else "columns" if columns_pay(key, activity) else "pairs"
    assert taken == expected
    assert not columns_pay(key._replace(training=False), activity)


def test_where_runs_count_kernels_pay_at_every_activity_that_was_measured():
    """Dense takes 11 % longer there: the rows of kernels/twell_cuda/LOG.md, "Columns"."""
    for tokens, density, union in ((4096, 0.095, 0.459), (16_384, 0.0957, 0.458)):
        key = CallKey("cuda", "9.0", BF16, BF16, tokens, 2048, 5632, training=True, runs=True)
        assert choose(key, Activity(density, union=union)) == "kernels"
        assert columns_pay(key, Activity(density, union=union))


def test_experts_on_a_gpu_go_by_their_own_limits():
    key = CallKey("cuda", "9.0", BF16, BF16, 16, 2048, 768)
    for tokens, density in itertools.product(TOKENS, (None, *DENSITIES)):
        call = key._replace(tokens=tokens)
        most = max_experts_density(call)
        expected = "kernels" if density is not None and most > 0 and density <= most else "plain"
        assert choose_experts(call, Activity(density)) == expected
        assert choose_experts(call._replace(asked=True), Activity(density)) == "kernels"
    pairs, experts = limit("kCudaExpertPairs"), limit("kCudaExperts")
    assert takes_experts(key, pairs, experts)
    assert max_experts_density(key) > 0.0917, "measured up to there"
    assert max_experts_density(key._replace(tokens=17)) == max_experts_density(key._replace(capability="8.0")) == 0.0
    for call, *sizes in (
        (key, pairs + 1, experts),
        (key, pairs, experts + 1),
        (key._replace(device="cpu"), 8, 8),
        (key._replace(dtype=torch.float16), 8, 8),
        (key._replace(dtype=torch.float32, weights=torch.float32), 8, 8),
        (key._replace(width=limit("kMaxWidth") + 1), 8, 8),
    ):
        assert not takes_experts(call, *sizes)
