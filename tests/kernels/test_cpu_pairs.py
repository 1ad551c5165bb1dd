"""The pairs that the CPU kernels find, as the saved state holds them, and pairs that few tokens share among others."""

import pytest
import torch

from hf_twell.ops import build
from tests.ffn_cases import KINDS, assert_as_good_as_eager, cpu_ffn, make_case

pytestmark = [
    pytest.mark.usefixtures("poisoned_buffers"),
    pytest.mark.skipif(not build.status("cpu", build=True).available, reason=build.status("cpu", build=True).reason),
]
# Of values, which are summed in fp32 and rounded to the dtype.
CLOSE = {torch.float32: 2**-19, torch.bfloat16: 2**-8, torch.float16: 2**-11}
DENSE = -2  # State::kDense of kernels/twell_cpu/common/pairs.h


def saved_pairs(case):
    """What one call saves, with room for every pair: counts (T,), and neurons, gates and ups in order of tokens."""
    order = ("x", "w_up", "w_down", "w_gate", "b_up", "b_down", "b_gate")
    (width, _), tokens, dtype = case["w_up"].shape, len(case["x"]), case["x"].dtype
    state = torch.ops.hf_twell.ffn(*(case[name] for name in order), None, None, None, width)[2]
    parts, start, slots = [], 0, tokens * width
    gated = case["w_gate"] is not None
    for kind, size in ((torch.int32, tokens), *[(dtype, slots)] * (1 + gated), (torch.uint16, slots)):
        bytes_of = size * kind.itemsize
        parts.append(state[start : start + bytes_of].view(kind))
        start += bytes_of
    assert start == state.numel()
    counts, *values, neurons = parts
    lists = neurons, *values
    assert not counts.eq(DENSE).any(), "sparse inputs took the dense path, which is right whatever the kernels find"
    return counts, *(part[: counts.sum()] for part in lists)


@pytest.mark.parametrize(("hidden", "width"), [(37, 133), (549, 172), (2085, 172), (4133, 97)])
@pytest.mark.parametrize("gated", [True, False])
def test_every_pair_is_found_with_its_values(isa, dtype, hidden, width, gated):
    """Sums cut into parts, and what is left over of each size, where the dense path cannot make up for mistakes."""
    density = 0.015 if isa == "amx" else 0.06  # from 3 % on a matrix unit trains by matmuls
    for tokens in (1, 3, 8, 31, 70, 301):
        case = make_case(tokens, hidden, width, density, dtype, gated=gated, biases=True)
        x, w_up, w_gate, b_up, b_gate = (
            None if case[name] is None else case[name].double() for name in ("x", "w_up", "w_gate", "b_up", "b_gate")
        )
        up = torch.nn.functional.linear(x, w_up, b_up)
        gate = torch.nn.functional.linear(x, w_gate, b_gate) if gated else up
        active = gate > 0
        counts, neurons, *values = saved_pairs(case)
        assert torch.equal(counts.long(), active.sum(1))
        assert torch.equal(neurons.long(), active.nonzero()[:, 1])
        for found, truth in zip(values, (gate, up), strict=False):
            torch.testing.assert_close(found.double(), truth[active], rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("by_column", [True, False])
@pytest.mark.parametrize("hidden", [200, 1093])
def test_neurons_of_few_tokens_beside_shared_ones(isa, by_column, hidden):
    """A matrix unit takes the neurons that many tokens share; the others' pairs are gathered into the same sums."""
    for tokens, gated in ((70, True), (301, True), (301, False)):
        case = make_case(tokens, hidden, 4000, 0.015, torch.bfloat16, gated=gated, biases=True)
        rare = torch.arange(tokens) % 130 == 60  # one token, or three
        kind = torch.where(rare, KINDS - 1, torch.arange(tokens) % 3)
        case["x"][:, :KINDS] = torch.eye(KINDS)[kind].bfloat16()
        shared = case["w_gate" if gated else "w_up"][:, :3].gt(0).any(1)
        lone = case["w_gate" if gated else "w_up"][:, KINDS - 1].gt(0) & ~shared
        assert lone.sum() > 20
        assert shared.sum() > 100
        if by_column:
            case["w_down"] = case["w_down"].t().contiguous().t()
        saved_pairs(case)
        assert_as_good_as_eager(cpu_ffn, case)
