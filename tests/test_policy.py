"""At which density and token count kernels pay, asked without a block."""

import re
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from hf_twell.blocks import choice, stored_density
from hf_twell.blocks.density_watch import DensityWatch
from hf_twell.ops import limits, policy, policy_cpu, policy_cuda, toolchain

BF16 = torch.bfloat16
SMALL, MEDIUM, LARGE = 2048 * 5632, policy_cuda.SIZES[0], policy_cuda.SIZES[1]


def test_limits_are_those_of_the_kernels_header():
    header = (toolchain.kernels_dir() / "shared" / "twell_limits.h").read_text()
    assert {name: limits.limit(name) for name in re.findall(r"\bk[A-Z]\w+", header)} == {
        "kMaxHidden": 16384,
        "kMaxWidth": 65536,
        "kCpuMaxDensity": 0.18,
    }


@pytest.mark.parametrize(("elements", "column"), [(SMALL, 1), (MEDIUM - 1, 1), (MEDIUM, 2), (LARGE - 1, 2), (LARGE, 3)])
def test_a_gpus_limits_are_the_tables(elements, column):
    first = 1
    for row in policy_cuda.LIMITS:
        for tokens in {first, min(row[0], 1 << 20)}:
            limit = row[column]
            assert policy.max_density(tokens, elements, BF16, "cuda") == limit
            assert policy.takes_kernels(tokens, elements, BF16, "cuda", limit)
            assert not policy.takes_kernels(tokens, elements, BF16, "cuda", limit + 0.001)
        first = row[0] + 1


@pytest.mark.parametrize("amx", [False, True])
def test_a_cpus_limits_by_tokens_and_dtype(monkeypatch, amx):
    monkeypatch.setattr(policy_cpu, "_has_amx", lambda: amx)
    few, many = (0.075, 0.035) if amx else (0.18, 0.18)
    for tokens, dtype, limit in (
        *((2, dtype, 1.0) for dtype in (torch.float32, BF16)),
        *((3, BF16, few), (64, BF16, few), (65, BF16, many), (1024, torch.float32, 0.18)),
    ):
        assert policy.max_density(tokens, SMALL, dtype, "cpu") == limit, (tokens, dtype)
        assert policy.takes_kernels(tokens, SMALL, dtype, "cpu", limit)


def test_no_kernels_pay_in_the_smallest_matrices_and_on_other_devices(monkeypatch):
    monkeypatch.setattr(policy_cpu, "CACHED_ELEMENTS", policy_cpu.SMALLEST_ELEMENTS)  # which conftest.py makes 0
    assert not policy.takes_kernels(1024, policy_cpu.SMALLEST_ELEMENTS - 1, torch.float32, "cpu", 0.0)
    assert not policy.takes_kernels(1, SMALL, BF16, "mps", 0.0)


@pytest.mark.parametrize(("tokens", "limit"), [(1024, 0.0), (1025, 0.008), (2049, 0.018), (1 << 20, 0.025)])
def test_training_on_a_gpu_which_a_block_leaves_later_than_it_came(tokens, limit):
    for by_kernels, factor in ((False, 1.0), (True, policy_cuda.BACK)):
        for share, pays in ((0.99, limit > 0), (1.01, False)):
            how = {"training": True, "by_kernels": by_kernels}
            assert policy.takes_kernels(tokens, SMALL, BF16, "cuda", share * factor * limit, **how) == pays


@pytest.mark.parametrize(("amx", "limit"), [(False, 0.18), (True, 0.03)])
def test_training_on_a_cpu(monkeypatch, amx, limit):
    monkeypatch.setattr(policy_cpu, "_has_amx", lambda: amx)
    assert policy.takes_kernels(100, SMALL, BF16, "cpu", limit, training=True)
    assert not policy.takes_kernels(100, SMALL, BF16, "cpu", limit + 0.001, training=True)


def test_a_block_on_a_gpu_has_the_same_answer():
    gate = torch.where(torch.arange(2048) < 20, 1.0, -1.0)[:, None].expand(-1, 16)
    for tokens in (1, 64, 65, 512, 513, 3000):
        watch, x = DensityWatch(), torch.ones(tokens, 16)
        watch.too_dense(x, gate)
        too_dense = watch.too_dense(x, gate)
        assert too_dense != policy.takes_kernels(tokens, gate.numel(), x.dtype, "cuda", watch.density)


DENSITIES = (0.0, 0.005, 0.012, 0.0121, 0.015, 0.03, 0.05, 0.1, 0.25, 0.6, 1.0)


@pytest.mark.parametrize("elements", [SMALL, MEDIUM, LARGE])
@pytest.mark.parametrize("density", DENSITIES)
def test_a_block_of_a_compiled_model_has_the_same_answer(elements, density):
    pays = stored_density.pays(density, elements)
    assert (pays is None) == (density <= 0.012)
    for tokens in (*range(1, 70), 511, 512, 513, 1024, 1025, 2048, 2049, 1 << 20):
        answer = policy.takes_kernels(tokens, elements, BF16, "cuda", density)
        assert stored_density.takes_kernels(pays, tokens) == answer, tokens


class Chooses(torch.nn.Module):
    def __init__(self, density, elements):
        super().__init__()
        self.pays = stored_density.pays(density, elements)

    def forward(self, x):
        return x + 1 if stored_density.takes_kernels(self.pays, x.shape[0] * x.shape[1]) else x - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("density", "elements", "changes"),
    [(0.005, LARGE, 0), (0.6, LARGE, 0), (0.6, SMALL, 1), (0.05, LARGE, 2), (0.015, SMALL, 2), (0.25, MEDIUM, 3)],
)
def test_compiled_code_has_a_graph_for_each_answer_in_turn(density, elements, changes):
    """Beside the graph for the first number of tokens, and the one that Dynamo makes for a single token."""
    torch._dynamo.reset()
    graphs = CompileCounter()
    compiled = torch.compile(Chooses(density, elements), backend=graphs, fullgraph=True)
    for tokens in (40, 50, 1, 3, 5, 9, 12, 17, 33, 40, 64, 65, 100, 512, 513, 1024, 1025, 2048, 2049, 5000, 40, 1, 65):
        answer = policy.takes_kernels(tokens, elements, BF16, "cuda", density)
        assert (compiled(torch.zeros(1, tokens)) > 0).all() == answer, tokens
    assert graphs.frame_count == 3 + changes


@pytest.mark.slow
def test_layers_of_any_density_share_code_where_they_go_the_same_way():
    torch._dynamo.reset()
    graphs = CompileCounter()
    for density in DENSITIES:
        torch.compile(Chooses(density, LARGE), backend=graphs, fullgraph=True, dynamic=False)(torch.zeros(2, 512))
    assert graphs.frame_count == 3  # one is of layers that take kernels at every number of tokens


class Exports(torch.nn.Module):
    def forward(self, x):
        return x + 1 if choice._exports() else x - 1


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
        compiled = torch.compile(Chooses(density, LARGE), backend="eager", fullgraph=True)
        assert (compiled(x) > 0).all() == kernels


@pytest.mark.slow
def test_an_engine_asks_without_transformers_and_without_a_compiled_library(tmp_path):
    code = (
        "import sys, torch; from hf_twell.ops.policy import takes_kernels; "
        "print(takes_kernels(4, 1 << 24, torch.bfloat16, 'cpu', 0.01), 'transformers' in sys.modules)"
    )
    env = {"HF_TWELL_CACHE": str(tmp_path / "cache"), "PATH": "/nowhere", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"], done.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("elements", "device"), [(SMALL, "cuda"), (LARGE, "cuda"), (SMALL, "cpu"), (1 << 18, "cpu")])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_density_in_compiled_code_gets_the_answers_of_the_layers_own(monkeypatch, elements, device, dtype):
    monkeypatch.setattr(policy_cpu, "CACHED_ELEMENTS", 1 << 19)  # which conftest.py makes 0
    known = set()
    for density in (0.0, 0.001, 0.012, 0.0121, 0.05, 0.18, 0.3, 1.0):
        same = policy.same_answers(density, elements, dtype, device)
        known.add(same)
        assert same >= density
        for tokens in (*range(1, 70), 511, 512, 513, 1023, 1025, 2048, 2049, 65537):
            answers = [policy.takes_kernels(tokens, elements, dtype, device, each) for each in (density, same)]
            assert answers[0] == answers[1], (tokens, density, same)
    assert len(known) < 8


def test_on_a_device_without_kernels_no_density_gets_them():
    assert policy.same_answers(0.0, SMALL, BF16, "mps") == float("inf")
