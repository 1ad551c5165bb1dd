"""Which way a sparse block goes for an x: by its kernels, or by plain matmuls, where these are faster."""

import torch

from hf_twell.blocks import stored_density
from hf_twell.blocks.layout import SAMPLE_EVERY_CPU_CALLS, settle_down
from hf_twell.blocks.operands import quantizes_x
from hf_twell.ops import api, policy, policy_cpu


def settle(ffn: torch.nn.Module, x, weight, bias, down, scale=None) -> bool:
    """Bring `down`'s memory into the order that x wants, and say whether plain matmuls are faster for x.

    Args:
        ffn: a `hf_twell.blocks.modeling.SparseFfn`.
        weight, bias: of the projection that decides which neurons are active; `down`: the weight of the last. Of 8-bit
            weights, their values.
        scale: of the rows of an 8-bit `weight`.
    """
    limit = _max_density_cpu(ffn, x, down)
    if limit > 0:
        settle_down(ffn, down, x, (weight, bias, scale))
    else:
        ffn.twell_state.calls += 1
    too_dense = _too_dense(ffn, x, weight, bias, limit, scale)
    if x.is_cpu and not torch.compiler.is_compiling():
        plain = too_dense and not ffn.training and api.dense_is_plain(x, weight)
        ffn.twell_state.too_dense_at = x.shape if plain else None
    return too_dense


def still_too_dense(ffn, x) -> bool:
    """Whether the answer for the last x, plain matmuls on a CPU, holds for this x, without asking `settle` again.

    It holds for an x of the same shape until the density is sampled next. To ask takes a small block a tenth of its
    time.
    """
    state = ffn.twell_state
    known = x.shape == state.too_dense_at and x.is_cpu
    if not known or ffn.training or torch.is_grad_enabled() or state.calls % SAMPLE_EVERY_CPU_CALLS == 0:
        return False
    state.calls += 1
    return True


def takes_kernels(ffn, x: torch.Tensor) -> bool:
    """Which way a block would go with x after the calls it has seen: kernels, or plain matmuls."""
    if api.resolve(ffn.twell.backend, x.device.type) == "reference":  # asked for, or no kernels could be had
        return False
    parameters = ffn._plain_parameters() or ffn._quantized_parameters()
    if parameters is None:  # adapters, say, which the submodules compute
        return False
    up, down, gate = parameters
    weight, bias, *scale = up if gate[0] is None else gate
    return not _too_dense(ffn, x, weight, bias, _max_density_cpu(ffn, x, down[0]), *scale)


def _too_dense(ffn, x, weight, bias, limit_cpu, scale=None) -> bool:
    """Whether plain matmuls are faster.

    In compiled evaluation a GPU's block goes by the density that its model's config stores. Elsewhere it is False
    there, as on a CPU the operator itself follows the density, and an exported graph is for every number of tokens.
    On a GPU without kernels that quantize x plain matmuls are faster at any density, and compiled, too.
    """
    quantize_x = scale is not None and quantizes_x(ffn._modules[ffn.twell.form.up])
    if quantize_x and ffn.twell.backend == "auto" and api.linears_quantize(x):
        return True
    # In training mode without gradients, too: so runs the forward of re-entrant checkpointing.
    if scale is None and (torch.is_grad_enabled() or ffn.training) and _trains(ffn, x):
        state = ffn.twell_state
        too_dense = state.step_choice.too_dense(x, weight, bias) and ffn.twell.backend == "auto"
        if not torch.compiler.is_compiling():
            state.on_kernels = not too_dense
        return too_dense
    if x.is_cuda:
        if torch.is_grad_enabled() or _exports() or ffn.twell.backend != "auto":
            return False
        if torch.compiler.is_compiling():
            return not stored_density.takes_kernels(ffn.twell.pays, _tokens(x))
        return ffn.twell_state.watch.too_dense(x, weight, bias, scale)
    if limit_cpu in (0, 1):  # the same at every density, which a compiled graph must not read
        return limit_cpu == 0
    density = ffn.twell_state.density
    return density is not None and density > limit_cpu


@torch.compiler.assume_constant_result  # else Dynamo answers True in any graph before PyTorch 2.13
def _exports() -> bool:
    return torch.compiler.is_exporting()


def _max_density_cpu(ffn, x, weight) -> float:
    """Density up to which kernels pay in evaluation on a CPU; 1 where that is not for this block to choose."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or ffn.twell.backend != "auto" or x.is_cuda:
        return 1.0
    if _casts_cost_more(x, weight):
        return 0.0
    return policy.max_density(_tokens(x), weight.numel(), api.dtype_of(x), "cpu")


def _casts_cost_more(x, weight) -> bool:
    """Whether kernels save less than their casts of float32 weights cost, under autocast on a CPU.

    The operator casts the weights in each call; plain matmuls find them cast, as autocast keeps its casts within one
    context. On a GPU the operator is faster all the same, by fewer launches.
    """
    if not (torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()):
        return False
    dtype = api.dtype_of(x)
    kept = weight.requires_grad and weight.dtype == torch.float32 != dtype
    return kept and _tokens(x) < policy_cpu.min_tokens_cast(dtype)


def _tokens(x) -> int:
    return x.numel() // max(x.shape[-1], 1)


def _trains(ffn, x) -> bool:
    """Whether there is something to learn here, and kernels that can on this GPU."""
    learns = x.requires_grad or any(getattr(ffn, name).weight.requires_grad for name in ffn.twell.form.linears)
    return learns and api.kernels_train(x)
