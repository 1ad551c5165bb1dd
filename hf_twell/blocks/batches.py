"""What a batch says of its tokens: how many there are, which are padding, and which are neighbours."""

from collections.abc import Mapping

import torch

from hf_twell.ops.runs import Runs


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


def runs_of(batch: Mapping, share: int) -> Runs:
    """The runs of `share` neighbouring tokens of a sequence, the last of which may be shorter; padding left out.

    They begin anew at each row's first real token, and where the batch's `position_ids` (batch, sequence) do not go on
    by one: so packers tell where documents begin. In a batch without them, as of the sequences of
    `hf_twell.recipe.packing`, a run may cross from one document of a row into the next.

    How many rows `tokens` has depends on the batch's shape alone, so that nothing waits for the device. With
    `position_ids` the runs are counted, which does, and where they are more, the rows are twice as many, or four times.
    """
    weight, positions = token_weight(batch), batch.get("position_ids")
    if weight is None:
        shape, device = _shape(batch)
        real = torch.ones(shape, dtype=torch.bool, device=device)
    else:
        shape, real = weight.shape, weight != 0
    count = real.long().cumsum(1)
    begins = real & (count == 1)
    if is_packed := isinstance(positions, torch.Tensor) and positions.ndim == 2:
        begins[:, 1:] |= real[:, 1:] & (positions.diff() != 1).to(real.device)
    # Places in the document: less those of the row that lie before the document's first.
    place = count - torch.where(begins, count, 0).cummax(1).values
    first = real & (place % share == 0)
    rows = shape[0] * -(-shape[1] // share)
    if is_packed:
        found = int(first.sum())
        while rows < found:
            rows *= 2
    run = torch.where(real, first.flatten().long().cumsum(0).view(shape) - 1, rows)
    tokens = run.new_full(((rows + 1) * share,), -1)
    places = torch.arange(run.numel(), device=run.device)
    slots = torch.where(real, run * share + place % share, rows * share).flatten()
    tokens.scatter_(0, slots, torch.where(real.flatten(), places, -1))
    return Runs(tokens.view(rows + 1, share), run.flatten())


def check_one_stream(model: torch.nn.Module) -> None:
    """Refuse, by a ValueError, an encoder-decoder, whose batches' `input_ids` and `attention_mask` are the
    encoder's."""
    # DistributedDataParallel, in which the model may come, has no config.
    config = next((module.config for module in model.modules() if hasattr(module, "config")), None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder: its batches tell the encoder's tokens, and its sparse "
            "blocks are the decoder's. The L1 term and the measures of sparsity need a decoder-only model"
        )


def batch_size_tokens(batch: Mapping) -> int:
    """Positions in a batch, padding included."""
    return _shape(batch)[0].numel()


def _shape(batch: Mapping) -> tuple[torch.Size, torch.device]:
    """(batch, sequence), and where the batch is."""
    for key in ("input_ids", "inputs_embeds"):
        if batch.get(key) is not None:
            _check_tensor(key, batch[key])
            if batch[key].ndim < 2:
                raise ValueError(f"{key} has shape {tuple(batch[key].shape)}; expected (batch, sequence)")
            return batch[key].shape[:2], batch[key].device
    raise ValueError(f"the batch has keys {sorted(batch)}; expected input_ids or inputs_embeds to count tokens")


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f'{name} is a {type(value).__name__}, not a tensor; call the tokenizer with return_tensors="pt"'
        )
