"""TwELL and Hybrid give back what was packed, whatever overflows."""

import pytest
import torch

from hf_twell.ops import reference
from tests.ffn_cases import make_case
from tests.twell_formats import Hybrid, Twell

pytestmark = pytest.mark.numeric

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PACKERS = {
    "twell": lambda h: Twell.from_dense(h, tile=64, slots=8),
    "twell-one-slot": lambda h: Twell.from_dense(h, tile=256, slots=1),
    "hybrid": lambda h: Hybrid.from_dense(h, capacity=12),
    "hybrid-full": lambda h: Hybrid.from_dense(h, capacity=h.shape[1]),
}


def activations(tokens, width, density, dtype):
    g = torch.Generator().manual_seed(0)
    h = torch.randn(tokens, width, generator=g).to(dtype)
    return torch.where(torch.rand(tokens, width, generator=g) < density, h, torch.zeros((), dtype=dtype))


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 63, 199])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 1.0])
def test_round_trip_is_exact(pack, dtype, tokens, density):
    for width in (172, 256):
        h = activations(tokens, width, density, dtype)
        packed = PACKERS[pack](h)
        assert torch.equal(packed.to_dense(), h)
        assert packed.count.sum() == h.count_nonzero()


def test_the_layouts_are_as_documented():
    h = torch.zeros(4, 7)
    h[0, [1, 4, 5]] = torch.tensor([10.0, 20.0, 30.0])
    h[1, [0, 2, 3]] = torch.tensor([1.0, 2.0, 3.0])
    h[3] = torch.arange(1.0, 8)
    twell = Twell.from_dense(h, tile=4, slots=2)
    assert twell.count.tolist() == [[1, 2], [3, 0], [0, 0], [4, 3]]
    assert twell.overflow.tolist() == [False, True, False, True]
    assert torch.equal(twell.dense, h[[1, 3]])
    assert twell.index[0].tolist() == [[1, 0], [0, 1]]
    assert twell.value[0].tolist() == [[10, 0], [20, 30]]
    assert twell.nbytes == 4 * (2 * 4 + 4 * 2 + 4 * 4 + 1) + 2 * 7 * 4
    hybrid = Hybrid.from_dense(h, capacity=4)
    assert (hybrid.row.tolist(), hybrid.count.tolist()) == ([-1, -1, -1, 0], [3, 3, 0, 7])
    assert hybrid.index.tolist() == [[1, 4, 5, 0], [0, 2, 3, 0], [0] * 4, [0] * 4]
    assert hybrid.value.tolist() == [[10, 20, 30, 0], [1, 2, 3, 0], [0] * 4, [0] * 4]
    assert hybrid.nbytes == 4 * (4 + 4 + 4 * 2 + 4 * 4) + 7 * 4
    hybrid = Hybrid.from_dense(h, capacity=2)
    assert hybrid.row.tolist() == [0, 1, -1, 2]
    assert torch.equal(hybrid.dense, h[[0, 1, 3]])
    for packed in (twell, hybrid):
        assert (packed.count.dtype, packed.index.dtype, packed.value.dtype) == (torch.int32, torch.uint16, h.dtype)


def test_more_neurons_than_16_bits_count():
    h = torch.zeros(2, 65537)
    h[0, [0, 65536]], h[1, 1] = 1.0, 2.0
    hybrid = Hybrid.from_dense(h, capacity=2)
    assert hybrid.index.tolist() == [[0, 65536], [1, 0]]
    for packed in (hybrid, Twell.from_dense(h, tile=65536, slots=2)):
        assert torch.equal(packed.to_dense(), h)
    with pytest.raises(ValueError, match="tile=65537, slots=2; expected"):
        Twell.from_dense(h, tile=65537, slots=2)


@pytest.mark.parametrize("pack", PACKERS)
def test_one_full_row_costs_one_row(pack):
    h = activations(64, 512, 0.005, torch.bfloat16)
    before = PACKERS[pack](h).nbytes
    h[20] = 1
    packed = PACKERS[pack](h)
    assert torch.equal(packed.to_dense(), h)
    assert packed.nbytes <= before + 512 * 2


def test_nan_and_infinity_are_values():
    h = torch.zeros(3, 100)
    h[1, 7], h[2, 99] = float("nan"), float("inf")
    for pack in PACKERS.values():
        torch.testing.assert_close(pack(h).to_dense(), h, rtol=0, atol=0, equal_nan=True)


def test_sparse_activations_take_a_fraction_of_the_bytes():
    case = make_case(128, 40, 5632, 0.005, torch.bfloat16)
    h = torch.relu(case["x"] @ case["w_gate"].T) * (case["x"] @ case["w_up"].T)
    dense_bytes = h.numel() * h.element_size()
    assert Hybrid.from_dense(h, capacity=64).nbytes < 0.05 * dense_bytes
    assert Twell.from_dense(h, tile=256, slots=16).nbytes < 0.15 * dense_bytes
    y = reference.ffn(case["x"], case["w_up"], case["w_down"], case["w_gate"])
    assert torch.equal(Hybrid.from_dense(h, capacity=64).to_dense() @ case["w_down"].T, y)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Twell.from_dense(torch.zeros(3)), r"h has shape \(3,\); expected"),
        (lambda: Hybrid.from_dense(torch.zeros(2, 3, 4), capacity=1), r"h has shape \(2, 3, 4\); expected"),
        (lambda: Twell.from_dense(torch.zeros(3, 4), tile=4, slots=5), "tile=4, slots=5; expected"),
        (lambda: Hybrid.from_dense(torch.zeros(3, 4), capacity=5), "capacity=5; expected 1 <= capacity <= 4"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
