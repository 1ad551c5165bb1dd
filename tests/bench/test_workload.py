"""The benchmark's inputs share between neighbours what they were asked to share."""

import pytest
import torch

from hf_twell.bench import sharing, workload

SMALL, REAL = (2048, 128, 768), (2048, 2048, 5632)  # T, D, F
# SmolLM2, pressed on what runs of 64 tokens activate together, and token by token.
SHARED = ((0.095, (0.29, 0.40, 0.46)), (0.058, (0.18, 0.25, 0.29)), (0.036, (0.11, 0.15, 0.18)))
TOKENWISE = ((0.100, (0.51, 0.80, 0.89)), (0.051, (0.32, 0.61, 0.76)), (0.020, (0.15, 0.35, 0.49)))


def by_hand(active_TF, run) -> float:
    starts = range(0, len(active_TF) - run + 1, run)
    return sum(active_TF[i : i + run].any(0).double().mean().item() for i in starts) / len(starts)


def made(shape, density, unions) -> torch.Tensor:
    tokens, hidden, width = shape
    x, w_gate, _, _ = workload.make_ffn(tokens, hidden, width, density * width, unions=unions)
    return workload.active_neurons(x, w_gate)


@pytest.mark.parametrize("shape", [SMALL, pytest.param(REAL, marks=pytest.mark.slow)], ids=["small", "real"])
@pytest.mark.parametrize(("density", "wanted"), SHARED)
def test_a_density_and_a_union_of_64_give_the_unions_of_models_that_share(shape, density, wanted):
    active = made(shape, density, {"64": wanted[1]})
    assert active.double().mean().item() == pytest.approx(density, abs=0.002)
    for run, share in zip((16, 64, 128), wanted, strict=True):
        assert by_hand(active, run) == pytest.approx(share, abs=0.01), run
        # It begins anywhere; without the dense first tokens of a sequence, which are in one run of either.
        assert by_hand(active[37:1000], run) == pytest.approx(by_hand(active[64:1000], run), abs=0.015)


@pytest.mark.parametrize(("density", "wanted"), [*SHARED, *TOKENWISE])
def test_three_unions_are_had_together(density, wanted):
    active = made(SMALL, density, dict(zip(("16", "64", "128"), wanted, strict=True)))
    found = sharing.unions_of(active)
    assert found == pytest.approx({str(run): by_hand(active, run) for run in (16, 64, 128)})
    assert list(found.values()) == pytest.approx(wanted, abs=0.01 if (density, wanted) in SHARED else 0.018)


def test_unions_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"no inputs with 10 % active neurons have unions of 6\.0 % \(64 tokens\)"):
        workload.make_ffn(512, 64, 256, 25.6, unions={"64": 0.06})
