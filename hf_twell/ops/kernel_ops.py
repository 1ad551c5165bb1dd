"""What PyTorch must know about the compiled operators beside their code: output shapes, and gradients.

Imported once, right after the library that defines them is loaded.
"""

import torch
from torch import library

# Order of `ffn_backward`'s results, as bits of its `needs`.
_GRADIENTS = ("x", "w_up", "w_down", "w_gate", "b_up", "b_down", "b_gate")


def cpu_state_bytes(tokens: int, capacity: int, element_size: int, gated: bool) -> int:
    """Size of the CPU backend's saved state; the layout is in kernels/shared/twell_state.h."""
    return _whole_blocks(tokens, torch.ops.hf_twell.cpu_state_block(capacity, element_size, gated))


def cuda_state_bytes(tokens: int, intermediate: int, capacity: int, gated: bool) -> int:
    """Size of the CUDA backend's saved state; the layout is in kernels/shared/twell_state.h."""
    return _whole_blocks(tokens, torch.ops.hf_twell.cuda_state_block(intermediate, capacity, gated))


def _whole_blocks(tokens, block):
    block_tokens, block_bytes = block
    return (tokens + block_tokens - 1) // block_tokens * block_bytes


@library.register_fake("hf_twell::ffn")
def _ffn_fake(x, w_up, w_down, w_gate, b_up, b_down, b_gate, l1_scale, token_weight, tally, capacity, *_terms):
    intermediate, hidden = w_up.shape
    tokens, gated, size = x.numel() // hidden, w_gate is not None, 0
    if capacity > 0:
        on_cuda = x.device.type == "cuda"
        size = (
            cuda_state_bytes(tokens, intermediate, capacity, gated)
            if on_cuda
            else cpu_state_bytes(tokens, capacity, x.element_size(), gated)
        )
    report = x.new_empty(0 if tally is None else 1 + intermediate, dtype=torch.float32)
    return x.new_empty(x.shape), report, x.new_empty(size, dtype=torch.uint8)


@library.register_fake("hf_twell::infer")
def _infer_fake(x, *weights, **options):
    return x.new_empty(x.shape)


@library.register_fake("hf_twell::ffn_backward")
def _ffn_backward_fake(
    grad_y, state, x, w_up, w_down, w_gate, b_up, b_gate, l1_scale, token_weight, capacity, needs, count_scale=None,
    run=None, run_size=None,
):  # fmt: skip
    intermediate, hidden = w_up.shape
    shapes = (x.shape, w_up.shape, w_down.shape, w_up.shape, (intermediate,), (hidden,), (intermediate,))
    wanted = [bool(needs >> i & 1) for i in range(len(_GRADIENTS))]
    wanted[3] &= w_gate is not None
    results = [x.new_empty(shape if want else (0,)) for shape, want in zip(shapes, wanted, strict=True)]
    if wanted[2] and w_down.stride(0) == 1:  # down_proj is stored by columns, and so is its gradient
        results[2] = x.new_empty((intermediate, hidden)).t()
    return *results, x.new_empty(0 if run is None else 1, dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    x, w_up, w_down, w_gate, b_up, _, b_gate, l1_scale, token_weight, _, ctx.capacity, *of_count, _ = inputs
    _, report, state = output
    ctx.mark_non_differentiable(report, state)
    ctx.set_materialize_grads(False)  # else zeros as large as the state are made for its gradient
    ctx.save_for_backward(x, w_up, w_down, w_gate, b_up, b_gate, l1_scale, token_weight, *of_count, report, state)


def _backward(ctx, grad_y, _grad_report, _grad_state):
    *inputs, count_scale, run, run_size, report, state = ctx.saved_tensors
    wants = ctx.needs_input_grad
    needs = sum(1 << i for i in range(len(_GRADIENTS)) if wants[i])
    *results, in_runs = torch.ops.hf_twell.ffn_backward(
        grad_y, state, *inputs, ctx.capacity, needs, count_scale, run, run_size
    )
    gradients = [result if wants[i] else None for i, result in enumerate(results)]
    of_unions = in_runs if any(wants[14:]) else None  # PyTorch leaves out what is the default at the end of a call
    return *gradients, None, None, report if wants[9] else None, None, None, None, None, of_unions


library.register_autograd("hf_twell::ffn", _backward, setup_context=_setup_context)


def _refuse_second_derivatives(ctx, *grads):
    raise NotImplementedError(
        "hf_twell's kernels have no second derivatives; for these, compute the block in plain PyTorch: "
        "hf_twell.sparsify(model, backend='reference'), or backend='reference' in ops.ffn"
    )


# Without it a gradient taken with create_graph=True would count as a constant.
library.register_autograd("hf_twell::ffn_backward", _refuse_second_derivatives)


@library.register_fake("hf_twell::activation")
def _activation_fake(gate, up, l1_scale, token_weight, tally, count_scale=None):
    return gate.new_empty(gate.shape)


@library.register_fake("hf_twell::activation_backward")
def _activation_backward_fake(grad_h, gate, up, l1_scale, token_weight, reports, count_scale=None):
    report = gate.new_empty(1 + gate.shape[-1] if reports else 0, dtype=torch.float32)
    return gate.new_empty(gate.shape), gate.new_empty((0,) if up is None else gate.shape), report


def _activation_setup(ctx, inputs, output):
    gate, up, l1_scale, token_weight, _, count_scale = inputs
    ctx.save_for_backward(gate, up, l1_scale, token_weight, count_scale)


def _activation_backward(ctx, grad_h):
    gate, up, l1_scale, token_weight, count_scale = ctx.saved_tensors
    reports = ctx.needs_input_grad[4]
    arguments = (grad_h, gate, up, l1_scale, token_weight, reports, count_scale)
    grad_gate, grad_up, report = torch.ops.hf_twell.activation_backward(*arguments)
    return grad_gate, None if up is None else grad_up, None, None, report if reports else None, None


library.register_autograd("hf_twell::activation", _activation_backward, setup_context=_activation_setup)
library.register_autograd("hf_twell::activation_backward", _refuse_second_derivatives)


@library.register_fake("hf_twell::add_rms_norm")
def _add_rms_norm_fake(x, residual, weight, epsilon):
    return x.new_empty(x.shape), x.new_empty(x.shape)


@library.register_fake("hf_twell::experts")
def _experts_fake(x, index, share, w_gate, w_up, w_down):
    return x.new_empty(x.shape)
