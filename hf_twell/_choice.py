"""Which way a sparse block goes for an x: by its kernels, or by plain matmuls, where these are faster."""

import torch

from hf_twell import _density_cpu, ops
from hf_twell._layout import EVERY, settle_down


def settle(ffn: torch.nn.Module, x, weight, bias, down) -> bool:
    """Bring `down`'s memory into the order that x wants, and say whether plain matmuls are faster for x.

    Args:
        ffn: a `hf_twell.modeling.SparseFfn`.
        weight, bias: of the projection that decides which neurons are active; `down`: the weight of the last.
    """
    limit = _max_density_cpu(ffn, x, down)
    if limit > 0:
        settle_down(ffn, down, x)
    else:
        ffn.twell.calls += 1
    too_dense = _too_dense(ffn, x, weight, bias, limit)
    if x.is_cpu and not torch.compiler.is_compiling():
        plain = too_dense and not ffn.training and ops.dense_is_plain(x, weight)
        ffn.twell.too_dense_at = x.shape if plain else None
    return too_dense


def still_too_dense(ffn, x) -> bool:
    """As for the last x, on a CPU, until the next sample: to ask again takes a small block a tenth of its time."""
    known = x.shape == ffn.twell.too_dense_at and x.is_cpu
    if not known or ffn.training or torch.is_grad_enabled() or ffn.twell.calls % EVERY == 0:
        return False
    ffn.twell.calls += 1
    return True


def takes_kernels(ffn, x: torch.Tensor) -> bool:
    """Which way a block would go with x after the calls it has seen: kernels, or plain matmuls."""
    first, down = getattr(ffn, ffn.twell.form.first), getattr(ffn, ffn.twell.form.down)
    if ops.resolve(ffn.twell.backend, x.device.type) == "reference":  # asked for, or no kernels could be had
        return False
    return not _too_dense(ffn, x, first.weight, first.bias, _max_density_cpu(ffn, x, down.weight))


def _too_dense(ffn, x, weight, bias, limit_cpu) -> bool:
    """If plain matmuls are faster; in compiled evaluation the operator itself follows the density."""
    twell = ffn.twell
    # In training mode without gradients, too: so runs the forward of re-entrant checkpointing.
    if (torch.is_grad_enabled() or ffn.training) and _trains(ffn, x):
        too_dense = twell.training.too_dense(x, weight, bias) and twell.backend == "auto"
        if not torch.compiler.is_compiling():
            twell.on_kernels = not too_dense
        return too_dense
    if x.is_cuda:
        chooses = not torch.is_grad_enabled() and not torch.compiler.is_compiling() and twell.backend == "auto"
        return chooses and twell.watch.too_dense(x, weight, bias)
    return limit_cpu == 0 or (limit_cpu < 1 and twell.density is not None and twell.density > limit_cpu)


def _max_density_cpu(ffn, x, weight) -> float:
    """Density up to which kernels pay in evaluation on a CPU; 1 where that is not for this block to choose."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or ffn.twell.backend != "auto" or x.is_cuda:
        return 1.0
    if _casts_cost_more(x, weight):
        return 0.0
    return _density_cpu.max_density(_tokens(x), weight.numel(), ops.dtype_of(x))


def _casts_cost_more(x, weight) -> bool:
    """Whether autocast keeps its casts of float32 weights for plain matmuls, and kernels save less than theirs cost.

    Autocast does so inside one context. The operator casts them in each call, which on a GPU pays by fewer launches.
    """
    if not (torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()):
        return False
    dtype = ops.dtype_of(x)
    kept = weight.requires_grad and weight.dtype == torch.float32 != dtype
    return kept and _tokens(x) < _density_cpu.min_tokens_cast(dtype)


def _tokens(x) -> int:
    return x.numel() // max(x.shape[-1], 1)


def _trains(ffn, x) -> bool:
    """Whether there is something to learn here, and kernels that can on this GPU."""
    learns = x.requires_grad or any(getattr(ffn, name).weight.requires_grad for name in ffn.twell.form.linears)
    return learns and ops.kernels_train(x)
