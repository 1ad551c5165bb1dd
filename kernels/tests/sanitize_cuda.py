"""Small calls of every CUDA path, for compute-sanitizer (`make sanitize`): each buffer is an allocation of its own, so
that an access past its end is seen. Prints the number of calls; results are checked too, against plain PyTorch.
Arguments name some of PARTS, else all run. racecheck cannot follow Hopper's kernels (twell_cuda/LOG.md)."""

import functools
import itertools
import os
import sys

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

from hf_twell.ops import api, build, experts, reference
from tests import ffn_cases
from tests.quantized_cases import KINDS, quantized_case, truth_of

TOKENS = {"decode": (1, 2, 3, 4, 17, 64), "sm90": (1, 65, 130, 300, 2100), "portable": (1, 65, 130, 300)}
TRAINED = ((1, 64), (300, 64), (300, 4), (130, 1), (1, None), (300, None))  # tokens, capacity; None: F, for columns
# D, F, density, gated, biases, dtype
CALLS = (
    (8, 16, 1.0, True, True, torch.bfloat16),
    (33, 70, 0.1, True, False, torch.float16),
    (72, 344, 0.02, True, True, torch.bfloat16),
    (136, 1001, 0.0, False, True, torch.bfloat16),
    (136, 1001, 0.3, False, False, torch.float16),
    (264, 1536, 1.0, True, False, torch.bfloat16),
    (1032, 2100, 0.02, True, True, torch.bfloat16),  # large enough for one kernel to decode up to four tokens
)
# By columns, tokens of a kind together: of weights' gradients steady neurons beside others, pieces of the tokens; and
# two chunks.
SORTED = (*((call, 4200) for call in CALLS), (CALLS[2], 33_000))
# The same where runs of so many tokens count: within half a block, across its border, and across that of two chunks.
SHARED = (*((call, *of_runs) for call in CALLS for of_runs in ((1, 1), (300, 16), (300, 200))), (CALLS[2], 33_000, 500))
ORDER = ("x", "w_up", "w_down", "w_gate", "b_up", "b_down", "b_gate", "s_up", "s_down", "s_gate")
QUANTIZED_CALLS = (
    (16, 16, 1.0, True, True, torch.bfloat16),
    (33, 70, 0.1, True, False, torch.float16),
    (80, 344, 0.02, True, True, torch.bfloat16),
    (144, 1001, 0.3, False, False, torch.float16),
    (1040, 2100, 0.02, True, True, torch.bfloat16),
    (2064, 2101, 0.02, True, True, torch.bfloat16),  # too large for one kernel
)


def infer(path) -> int:
    if path == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        return 0
    os.environ["HF_TWELL_CUDA_PATH"] = path
    calls = 0
    for hidden, width, density, gated, biases, dtype in CALLS:
        for tokens in TOKENS[path]:
            case = on_gpu(tokens, hidden, width, density, dtype, gated=gated, biases=biases)
            if tokens > 1:
                case["x"][tokens // 2] = float("nan")  # active for every neuron there is, and for none besides
            with torch.no_grad():
                y, truth = api.ffn(**case, backend="cuda"), reference.ffn(**case)
            torch.testing.assert_close(y, truth, rtol=0.05, atol=0.05, equal_nan=True)
            calls += 1
    return calls


def infer_quantized() -> int:
    """The kernels that read int8 and fp8, and what dequantizes them for the others."""
    os.environ.pop("HF_TWELL_CUDA_PATH", None)
    calls = 0
    for kind, sizes, by_column in itertools.product(KINDS, QUANTIZED_CALLS, (True, False)):
        *sizes, density, gated, biases, dtype = sizes
        options = {"kind": kind, "gated": gated, "biases": biases, "by_column": by_column}
        for tokens in (1, 3, 9, 16, 17, 64, 65, 130, 192, 193):
            case = quantized_case(tokens, *sizes, density, dtype, **options)
            case = {name: None if tensor is None else tensor.cuda() for name, tensor in case.items()}
            with torch.no_grad():
                y, truth = torch.ops.hf_twell.infer(*(case.get(name) for name in ORDER)), reference.ffn(**case)
            torch.testing.assert_close(y, truth, rtol=0.05, atol=0.05)
            calls += 1
    return calls


def infer_quantized_x() -> int:
    """Calls that quantize x, one of its tokens NaN, and those of so few tokens that they do not."""
    if torch.cuda.get_device_capability() != (9, 0):
        return 0
    os.environ.pop("HF_TWELL_CUDA_PATH", None)
    calls = 0
    for (hidden, width, density, gated, biases, dtype), by_column in itertools.product(QUANTIZED_CALLS, (True, False)):
        if hidden % 16 != 0:
            continue
        options = {"kind": "fp8", "gated": gated, "biases": biases, "by_column": by_column}
        for tokens in (1, 64, 65, 128, 130, 300, 2100):
            case = quantized_case(tokens, hidden, width, density, dtype, **options)
            case = {name: None if tensor is None else tensor.cuda() for name, tensor in case.items()}
            if tokens > 64:
                case["x"][tokens // 2] = float("nan")
            with torch.no_grad():
                y = torch.ops.hf_twell.infer(*(case.get(name) for name in ORDER), True)
                truth = truth_of(case, quantize_x=True).to(dtype)
            torch.testing.assert_close(y, truth, rtol=0.05, atol=0.05, equal_nan=True)
            calls += 1
    return calls


def routed_experts() -> int:
    """Groups of one to four octets, those of two by one and by two tiles, some of no expert, one token NaN."""
    calls = 0
    cases = ((1, 8, 40, 41, 17), (9, 2, 30, 72, 48), (33, 2, 6, 2056, 33), (64, 8, 130, 264, 20), (64, 4, 7, 72, 100))
    cases += ((256, 8, 130, 264, 20), (24, 2, 8, 72, 33))
    for (tokens, per_token, number, hidden, width), dtype, threshold in itertools.product(
        cases, (torch.bfloat16, torch.float16), (-9.0, 1.3, 9.0)
    ):
        x, up, down = (
            torch.randn(s, device="cuda")
            for s in ((tokens, hidden), (number, 2 * width, hidden), (number, hidden, width))
        )
        x[:, 0], up[:, :width, 0] = 1.0, -threshold * hidden**0.5
        x[tokens // 2] = float("nan")
        index = torch.rand(tokens, number, device="cuda").topk(per_token).indices
        index[-1, 0] = number
        share = torch.rand(tokens, per_token, device="cuda")
        x, up, down = x.to(dtype), (up / hidden**0.5).to(dtype), (down / width**0.5).to(dtype)
        y = torch.ops.hf_twell.experts(x, index, share, *up.chunk(2, dim=1), down)
        truth = experts.experts(*(t.float() if t.is_floating_point() else t for t in (x, index, share, up, down)))
        assert_rows_close(y.double(), truth.double(), torch.finfo(dtype).eps)
        calls += 1
    return calls


def assert_rows_close(y, truth, bound) -> None:
    """Each row's error is at most `bound` times its norm; rows of zeros are exact, and NaN stand where they should."""
    # By rows, as an element may be the small rest of large terms. Each h and each y is rounded once, by eps / 2 at most
    # and by a fifth of eps on average; errors of h add up as h's products do. So a row is off by about 0.3 eps.
    assert torch.equal(y.isnan(), truth.isnan())
    error, norm = (y - truth).nan_to_num().norm(dim=-1), truth.nan_to_num().norm(dim=-1)
    assert (error <= bound * norm).all(), f"{(error / norm).nan_to_num().max():.1e} of a row's norm, not {bound:.1e}"


def norms() -> int:
    """The norm ahead of a block, in one and in two vectors a thread, one row NaN."""
    calls = 0
    for dtype, columns, rows in itertools.product(
        (torch.bfloat16, torch.float16), (8, 72, 2048, 8192, 8200, 16384), (1, 3, 200)
    ):
        x, residual, weight = (torch.randn(s, device="cuda").to(dtype) for s in ((rows, columns),) * 2 + ((columns,),))
        x[rows // 2] = float("nan")
        y, total = torch.ops.hf_twell.add_rms_norm(x, residual, weight, 1e-5)
        wide = x.double() + residual.double()
        truth = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight
        torch.testing.assert_close(y.double(), truth, rtol=0.01, atol=0.01, equal_nan=True)
        torch.testing.assert_close(total, x + residual, rtol=0, atol=0, equal_nan=True)
        calls += 1
    return calls


def train() -> int:
    """With room for all pairs, for some blocks' and for none; and by columns, where runs of neighbours may count."""
    if torch.cuda.get_device_capability() != (9, 0):
        return 0
    os.environ.pop("HF_TWELL_CUDA_PATH", None)
    calls = 0
    cases = [(call, *of_training, False, None) for call, of_training in itertools.product(CALLS, TRAINED)]
    cases += [(call, tokens, None, True, None) for call, tokens in SORTED]
    cases += [(call, tokens, None, False, share) for call, tokens, share in SHARED]
    for (hidden, width, density, gated, biases, dtype), tokens, capacity, by_kind, share in cases:
        case = on_gpu(tokens, hidden, width, density, dtype, gated=gated, biases=biases)
        if by_kind:
            case["x"] = torch.cat([case["x"][kind :: ffn_cases.KINDS] for kind in range(ffn_cases.KINDS)])
        scale = torch.tensor(0.01, device="cuda")
        terms = {"l1_scale": scale, "count_scale": scale, "token_weight": torch.ones(tokens, device="cuda")}
        if share is not None:
            with scale.device:
                case = ffn_cases.exact_gates(case)
            terms["runs"] = ffn_cases.make_runs(1, tokens, share, "holes").to(scale.device)
        gradients = []
        for ffn in (functools.partial(api.ffn, backend="cuda", capacity=capacity or width), reference.ffn):
            leaves = {name: None if t is None else t.clone().requires_grad_() for name, t in case.items()}
            tally = torch.zeros(1 + width, device="cuda", requires_grad=True)
            unions = None if share is None else torch.zeros(1, device="cuda", requires_grad=True)
            ffn(**leaves, **terms, tally=tally, unions=unions).float().square().sum().backward()
            gradients.append([t.grad.float() for t in (*leaves.values(), tally, unions) if t is not None])
        for ours, theirs in zip(*gradients, strict=True):
            assert (ours - theirs).norm() <= 0.05 * theirs.norm() + 0.05
        calls += 1
    return calls


def on_gpu(*args, **kwargs) -> dict:
    case = ffn_cases.make_case(*args, **kwargs)
    return {name: None if tensor is None else tensor.cuda() for name, tensor in case.items()}


PARTS = {
    **{path: functools.partial(infer, path) for path in TOKENS},
    "quantized": infer_quantized,
    "quantized_x": infer_quantized_x,
    "experts": routed_experts,
    "norms": norms,
    "train": train,
}


def main() -> None:
    names = sys.argv[1:] or list(PARTS)
    if unknown := set(names) - PARTS.keys():
        sys.exit(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if not (cuda := build.status("cuda", build=True)).available:
        sys.exit(cuda.reason)
    for name in names:
        torch.manual_seed(0)
        print(f"{name}: {PARTS[name]()} calls")


main()
