"""Which way each layer of a sparse model goes in vLLM, decided once, before anything is compiled or captured.

A layer whose density is known goes by the operator, which takes kernels at the numbers of tokens where they are faster.
One that nothing can be gained for stays vLLM's own block, with ReLU: it then quantizes, takes adapters and adds biases
as vLLM does.
"""

from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

import hf_twell
from hf_twell.dispatch.activity import Activity
from hf_twell.dispatch.choose import choose_experts, dense_dtypes, highest_alike, sizes_problem, takes_experts
from hf_twell.dispatch.key import HOPPER, CallKey, device_class, key_of
from hf_twell.dispatch.limits import limit
from hf_twell.ops import api
from hf_twell.serving.vllm_plugin import quantized
from hf_twell.serving.vllm_plugin.density import known_activity, known_settings
from hf_twell.serving.vllm_plugin.places import Place

ABOVE_LIMITS = 2.0  # a share above them all: not infinite, as compiled code has it for a number
HOW_TO_CHANGE = (
    "to use kernels, store it with `hf-twell sparsify MODEL OUT --text FILE`, or give it: "
    """--additional-config '{"hf_twell": {"density": 0.01}}'"""
)
NOT_TIMED = (
    f"and kernels for them have been timed on GPUs of compute capability {HOPPER} alone; to use them, give "
    """--additional-config '{"hf_twell": {"kernels": true}}'"""
)


@dataclass
class Plan:
    """Attributes:
    activities: of each place that was asked about, what its operator gets, or None for the plain way.
    summary: one line that says so.
    asked: whether `additional_config` asks for kernels, beyond what has been timed.
    """

    activities: dict[int, Activity | None]
    summary: str
    asked: bool

    def key(self) -> list:
        """As JSON, for the key of a cache of compiled code."""
        return [hf_twell.__version__, sorted(self.activities.items())]


def decide(vllm_config: VllmConfig, places: dict[int, Place], chosen: list[int]) -> Plan:
    """The way of each of the stock blocks in these places, their weights not being loaded yet, where kernels may
    compute the layers `chosen`. A ValueError of a density, in `additional_config` or in the checkpoint's `twell` entry,
    that cannot be one."""
    config = vllm_config.model_config.hf_config
    entry = getattr(config, "twell", None) or {}
    total = max(config.get_text_config().num_hidden_layers, max(places, default=0) + 1)
    known, source = known_activity(vllm_config.additional_config, entry, total)
    off, asked = None, known_settings(vllm_config.additional_config).get("kernels")
    if asked is False:
        off = "additional_config turns the kernels off"
    elif vllm_config.lora_config is not None:
        off = "LoRA is on"
    activities: dict[int, Activity | None] = {}
    reasons: list[str] = []
    for index, place in places.items():
        problem = off or _problem(place, asked is True)
        if problem is None and place.layer not in chosen:
            problem = "the checkpoint's twell entry leaves them out"
        if problem is None and known is None:
            problem = f"{source}; {HOW_TO_CHANGE}"
        activities[index] = None
        if problem is None and known is not None:
            same, key = known[index], _key(place.block, asked is True)
            if not hasattr(place.block, "routed_experts"):  # whose operator nothing is compiled for
                same = highest_alike(key, same)
            elif key.device == "cuda" and choose_experts(key, same) == "plain":
                same = Activity(ABOVE_LIMITS)
            shares = [share if share is None else min(share, ABOVE_LIMITS) for share in (same.density, same.union)]
            if set(shares) - {None, ABOVE_LIMITS}:
                activities[index] = Activity(shares[0], union=shares[1])
            else:
                problem = "they are too dense for kernels to be faster"
        if problem is not None and problem not in reasons:
            reasons.append(problem)
    return Plan(activities, _summary(activities, known, source, reasons), asked is True)


def _key(block: Any, asked: bool) -> CallKey:
    """As its operator's, of a call of one token; `asked`: whether `additional_config` asks for kernels."""
    routed = getattr(block, "routed_experts", None)
    if routed is not None:
        dtype, gate_up, down, rival = routed.params_dtype, routed.w13_weight[0], routed.w2_weight[0], "torch"
    else:
        linear = block.gate_up_proj
        dtype, gate_up, down, rival = linear.params_dtype, linear.weight, block.down_proj.weight, "vllm"
    x = gate_up.new_empty(1, gate_up.shape[1], dtype=dtype)
    return key_of(x, gate_up.chunk(2)[0], down, asked=asked, rival=rival)


def _problem(place: Place, asked: bool) -> str | None:
    """Why the kernels do not compute this block as vLLM has built it, or None; `asked`: whether they are asked for."""
    block = place.block
    if place.is_shared_expert:
        return "shared experts stay plain"
    routed = getattr(block, "routed_experts", None)
    if routed is None and (problem := _problem_of_linears(block, asked)):
        return problem
    key = _key(block, asked)
    if key.dtype not in dense_dtypes(key.device):
        return f"they compute in {key.dtype} on {key.device}"
    if too_large := sizes_problem(key):
        return f"they have {too_large}"
    if routed is not None:
        if key.device == "cuda" and not takes_experts(key, 1, len(routed.w13_weight)):
            return f"they have more than {limit('kCudaExperts')} experts"
        if choose_experts(key, Activity(0.0)) == "plain":
            small = "they are experts too small for kernels to be faster"
            return small if key.device == "cpu" else f"they are routed experts, {NOT_TIMED}"
    if api.resolve("auto", key.device) == "reference":  # compiles them now, not in a capture; says why it cannot
        return f"no compiled kernels could be had for {key.device}"
    return None


def _problem_of_linears(block: Any, asked: bool) -> str | None:
    linears = block.gate_up_proj, block.down_proj
    if any(linear.bias is not None for linear in linears):
        return "they have biases"
    if quantized.is_quantized(block):
        if problem := quantized.problem(block):
            return f"their weights are quantized, and {problem}"
        weight = block.gate_up_proj.weight
        if weight.is_cuda and not asked and device_class("cuda", weight.device.index)[1] != HOPPER:
            return f"their weights are quantized, {NOT_TIMED}"
    elif not all(type(linear.quant_method) is UnquantizedLinearMethod for linear in linears):
        return "their weights are quantized in a way for which there are no kernels"
    return None


def _summary(activities, known, source, reasons) -> str:
    total, sparse = len(activities), sum(activity is not None for activity in activities.values())
    parts = [f"{sparse} of {total} feed-forward blocks use the sparse kernels where these are faster"]
    if sparse:
        shares = [known[index].density for index, activity in activities.items() if activity is not None]
        parts.append(f"at densities of {min(shares):.2%} to {max(shares):.2%}, from {source}")
    if reasons:
        parts.append(f"{'the others are' if sparse else 'they are'} plain ReLU blocks: {'; '.join(reasons)}")
    return "hf_twell: " + ", ".join(parts)
