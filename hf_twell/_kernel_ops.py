"""What PyTorch must know about the compiled operators beside their code: output shapes, and gradients.

Imported once, right after the library that defines them is loaded.
"""

import torch
from torch import library

# Order of `ffn_backward`'s results, as bits of its `needs`.
_GRADIENTS = ("x", "w_up", "w_down", "w_gate", "b_up", "b_down", "b_gate")


def state_bytes(tokens, capacity, element_size, gated):
    """Size of the CPU backend's saved state; the layout is in kernels/twell_cpu/pairs.h."""

    def aligned(size):
        return (size + 7) // 8 * 8

    slots = tokens * capacity
    return aligned(4 * tokens) + aligned(2 * slots) + (2 if gated else 1) * aligned(element_size * slots)


@library.register_fake("hf_twell::ffn")
def _ffn_fake(x, w_up, w_down, w_gate, b_up, b_down, b_gate, l1_scale, token_weight, tally, capacity):
    intermediate, hidden = w_up.shape
    report = x.new_empty(0 if tally is None else 1 + intermediate, dtype=torch.float32)
    size = state_bytes(x.numel() // hidden, capacity, x.element_size(), w_gate is not None) if capacity > 0 else 0
    return x.new_empty(x.shape), report, x.new_empty(size, dtype=torch.uint8)


@library.register_fake("hf_twell::ffn_backward")
def _ffn_backward_fake(grad_y, state, x, w_up, w_down, w_gate, b_up, b_gate, l1_scale, token_weight, capacity, needs):
    intermediate, hidden = w_up.shape
    shapes = (x.shape, w_up.shape, w_down.shape, w_up.shape, (intermediate,), (hidden,), (intermediate,))
    wanted = [bool(needs >> i & 1) for i in range(len(_GRADIENTS))]
    wanted[3] &= w_gate is not None
    results = [x.new_empty(shape if want else (0,)) for shape, want in zip(shapes, wanted, strict=True)]
    if wanted[2] and w_down.stride(0) == 1:  # down_proj is stored by columns, and so is its gradient
        results[2] = x.new_empty((intermediate, hidden)).t()
    return tuple(results)


def _setup_context(ctx, inputs, output):
    x, w_up, w_down, w_gate, b_up, _, b_gate, l1_scale, token_weight, _, ctx.capacity = inputs
    _, report, state = output
    ctx.mark_non_differentiable(report, state)
    ctx.save_for_backward(x, w_up, w_down, w_gate, b_up, b_gate, l1_scale, token_weight, report, state)


def _backward(ctx, grad_y, _grad_report, _grad_state):
    x, w_up, w_down, w_gate, b_up, b_gate, l1_scale, token_weight, report, state = ctx.saved_tensors
    wants = ctx.needs_input_grad
    needs = sum(1 << i for i in range(len(_GRADIENTS)) if wants[i])
    results = torch.ops.hf_twell.ffn_backward(
        grad_y, state, x, w_up, w_down, w_gate, b_up, b_gate, l1_scale, token_weight, ctx.capacity, needs
    )
    gradients = [result if wants[i] else None for i, result in enumerate(results)]
    return (*gradients, None, None, report if wants[9] else None, None)


library.register_autograd("hf_twell::ffn", _backward, setup_context=_setup_context)
