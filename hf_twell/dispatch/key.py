"""What a call is before anything is known of its values."""

import functools
import os
from typing import Any, NamedTuple

import torch

from hf_twell.dispatch.constant import assume_constant_result

HOPPER = "9.0"  # the compute capability of GPUs whose kernels train and quantize x
EIGHT_BIT = (torch.int8, torch.float8_e4m3fn)  # types of weights that have scales


class CallKey(NamedTuple):
    """All that decides a call's way, but for the block's activity.

    Attributes:
        device: its type, "cuda" or "cpu"; no kernels are known for others.
        capability: a GPU's, such as "9.0"; "amx" where a CPU's kernels multiply bfloat16 on a matrix unit, else "".
        dtype: what the call computes in: x's, or autocast's.
        weights: their dtype; int8 and float8_e4m3fn ones have scales.
        tokens: T, the rows of x: those of all sequences together. A graph may leave it open.
        hidden, width: D and F.
        training: whether gradients of something are wanted, now or when re-entrant checkpointing runs it again.
        runs: whether the count term of training counts runs of tokens, too.
        quantize_x: whether x is to be quantized, as torchao's or vLLM's dynamic fp8 does it.
        casts: whether kernels would cast float32 weights that autocast keeps cast for plain matmuls.
        compiled: whether the call is traced into a graph.
        exported: whether that is `torch.export`'s, for every number of tokens.
        asked: whether kernels were asked for: by a backend's name (a GPU's at every density, a CPU's at every size) or
            in vLLM beyond what has been timed.
        rival: whose plain matmuls kernels have to beat: "torch" or "vllm".
    """

    device: str
    capability: str
    dtype: torch.dtype
    weights: torch.dtype
    tokens: int
    hidden: int
    width: int
    training: bool = False
    runs: bool = False
    quantize_x: bool = False
    casts: bool = False
    compiled: bool = False
    exported: bool = False
    asked: bool = False
    rival: str = "torch"

    def of_expert(self, pairs: int, experts: int) -> "CallKey":
        """That of one expert's call: of so many pairs of a token and an expert, as many as each has on average."""
        return self._replace(tokens=-(-pairs // max(1, experts)))


def key_of(x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, **known: Any) -> CallKey:
    """The key of a call with this x (..., D) and these weights, (F, D) and (D, F). `known` are the members that these
    do not tell: training, runs, quantize_x, asked, rival."""
    (width, hidden), compiled, dtype = w_up.shape, torch.compiler.is_compiling(), dtype_of(x)
    # On a GPU the operator is faster all the same, by fewer launches; a compiled graph casts as it computes.
    autocast = x.device.type == "cpu" and not compiled and torch.is_autocast_enabled("cpu")
    kept = autocast and torch.is_autocast_cache_enabled() and w_down.requires_grad
    device, capability = device_class(x.device.type, x.device.index)
    return CallKey(
        device, capability, dtype, w_up.dtype, x.numel() // max(hidden, 1), hidden, width,
        casts=kept and w_down.dtype == torch.float32 != dtype, compiled=compiled,
        exported=compiled and exports(), **known,
    )  # fmt: skip


def dtype_of(x: torch.Tensor) -> torch.dtype:
    """What a block computes x in: its own dtype, or autocast's."""
    device = x.device.type
    autocast = torch.is_autocast_enabled(device) and x.dtype != torch.float64  # which autocast leaves alone
    return torch.get_autocast_dtype(device) if autocast else x.dtype


@assume_constant_result  # else Dynamo answers True in any graph before PyTorch 2.13
def exports() -> bool:
    return torch.compiler.is_exporting()


@assume_constant_result
def device_class(kind: str, index: int | None = None) -> tuple[str, str]:
    """`CallKey.device` and `.capability` of a device of this type."""
    if kind == "cuda":
        return kind, _capability(index)
    if kind != "cpu" or not hasattr(torch.ops.hf_twell, "cpu_matrix_unit"):  # there are no kernels before it is loaded
        return kind, ""
    return kind, "amx" if _has_matrix_unit(os.environ.get("HF_TWELL_CPU_ISA")) else ""


@functools.cache  # apart, as Dynamo looks into what both decorate
def _capability(index: int | None) -> str:
    return "{}.{}".format(*torch.cuda.get_device_capability(index))


@functools.cache
def _has_matrix_unit(_named_isa: str | None) -> bool:
    """What the library says, which reads the environment's set of instructions by itself."""
    with torch._C._DisableTorchDispatch():  # a mode that watches operators is not to see this
        return torch.ops.hf_twell.cpu_matrix_unit()
