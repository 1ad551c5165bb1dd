"""PyTorch's causal attention without masks, for batches without padding."""

import contextlib
from collections.abc import Iterator

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# PyTorch's attention under a name for which Transformers makes no mask.
WITHOUT_MASK = "sdpa_without_mask"
ALL_ATTENTION_FUNCTIONS.register(WITHOUT_MASK, sdpa_attention_forward)


@contextlib.contextmanager
def without_masks(*models: torch.nn.Module) -> Iterator[None]:
    """Meanwhile models take whole sequences alone, and look for no padding; those that need masks stay as they are.

    Transformers reads each batch's mask, or without one its positions, to learn whether PyTorch's causal attention
    will do. The host waits for the answer, and so at each forward for all that the device still has to do.
    """
    changed = [model for model in models if _is_plainly_causal(model)]
    try:
        for model in changed:
            model.set_attn_implementation(WITHOUT_MASK)
        yield
    finally:
        for model in changed:
            model.set_attn_implementation("sdpa")


def _is_plainly_causal(model: torch.nn.Module) -> bool:
    """Whether every layer sees all earlier tokens, through PyTorch's attention."""
    config = model.config
    return (
        config._attn_implementation == "sdpa"
        and model._can_set_attn_implementation()
        and config.get_text_config() is config  # others may hold vision towers
        and getattr(config, "is_causal", True)
        and not getattr(config, "sliding_window", None)
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    )
