"""`choose`: the one function that decides which way a call goes; and what others than an eager call ask of it.

    key = key_of(x, w_up, w_down)
    choose(key)                    # nothing is known of the activity: a bare `ops.ffn`
    choose(key, Activity(0.01))    # a block that has sampled it

Kernels are exact at every density, so the choice decides nothing but time. What no kernel can compute at all says
`problem`, which the operator asks.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import torch

from hf_twell.dispatch.activity import UNKNOWN, Activity
from hf_twell.dispatch.key import EIGHT_BIT, HOPPER, CallKey
from hf_twell.dispatch.limits import limit

Way = Literal["plain", "dense", "kernels"]
_16_BITS = (torch.bfloat16, torch.float16)
_CUDA_TABLES = ("kCudaLimits", "kCudaUnionLimits")  # of evaluation


def choose(key: CallKey, activity: Activity = UNKNOWN) -> Way:
    """The fastest way to compute a call.

    "plain": plain PyTorch, of a block its own linears; "dense": PyTorch's matmuls, and one kernel each way for all that
    lies between them; "kernels": the sparse operator, which on a CPU looks at the activity itself and computes plain
    matmuls beyond the same limits.
    """
    if key.device not in ("cpu", "cuda"):  # others have no kernels
        return "plain"
    if (key.asked and key.device == "cuda" and key.rival == "torch") or faster(key, activity):
        return "kernels"
    # Between plain matmuls, kernels count no runs.
    if key.compiled or key.runs or key.weights in EIGHT_BIT or key.dtype not in dense_dtypes(key.device):
        return "plain"
    if key.device == "cpu" and not key.training and key.tokens * key.width < limit("kCpuSmallestH"):
        return "plain"
    return "dense"


def faster(key: CallKey, activity: Activity) -> bool:
    """Whether kernels take less time than plain matmuls, as far as it is known.

    Few tokens cost what their density says, many on a GPU what their union says (`max_union`), many on a CPU what the
    lower of both says (`goes_by_union`).
    """
    dequantizes = key.device == "cuda" and key.quantize_x and quantizing_problem(key)
    if dequantizes and float(key.capability) >= limit("kCudaFp8Capability"):
        return False  # others' linears use tensor cores for e4m3, which plain matmuls on dequantized weights leave idle
    if activity.chosen is not None:
        return activity.chosen
    if activity.union is not None and (most := max_union(key)) is not None:
        return activity.union <= most
    if activity.density is None:
        # With runs a CPU's operator computes no plain matmuls in backward, however dense it finds the call.
        blind = key.runs and key.device == "cpu" and not key.asked
        return not blind and not too_small(key)
    if _trains_by_union(key, activity):
        return True
    if key.runs and key.device == "cuda":  # where kernels that keep pairs know none
        return False
    most = max_density(key, activity.on_kernels)
    if activity.union is not None and activity.density > most and goes_by_union(key, activity.density):
        return activity.union <= limit(f"kCpuMaxUnion{_amx(key)}")
    return most > 0 and activity.density <= most


def goes_by_union(key: CallKey, density: float) -> bool:
    """Whether a CPU's call too dense for kernels is one that they are faster at all the same if neighbours share much.

    Source: kernels/twell_cpu/LOG.md, "Rows that neighbours share".
    """
    if key.device != "cpu" or key.training or key.rival != "torch" or key.weights in EIGHT_BIT:
        return False
    if key.compiled or key.tokens < limit("kNeighbours"):
        return False
    return max_density(key) < density <= min(limit(f"kCpuUnionMaxDensity{_amx(key)}"), max_density_of_size(key))


def choose_experts(key: CallKey, activity: Activity) -> Way:
    """The fastest way to compute a layer's routed experts: "kernels" or "plain".

    Args:
        key: of one expert's call, with as many tokens as each has on average: on a CPU of those that have any, on a
            GPU, where nobody waits to know them, of all.

    Source: kernels/twell_cpu/LOG.md, "Routed experts"; kernels/twell_cuda/LOG.md, "Routed experts".
    """
    if key.asked:
        return "kernels"
    if key.device == "cuda":
        most = max_experts_density(key)
        return "kernels" if most > 0 and activity.density is not None and activity.density <= most else "plain"
    if key.device != "cpu" or key.hidden * key.width < limit("kCpuExpertElements"):
        return "plain"
    return "kernels" if choose(key, activity) == "kernels" else "plain"


def max_experts_density(key: CallKey) -> float:
    """Density up to which a GPU's kernels of a layer's routed experts are faster than plain matmuls; 0: at none."""
    return _row("kCudaExpertLimits", key.tokens)[1] if key.capability == HOPPER else 0.0  # others: not measured


def takes_experts(key: CallKey, pairs: int, experts: int) -> bool:
    """Whether a GPU's kernels compute a layer's routed experts at once, for so many pairs of a token and an expert."""
    fits = pairs <= limit("kCudaExpertPairs") and experts <= limit("kCudaExperts")
    return fits and key.device == "cuda" and key.dtype == key.weights in _16_BITS and sizes_problem(key) is None


def max_union(key: CallKey) -> float | None:
    """Union up to which kernels are faster than plain matmuls, of kNeighbours (128) tokens.

    None: such a call goes by its density, though the union be known.

    Source: kernels/twell_cuda/LOG.md, "Where the limits of union come from".
    """
    if key.device != "cuda" or key.training or key.capability != HOPPER or key.weights in EIGHT_BIT:
        return None  # not measured
    if key.rival == "vllm" and key.tokens <= limit("kVllmCudaDecodeTokens"):
        return None  # one token each of so many sequences: strangers
    return _row("kCudaUnionLimits", key.tokens)[1 + _size(key, "kCudaUnionMediumElements")] or None


def columns_pay(key: CallKey, activity: Activity) -> bool:
    """Whether a block trains fastest by kernels that keep columns: than by plain matmuls, and than by pairs.

    It does so by a capacity of F: see `hf_twell.ops.ffn`.

    Source: kernels/twell_cuda/LOG.md, "Columns".
    """
    if not _trains_by_union(key, activity):
        return False
    _, _, pairs, _ = _row("kCudaTrainingUnionLimits", key.tokens)
    return activity.union <= pairs + limit("kCudaColumnsDensity") * activity.density


def _trains_by_union(key: CallKey, activity: Activity) -> bool:
    """Whether neighbours share so much that training by columns is faster than plain matmuls, whatever pairs are."""
    if key.device != "cuda" or not key.training or activity.union is None or activity.density is None:
        return False
    _, without_runs, _, with_runs = _row("kCudaTrainingUnionLimits", key.tokens)
    most = with_runs if key.runs else without_runs
    return activity.union <= most * (limit("kCudaTrainingBack") if activity.on_kernels else 1.0)


def _size(key: CallKey, medium: str) -> int:
    """Which of a row's limits is for matrices of this size: 0, 1 or 2. `medium` names the fewest elements of 1."""
    elements = key.hidden * key.width
    return (elements >= limit(medium)) + (elements >= limit("kCudaLargeElements"))


def max_density(key: CallKey, on_kernels: bool = False) -> float:
    """Density up to which kernels are faster than plain matmuls; 0: at none.

    Args:
        on_kernels: whether the block trains by kernels already, which it then does up to a somewhat higher density.

    Source: the tables of kernels/twell_cpu/LOG.md and kernels/twell_cuda/LOG.md.
    """
    if key.device not in ("cpu", "cuda") or too_small(key):
        return 0.0
    if key.device == "cuda" and key.training:
        return _row("kCudaTrainingLimits", key.tokens)[1] * (limit("kCudaTrainingBack") if on_kernels else 1.0)
    if key.device == "cuda":
        size = 1 + _size(key, "kCudaMediumElements")
        most = _row("kCudaLimits", key.tokens)[size]
        if key.rival == "torch":
            return most
        if key.weights not in EIGHT_BIT:
            return min(most, _row("kVllmCudaLimits", key.tokens)[size])
        if key.weights == torch.int8 and key.tokens > limit("kVllmCudaInt8MaxTokens"):
            return 0.0
        return most if key.asked else min(most, limit("kVllmCuda8BitMaxDensity"))
    if key.training:
        return max_density_of_size(key)
    float32 = key.dtype == key.weights == torch.float32
    table = f"kCpuLimits{'Float32' if float32 else _amx(key)}"
    most = min(_row(table, key.tokens)[1], max_density_of_size(key))
    if key.rival == "torch":
        return most
    # There a block goes one way at all numbers of tokens: the way of many.
    vllm = "kVllmCpuInt8MaxDensity" if key.weights == torch.int8 else f"kVllmCpuMaxDensity{_amx(key)}"
    return min(most, limit(table)[-1][1], limit(vllm))


def max_density_of_size(key: CallKey) -> float:
    """What of `max_density` goes by all but the number of tokens; at most 1.

    A CPU's operator is told this limit. That of its table it finds itself, by the number of tokens, which a graph may
    leave open.
    """
    if key.device == "cpu" and key.training:
        return limit(f"kCpuTrainingMaxDensity{_amx(key)}")
    return limit("kCpuCachedMaxDensity") if key.device == "cpu" and _in_cache(key) else 1.0


def too_small(key: CallKey) -> bool:
    """Whether a call without gradients is too small for a CPU's kernels to be faster at any density."""
    if key.device != "cpu" or key.training or key.exported or key.asked:
        return False
    if key.casts and key.tokens < limit(f"kCpuMinTokensCast{_amx(key)}"):
        return True
    if not _in_cache(key):
        return False
    elements = key.hidden * key.width
    if elements < limit("kCpuSmallestElements"):
        return True
    few = _at_most(key.tokens, limit("kCpuFewTokens"))
    work = limit("kCpuSmallestWorkFew" if few else "kCpuSmallestWork")
    return _at_most(key.tokens, (work - 1) // elements)


def sample_weight(key: CallKey) -> int:
    """For how many calls one counts between two samples of its block's activity; 0 where that decides nothing."""
    if key.device != "cpu":
        return 1
    return 0 if too_small(key) else -(-key.tokens // limit("kCpuSampleCallTokens"))


def _in_cache(key: CallKey) -> bool:
    """Whether plain matmuls of these weights are that fast; 8-bit ones they dequantize in each call."""
    if key.asked or key.dtype != torch.float32 or key.weights in EIGHT_BIT:
        return False
    return key.hidden * key.width < limit("kCpuCachedElements")


def _at_most(tokens: int, most: float) -> bool:
    """In a graph, which is guarded by the answer, tokens that depend on data, which no guard may ask, count as few."""
    if not torch.compiler.is_compiling():
        return tokens <= most
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # Dynamo has imported it

    return guard_or_true(tokens <= most)


def _amx(key: CallKey) -> str:
    """The end of the names of limits that this processor has for this type."""
    return "Amx" if key.capability == "amx" and key.dtype == torch.bfloat16 else ""


def _row(table: str, tokens: float) -> tuple[float, ...]:
    return next(row for row in limit(table) if tokens <= row[0])


def dense_dtypes(device: str) -> tuple[torch.dtype, ...]:
    """In which kernels compute what lies between a dense block's matmuls."""
    return (*_16_BITS, torch.float32) if device == "cpu" else _16_BITS if device == "cuda" else ()


# What no kernel can compute


def problem(key: CallKey) -> str | None:
    """Why no kernels can compute such a call, or None."""
    types = {key.dtype, torch.float32 if key.weights in EIGHT_BIT else key.weights}
    if not types <= {*_16_BITS, torch.float32}:
        return f"dtype {key.dtype}; the kernels take float32, bfloat16 and float16"
    if key.weights == torch.float8_e4m3fn and key.device == "cpu":
        return "float8_e4m3fn weights on a CPU; the kernels there take int8"
    if key.weights in EIGHT_BIT and key.training:
        kind = str(key.weights).removeprefix("torch.")
        return f"gradients are wanted through {kind} weights; the kernels compute none: use torch.no_grad()"
    if sizes := sizes_problem(key):
        return sizes
    if key.quantize_x and (quantizing := quantizing_problem(key)):
        return quantizing
    if gradients := training_problem(key):
        return f"gradients are wanted {gradients}; or train with backend='auto', which uses plain PyTorch"
    return None


def sizes_problem(key: CallKey) -> str | None:
    """Why a block of these sizes is too large for the kernels of any device, or None."""
    width, hidden = limit("kMaxWidth"), limit("kMaxHidden")
    if 0 < key.hidden <= hidden and 0 < key.width <= width:
        return None
    return f"D = {key.hidden}, F = {key.width}; the kernels take 1..{hidden} and 1..{width}"


def training_problem(key: CallKey) -> str | None:
    """Why the CUDA kernels compute no gradients for a call that wants them, or None: the end of a sentence."""
    if not key.training or key.device != "cuda":
        return None
    if key.dtype not in _16_BITS:
        return f"in {key.dtype}; its training kernels take bfloat16 and float16: cast the model or use torch.autocast"
    if key.capability != HOPPER:
        return f"on a GPU of compute capability {key.capability}; its training kernels need {HOPPER}"
    return None


def quantizing_problem(key: CallKey) -> str | None:
    """Why the CUDA kernels do not quantize a call's x, or None.

    How many tokens there are is asked last: a compiled graph is not guarded by it where the answer would be the same.
    """
    most = limit("kDecodeMaxTokens")
    if (key.capability == HOPPER and key.hidden % 16 == 0 and key.dtype in _16_BITS) or key.tokens <= most:
        return None
    return (
        f"x of more than {most} tokens is to be quantized, in {key.dtype} with D = {key.hidden} on a GPU of compute "
        f"capability {key.capability}; the kernels quantize bfloat16 and float16 with D a multiple of 16 on {HOPPER}"
    )


# What is asked once, for calls that cannot ask for themselves


def choices_by_tokens(layers: Sequence[tuple[CallKey, Activity]]) -> list[dict[float, bool]]:
    """For each of a model's layers, whether kernels are faster for so many tokens or fewer.

    The numbers of tokens are those at which the choice of any layer changes, and infinity: a graph, which is guarded by
    the one choice that it reads, is shared by all layers of that choice.
    """
    rows = sorted({row[0] for table in _CUDA_TABLES for row in limit(table)})
    known = [{most: faster(key._replace(tokens=most), activity) for most in rows} for key, activity in layers]
    kept = [most for most, more in itertools.pairwise(rows) if any(each[most] != each[more] for each in known)]
    return [{most: each[most] for most in (*kept, rows[-1])} for each in known]


def choice_for(known: dict[float, bool], tokens: int) -> bool:
    """That of `choices_by_tokens` for so many tokens, a number that a graph may leave open.

    One that depends on data, which no guard may ask, counts as few.
    """
    *ends, last = known
    for most in ends:
        if _at_most(tokens, most):
            return known[most]
    return known[last]


def highest_alike(key: CallKey, activity: Activity) -> Activity:
    """The highest density and union at which `choose` says the same in evaluation, at every number of tokens.

    Each is one of the limits, or infinite where kernels are faster at no number of tokens that goes by it. An engine
    that writes them into compiled code writes these: layers of different activity then mostly share their code.
    """
    keys = [key._replace(tokens=tokens) for tokens in _ends(key)]
    by_union = {} if activity.union is None else {of: most for of in keys if (most := max_union(of)) is not None}
    limits = {max_density(of) for of in keys if of not in by_union}
    known = math.inf if activity.density is None else activity.density
    density = min((most for most in limits if known <= most > 0), default=math.inf)
    union = activity.union
    if union is not None:
        union = min((most for most in by_union.values() if union <= most), default=math.inf)
    return Activity(density, union=union)


def _ends(key: CallKey) -> set[int]:
    """Numbers of tokens, one of each stretch in which the limit of density of such a call is one."""
    on_cpu, on_gpu = ("kCpuLimits", "kCpuLimitsFloat32", "kCpuLimitsAmx"), (*_CUDA_TABLES, "kVllmCudaLimits")
    tables = on_cpu if key.device == "cpu" else on_gpu
    ends = {row[0] for table in tables for row in limit(table)} - {math.inf}
    elements = max(1, key.hidden * key.width)
    ends |= {limit("kVllmCudaDecodeTokens"), limit("kVllmCudaInt8MaxTokens"), limit("kCpuFewTokens")}
    ends |= {limit("kCpuMinTokensCast") - 1, limit("kCpuMinTokensCastAmx") - 1}
    ends |= {(limit(work) - 1) // elements for work in ("kCpuSmallestWorkFew", "kCpuSmallestWork")}
    return {1, *ends, *(end + 1 for end in ends)} - {0}
