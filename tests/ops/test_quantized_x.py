"""The block of a quantized x in plain PyTorch: what it means, against torchao's own tensors and against its formula."""

import pytest
import torch

from hf_twell.dispatch.key import CallKey
from hf_twell.dispatch.limits import limit
from hf_twell.ops import api, build, reference
from hf_twell.ops.reference import dequantized_rows, quantized_rows
from tests.ffn_cases import make_case
from tests.quantized_cases import assert_as_good_as_eager, eager_by_rows, quantized, quantized_case, truth_of

TINY = {torch.float32: 1e-44, torch.bfloat16: 1e-39, torch.float16: 6e-8}  # subnormal


def awkward_rows(dtype):
    """(60, 257): of many magnitudes, with NaN, infinities, zeros of both signs, tiny and huge ones, and lone values."""
    g = torch.Generator().manual_seed(0)
    largest = torch.finfo(dtype).max
    x = torch.randn(60, 257, generator=g) * torch.logspace(-6, 4, 60)[:, None]
    x[50:] = x[50:].sign()
    x[51] *= largest
    x[52] *= largest * 0.999
    x = x.to(dtype)
    x[1, 7] = float("nan")
    x[2, 9] = float("inf")
    x[3, 0], x[3, 256] = -float("inf"), float("nan")
    x[4] = 0.0
    x[5] = -0.0
    x[6] *= 0
    x[6, 100] = 1.0
    x[7] = x[7].sign() * TINY[dtype]
    x[8, ::2] = 0
    return x


def same(values, others):
    """Bit by bit, but for the sign of NaN."""
    values, others = values.float(), others.float()
    return torch.equal(values.isnan(), others.isnan()) and torch.equal(
        values.nan_to_num().view(torch.int32), others.nan_to_num().view(torch.int32)
    )


@pytest.mark.parametrize("shape", [(60, 257), (3, 20, 257)])
def test_rows_are_torchaos_bit_by_bit(dtype, shape):
    quantization = pytest.importorskip("torchao.quantization")
    x = awkward_rows(dtype)
    values, scales = quantized_rows(x.view(shape))
    theirs = quantization.Float8Tensor.from_hp(x.view(shape))
    assert (values.dtype, values.shape) == (torch.float8_e4m3fn, shape)
    assert (scales.dtype, scales.shape) == (torch.float32, (*shape[:-1], 1))
    values, scales = values.view(60, 257), scales.view(60, 1)
    ordinary = (theirs.scale != 0).view(60)
    assert not ordinary[4:6].any()
    assert same(values[ordinary], theirs.qdata.view(60, 257)[ordinary])
    assert same(scales[ordinary], theirs.scale.view(60, 1)[ordinary])
    # torchao's are NaN where x is 0 in these rows, and +-448 times 0 where it is not.
    assert not values[4:6].float().any()
    assert not scales[4:6].any()
    lost = ~ordinary
    lost[4:6] = False
    assert lost.any()
    error = (dequantized_rows(values, scales, torch.float64) - x.double())[lost]
    assert (error.abs() <= torch.finfo(torch.float32).tiny + x.double().abs()[lost] / 16).all()


def test_nan_and_infinity_make_all_of_a_token_nan(dtype):
    x = awkward_rows(dtype)
    values, scales = quantized_rows(x)
    stands_for = dequantized_rows(values, scales, dtype)
    assert stands_for[1:4].isnan().all()
    assert values[1].isnan().all()
    assert scales[1].isnan()
    assert scales[2].isinf()
    assert values[2, 9].isnan()
    assert not values[2].float().nan_to_num().any()
    kept = [0, *range(4, 60)]
    assert stands_for[kept].isfinite().all()
    # Where the scale is no subnormal number of x's dtype, which has fewer bits.
    plain = [row for row in kept if scales[row] >= torch.finfo(dtype).tiny]
    assert len(plain) > 30
    error = (stands_for[plain].double() - x[plain].double()).abs()
    assert (error <= x[plain].double().abs().amax(1, keepdim=True) / 16).all()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biases", [True, False])
def test_the_block_is_that_of_what_torchaos_rows_stand_for(dtype, gated, biases):
    """Gate and up by dequantized rows of x; in fp64 within rounding of products of torchao's tensors."""
    quantization = pytest.importorskip("torchao.quantization")
    case = quantized_case(limit("kDecodeMaxTokens") + 1, 40, 172, 0.05, dtype, kind="fp8", gated=gated, biases=biases)
    rows = quantization.Float8Tensor.from_hp(case["x"])
    x = rows.qdata.double() * rows.scale.double()
    wide = {name: None if t is None else t.double() for name, t in case.items()}

    def product(x, name):
        y = (x @ wide[f"w_{name}"].t()) * wide[f"s_{name}"].flatten()
        return y if wide[f"b_{name}"] is None else y + wide[f"b_{name}"]

    h = product(x, "gate").relu() * product(x, "up") if gated else product(x, "up").relu()
    torch.testing.assert_close(truth_of(case, quantize_x=True), product(h, "down"), rtol=1e-10, atol=1e-10)
    assert_as_good_as_eager(
        lambda **given: api.ffn(**given, quantize_x=True, backend="reference"), case, quantize_x=True
    )


@pytest.mark.parametrize("gated", [True, False])
def test_as_good_as_eager_by_pytorchs_product_of_rows(dtype, gated):
    """What the kernels' tests compare with on a GPU, and the reference with it."""
    for biases in (True, False):
        case = quantized_case(300, 48, 173, 0.05, dtype, kind="fp8", gated=gated, biases=biases)
        assert_as_good_as_eager(eager_by_rows, case, quantize_x=True)
        case["x"] = case["x"].view(3, 100, 48)
        assert_as_good_as_eager(
            lambda **given: reference.ffn(**given, quantize_x=True), case, quantize_x=True, other_eager=eager_by_rows
        )


def test_few_tokens_stay_as_they_are():
    case = quantized_case(limit("kDecodeMaxTokens") + 1, 40, 172, 0.05, torch.bfloat16, kind="fp8")
    few = case | {"x": case["x"][: limit("kDecodeMaxTokens")].view(2, -1, 40)}
    ask = {"quantize_x": True, "backend": "reference"}
    assert torch.equal(api.ffn(**few, **ask), api.ffn(**few, backend="reference"))
    y = api.ffn(**case, **ask)
    assert not torch.equal(y, api.ffn(**case, backend="reference"))
    assert torch.equal(api.ffn(**case | {"x": case["x"].view(5, 13, 40)}, **ask), y.view(5, 13, 40))
    assert torch.equal(api.ffn(**case | {"x": case["x"].t().contiguous().t()}, **ask), y)
    empty = case | {"x": case["x"][:0]}
    assert api.ffn(**empty, **ask).shape == (0, 40)


def test_autocast_quantizes_what_it_casts_to():
    case = quantized_case(70, 40, 172, 0.05, torch.float32, kind="fp8", biases=True)
    ask = {"quantize_x": True, "backend": "reference"}
    cast = {name: t.bfloat16() if name[:2] in ("x", "b_") else t for name, t in case.items()}
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(api.ffn(**case, **ask), api.ffn(**cast, **ask))
    expected = api.ffn(**cast, **ask)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(api.ffn(**case, **ask), expected)


def test_what_is_refused():
    case = quantized_case(70, 40, 172, 0.05, torch.bfloat16, kind="fp8")

    def refused(message, case, **changes):
        with pytest.raises(ValueError, match=message):
            api.ffn(**(case | changes), quantize_x=True)

    refused("quantize_x=True, and w_up is torch.bfloat16", make_case(70, 40, 172, 0.05, torch.bfloat16))
    refused(
        "w_up is torch.int8; x is quantized beside float8_e4m3fn weights alone",
        quantized(make_case(70, 40, 172, 0.05, torch.bfloat16)),
    )
    refused("quantize_x=True, and gradients are wanted", case, x=case["x"].clone().requires_grad_())
    with torch.no_grad():
        api.ffn(**case | {"x": case["x"].clone().requires_grad_()}, quantize_x=True, backend="reference")


@pytest.mark.skipif(not build.status("cpu", build=True).available, reason=build.status("cpu", build=True).reason)
def test_on_a_cpu_plain_pytorch_computes_it():
    case = quantized_case(70, 40, 172, 0.05, torch.bfloat16, kind="fp8")
    api._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="plain PyTorch: float8_e4m3fn weights on a CPU"):
        y = api.ffn(**case, quantize_x=True)
    assert torch.equal(y, reference.ffn(**case, quantize_x=True))
    with pytest.raises(ValueError, match="'cpu' cannot compute this: float8_e4m3fn weights on a CPU"):
        api.ffn(**case, quantize_x=True, backend="cpu")


@pytest.mark.parametrize(
    ("capability", "dtype", "hidden", "taken"),
    [
        ("9.0", torch.bfloat16, 48, True),
        ("9.0", torch.float16, 48, True),
        ("9.0", torch.float32, 48, False),
        ("9.0", torch.bfloat16, 40, False),
        ("8.0", torch.bfloat16, 48, False),
        ("10.0", torch.bfloat16, 48, False),
    ],
)
def test_what_cuda_kernels_are_asked_for(capability, dtype, hidden, taken):
    few, many = limit("kDecodeMaxTokens"), limit("kDecodeMaxTokens") + 1

    def takes(backend, tokens):
        key = CallKey("cuda", capability, dtype, torch.float8_e4m3fn, tokens, hidden, 4, quantize_x=True)
        return api._kernels_take(key, backend)

    assert takes("cuda", few)
    assert takes("auto", few)
    if taken:
        assert takes("cuda", many)
        return
    message = (
        f"x of more than 64 tokens is to be quantized, in {dtype} with D = {hidden} on a GPU of compute capability"
    )
    with pytest.raises(ValueError, match=f"backend 'cuda' cannot compute this: {message} {capability}"):
        takes("cuda", many)
    api._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=f"plain PyTorch: {message}") as caught:
        assert not any(takes("auto", many) for _ in range(3))
    assert len(caught) == 1


@pytest.mark.slow
def test_compiled_for_two_kinds_of_calls():
    """Any number of tokens takes one of two graphs: of up to 64, and of more."""
    case, graphs = quantized_case(300, 40, 172, 0.05, torch.float32, kind="fp8"), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    function = torch.compile(lambda **given: reference.ffn(**given, quantize_x=True), backend=count, fullgraph=True)
    for tokens in (65, 300, 66, 64, 2, 63, 129, 17, 200):
        part = case | {"x": case["x"][:tokens]}
        torch._dynamo.mark_dynamic(part["x"], 0)
        torch.testing.assert_close(function(**part), reference.ffn(**part, quantize_x=True))
    assert len(graphs) == 2
