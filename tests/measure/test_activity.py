"""The streamed figures of one layer against a count by hand over all of h at once."""

import math

import numpy
import pytest
import torch

from hf_twell.measure.activity import LayerActivity

pytestmark = pytest.mark.numeric


def sparse_h(batch, length, width, density, dtype=torch.float32, seed=0) -> torch.Tensor:
    """h as a gated block makes it, with -0.0 where the gate is closed and the up projection is negative."""
    generator = torch.Generator().manual_seed(seed)
    gate = (torch.rand(batch, length, width, generator=generator) < density).float()
    return (gate * torch.randn(batch, length, width, generator=generator)).to(dtype)


def by_hand(h, valid) -> dict:
    """The same figures from h (B, S, F) held whole, one token and one run at a time."""
    batch, length, width = h.shape
    active = (h != 0).numpy()
    tokens = [(b, s) for b in range(batch) for s in range(length) if valid[b, s]]
    l0 = numpy.array([active[at].sum() for at in tokens])
    fired = numpy.array([active[at] for at in tokens]).sum(0)
    magnitude = h.double().abs().numpy()
    shares, firing = {}, [magnitude[at] for at in tokens if magnitude[at].sum()]
    for name, share in (("1%", 0.01), ("5%", 0.05), ("10%", 0.1)):
        of = [numpy.sort(sizes)[::-1][: math.ceil(share * width)].sum() / sizes.sum() for sizes in firing]
        shares[name] = numpy.mean(of) if of else None
    distinct, runs = {}, {}
    for run in (16, 64, 128):
        places = [(b, s) for b in range(batch) for s in range(0, length - run + 1, run) if valid[b, s : s + run].all()]
        counts = [active[b, s : s + run].any(0).sum() for b, s in places]
        distinct[run], runs[run] = numpy.mean(counts) if counts else None, len(places)
    ranked = numpy.sort(fired)[::-1]
    squares = (magnitude**2).sum(2)
    effective = numpy.mean([magnitude[at].sum() ** 2 / squares[at] if squares[at] else 0 for at in tokens])
    return {
        "l0": l0.mean(),
        "density": active[valid.numpy()].mean(),
        "l1": numpy.mean([magnitude[at].sum() for at in tokens]),
        "effective_neurons": effective,
        "quantiles": {q: numpy.quantile(l0, q / 100, method="inverted_cdf") for q in (1, 10, 50, 90, 99)},
        "min": l0.min(),
        "max": l0.max(),
        "dead": (fired == 0).sum(),
        "always": (fired == len(tokens)).sum(),
        "hottest": {p: ranked[: math.ceil(p / 100 * width)].sum() / fired.sum() for p in (1, 5, 10, 25, 50)},
        "distinct": distinct,
        "runs": runs,
        "independent": {run: (1 - (1 - fired / len(tokens)) ** run).sum() for run in (16, 64, 128)},
        "shares": shares,
    }


def check(report, truth):
    assert report["l0"] == pytest.approx(truth["l0"], abs=1e-9)
    assert report["density"] == pytest.approx(truth["density"], abs=1e-12)
    assert report["density"] == report["l0"] / report["intermediate_size"]
    assert report["dead"] == truth["dead"] / report["intermediate_size"]
    assert report["l1"] == pytest.approx(truth["l1"], rel=1e-5)
    assert report["effective_neurons"] == pytest.approx(truth["effective_neurons"], rel=1e-5)
    quantiles = {f"p{q}": value for q, value in truth["quantiles"].items()}
    assert report["l0_quantiles"] == {"min": truth["min"], **quantiles, "max": truth["max"]}
    assert (report["dead_neurons"], report["always_on_neurons"]) == (truth["dead"], truth["always"])
    for percent, value in truth["hottest"].items():
        assert report["hottest_share"][f"{percent}%"] == pytest.approx(value, abs=1e-12)
    for run, value in truth["distinct"].items():
        assert report["distinct"][str(run)]["runs"] == truth["runs"][run]
        assert report["distinct"][str(run)]["neurons"] == (None if value is None else pytest.approx(value, abs=1e-9))
        share = None if value is None else pytest.approx(value / report["intermediate_size"], abs=1e-12)
        assert report["unions"][str(run)] == share
        assert report["distinct"][str(run)]["if_independent"] == pytest.approx(truth["independent"][run], rel=1e-9)
    for name, value in truth["shares"].items():
        assert report["magnitude_share"][name] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("density", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("shape", [(1, 1, 7), (2, 15, 172), (2, 140, 20), (3, 130, 1024), (2, 300, 1500)])
def test_against_a_count_by_hand(shape, density):
    h = sparse_h(*shape, density)
    valid = torch.ones(shape[:2], dtype=torch.bool)
    activity = LayerActivity(shape[2], sample_every=1)
    l0, effective = activity.add(h)
    assert torch.equal(l0, (h != 0).sum(2))
    expected = h.abs().sum(2) ** 2 / (h**2).sum(2)
    torch.testing.assert_close(effective, expected.nan_to_num(0), rtol=1e-4, atol=1e-4)
    if (h != 0).any():
        check(activity.report(), by_hand(h, valid))


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_counts_nowhere(side):
    h = sparse_h(3, 150, 96, 0.2)
    valid = torch.ones(3, 150, dtype=torch.bool)
    if side == "right":
        valid[1, 70:], valid[2, 3:] = False, False
    else:
        valid[1, :37], valid[2] = False, False
    h[~valid] = float("nan")
    activity = LayerActivity(96, sample_every=1)
    l0, effective = activity.add(h, valid)
    assert not l0[~valid].any()
    assert not effective[~valid].any()
    check(activity.report(), by_hand(torch.nan_to_num(h), valid))


def test_parts_add_up_to_the_whole():
    h = sparse_h(6, 256, 200, 0.1)
    whole, parts = LayerActivity(200, sample_every=1), LayerActivity(200, sample_every=1)
    whole.add(h)
    for part in h.split([1, 3, 2]):
        parts.add(part)
    one, other = whole.report(), parts.report()
    for key in ("l1", "effective_neurons"):
        assert one.pop(key) == pytest.approx(other.pop(key), rel=1e-9)
    assert one.pop("magnitude_share") == pytest.approx(other.pop("magnitude_share"), rel=1e-9)
    assert one == other


def test_quantiles_of_whole_tokens():
    """1% of 700 is 7 tokens."""
    activity = LayerActivity(700)
    activity.add(torch.ones(1, 700, 700).tril(-1))  # token i has i active neurons
    expected = {"min": 0, "p1": 6, "p10": 69, "p50": 349, "p90": 629, "p99": 692, "max": 699}
    assert activity.report()["l0_quantiles"] == expected


def test_bytes_do_not_overflow():
    """Every neuron active everywhere fills every byte-wide counter to its top."""
    activity = LayerActivity(5632)
    l0, _ = activity.add(torch.ones(2, 256, 5632, dtype=torch.bfloat16))
    assert (l0 == 5632).all()
    report = activity.report()
    assert (report["l0"], report["always_on_neurons"]) == (5632, 5632)
    assert all(report["distinct"][run]["neurons"] == 5632 for run in ("16", "64", "128"))
    assert report["magnitude_share"]["10%"] == pytest.approx(564 / 5632, rel=1e-3)


def test_the_sample_is_even():
    h = sparse_h(4, 100, 64, 0.5)
    activity = LayerActivity(64, sample_every=61)
    for row in h.split(1):
        activity.add(row)
    sampled = h.flatten(0, 1)[::61].double().abs()
    top = sampled.sort(descending=True).values[:, :7].sum(1) / sampled.sum(1)
    report = activity.report()
    assert report["magnitude_sample"] == len(sampled) == 7
    assert report["magnitude_share"]["10%"] == pytest.approx(top.mean().item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    h = sparse_h(2, 64, 128, 0.2, dtype)
    activity = LayerActivity(128, sample_every=1)
    l0, effective = activity.add(h)
    assert (l0.dtype, effective.dtype) == (torch.int64, torch.float32)
    check(activity.report(), by_hand(h, torch.ones(2, 64, dtype=torch.bool)))


def test_a_layer_that_never_fires():
    activity = LayerActivity(40)
    activity.add(torch.zeros(1, 20, 40))
    report = activity.report()
    assert (report["l0"], report["dead_neurons"], report["magnitude_sample"]) == (0, 40, 0)
    assert set(report["hottest_share"].values()) == set(report["magnitude_share"].values()) == {None}
