"""The sparse feed-forward operator and the choice of the backend that computes it."""

from hf_twell import build, reference


def ffn(
    x,
    w_up,
    w_down,
    w_gate=None,
    *,
    b_up=None,
    b_down=None,
    b_gate=None,
    l1_scale=None,
    token_weight=None,
    tally=None,
    backend="auto",
):
    """ReLU feed-forward block, exact at every density.

    Formula: h = relu(x Wg^T + bg) * (x Wu^T + bu), or relu(x Wu^T + bu) without a gate; y = h Wd^T + bd.
    With `l1_scale`, backward adds the L1 term's gradient and reports sparsity: see `hf_twell.reference.inject_l1`.

    Shapes:
        x (..., D); w_up, w_gate (F, D); w_down (D, F); b_up, b_gate (F,); b_down (D,); returns (..., D).
        l1_scale () fp32; token_weight x.shape[:-1] fp32, None for ones; tally (1 + F,) fp32 leaf, or None.

    Args:
        backend: "auto" takes the fastest backend that can compute this call; "reference", "cpu" or "cuda" insist.

    Raises:
        ValueError: shapes that do not fit together, or a backend that was asked for by name and cannot compute this.

    Source: arXiv 2603.23198, sections 2 and 3.
    """
    _check_shapes(x, w_up, w_down, w_gate, b_up, b_down, b_gate, token_weight, tally)
    resolve(backend, x.device.type)
    return reference.ffn(
        x,
        w_up,
        w_down,
        w_gate,
        b_up=b_up,
        b_down=b_down,
        b_gate=b_gate,
        l1_scale=l1_scale,
        token_weight=token_weight,
        tally=tally,
    )


def resolve(backend: str, device_type: str) -> str:
    """The name of the backend that serves `backend` for tensors on `device_type`.

    Raises:
        ValueError: an unknown name, or a backend asked for by name that does not work here.
    """
    if backend == "auto":
        kernels = device_type if device_type in build.BACKENDS else "reference"
        return kernels if build.status(kernels).available else "reference"
    status = build.status(backend)
    if not status.available:
        raise ValueError(f"backend {backend!r} does not work here: {status.reason}. Use backend='auto' to fall back.")
    return backend


def _check_shapes(x, w_up, w_down, w_gate, b_up, b_down, b_gate, token_weight, tally):
    if w_up.ndim != 2:
        raise ValueError(f"w_up has shape {tuple(w_up.shape)}; expected (F, D), as nn.Linear stores it")
    intermediate, hidden = w_up.shape
    expected = {
        "w_down": (w_down, (hidden, intermediate)),
        "w_gate": (w_gate, (intermediate, hidden)),
        "b_up": (b_up, (intermediate,)),
        "b_gate": (b_gate, (intermediate,)),
        "b_down": (b_down, (hidden,)),
        "tally": (tally, (1 + intermediate,)),
        "token_weight": (token_weight, tuple(x.shape[:-1])),
    }
    if x.ndim == 0 or x.shape[-1] != hidden:
        raise ValueError(f"x has shape {tuple(x.shape)}; its last size must be {hidden}, the columns of w_up")
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
