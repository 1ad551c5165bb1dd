"""What a batch says of its tokens: how many there are, and which are padding."""

from collections.abc import Mapping

import torch


def token_weight(batch: Mapping) -> torch.Tensor | None:
    """1 for each token that counts and 0 for padding, fp32, shaped like the mask; None where every position counts."""
    mask = batch.get("attention_mask")
    if mask is None:
        return None
    _check_tensor("attention_mask", mask)
    if mask.ndim != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; only (batch, sequence) tells which tokens are padding. "
            "Leave the mask out where no position is padding."
        )
    return (mask != 0).float()


def check_one_stream(model: torch.nn.Module) -> None:
    """Refuse an encoder-decoder, whose batches' `input_ids` and `attention_mask` are the encoder's.

    Raises:
        ValueError: naming the model.
    """
    # DistributedDataParallel, in which the model may come, has no config.
    config = next((module.config for module in model.modules() if hasattr(module, "config")), None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder: its batches tell the encoder's tokens, and its sparse "
            "blocks are the decoder's. The L1 term and the measures of sparsity need a decoder-only model"
        )


def batch_size_tokens(batch: Mapping) -> int:
    """Positions in a batch, padding included."""
    for key in ("input_ids", "inputs_embeds"):
        if batch.get(key) is not None:
            _check_tensor(key, batch[key])
            if batch[key].ndim < 2:
                raise ValueError(f"{key} has shape {tuple(batch[key].shape)}; expected (batch, sequence)")
            return batch[key].shape[0] * batch[key].shape[1]
    raise ValueError(f"the batch has keys {sorted(batch)}; expected input_ids or inputs_embeds to count tokens")


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f'{name} is a {type(value).__name__}, not a tensor; call the tokenizer with return_tensors="pt"'
        )
