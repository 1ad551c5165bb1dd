"""A model's activity by layer, by position in the text and by token, in one pass over text."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_twell.blocks.architectures import activation_keys, decoder_of, find_ffns
from hf_twell.inspection.passages import batches, first_tokens, windows
from hf_twell.inspection.places import Tables
from hf_twell.measure.inference import check_ids, describe, input_device, model_context
from hf_twell.measure.sparsity import ModelActivity, watching
from hf_twell.models.modes import evaluation_mode

FORMAT_VERSION = 1
DENSE = 0.9  # from this density on, L0 says nothing: SiLU is zero almost nowhere
MISMATCH_TOKENS = 128


def inspect_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    files: Sequence[str | Path],
    *,
    context: int | None = None,
    max_tokens: int | None = None,
    batch_tokens: int = 4096,
    progress: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Activity of a dense or sparse causal language model on text files, as plain data.

    The files are read once, piece by piece, in windows of `context` tokens that each start afresh; memory does not
    depend on their length. Nothing is computed after the last block, so no logits are.

    Args:
        files: UTF-8 text files, packed by xz or not.
        context: window length in tokens; by default the model's own, at most 2,048.
        max_tokens: read no more than the first so many tokens.
        batch_tokens: tokens in a forward pass, in windows of similar length.
        progress: show a progress bar on stderr.
        stop: asked before each batch; once it says True, the result covers what has been read and says "partial".

    Returns:
        What `hf_twell.measure_sparsity` returns, and
        "model", "class", "activation", "hidden_size", "dtype", "device", "context", "files", "partial", "warnings",
        "versions", "format"; "sparse": whether density is below 90 %, so that L0 says something;
        "positions": [{"first", "last" (places in a window, from 0), "tokens", "l0": [of each layer],
        "effective_neurons": [of each layer]}, ...];
        "vocabulary": {"seen", "listed_from" (occurrences), "quietest", "busiest": [{"id", "text", "count", "l0",
        "effective_neurons"}, ...], "by_count": the same means over tokens seen [first, last] times}, means over layers;
        "passage": {"text": [of each token], "l0": [[of each token] of each layer], "effective_neurons": likewise}.

    Raises:
        ValueError: no text or token, a model whose blocks cannot be read, an h that is not finite, a tokenizer that
            does not fit the model.
        OSError: a file cannot be read.
    """
    context = model_context(model, context)
    for name, value in (("max_tokens", max_tokens), ("batch_tokens", batch_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}; give at least 1")
    sites = find_ffns(model)
    activity = ModelActivity(sites)
    decoder, device = decoder_of(model), input_device(model)
    tables = Tables(len(sites), context, model.get_input_embeddings().num_embeddings, device)
    first = padded = None
    valid: Any = None

    def see(index, h):
        l0, effective = activity.add(index, h, valid.shape, valid if padded else None)
        tables.add_layer(index, l0, effective)

    tokens, partial = 0, False
    size = sum(Path(path).stat().st_size for path in files)
    with (
        tqdm(total=size, desc="inspecting", unit="B", unit_scale=True, disable=not progress) as bar,
        watching(model, activity, see),
    ):
        source = windows(tokenizer, files, context, on_bytes=bar.update)
        for batch in batches(first_tokens(source, max_tokens), max(1, batch_tokens // context)):
            length = torch.tensor([len(window) for window in batch])
            padded = bool((length != length.max()).any())
            valid = (torch.arange(int(length.max())) < length.unsqueeze(1)).to(device)
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(window) for window in batch], batch_first=True)
            check_ids(model, tokenizer, ids)
            ids = ids.to(device)
            first = ids[:1, : length[0]] if first is None else first
            tables.begin(ids, valid)
            # Padding is at the right, where a causal model does not see it.
            decoder(input_ids=ids, use_cache=False)
            tables.end()
            tokens += int(length.sum())
            bar.set_postfix_str(f"{tokens:,} tokens", refresh=False)
            partial = stop()
            if partial:
                break
    if not tokens:
        raise ValueError("no tokens to measure on: the tokenizer makes none of this text")
    figures, (config, keys) = activity.report(tokens), activation_keys(model.config)
    sparse = figures["density"] < DENSE
    return {
        "format": FORMAT_VERSION,
        **describe(model),
        "class": type(model).__name__,
        "activation": getattr(config, keys[0]),
        "hidden_size": config.hidden_size,
        "files": [str(path) for path in files],
        "context": context,
        "partial": partial,
        "warnings": _warnings(model, first),
        **figures,
        "sparse": sparse,
        **tables.report(tokenizer, rank_by="l0" if sparse else "effective_neurons"),
    }


def passage_ids(tokenizer: PreTrainedTokenizerBase, files: Sequence[str | Path], context: int) -> torch.Tensor:
    """The first window of the files, or the longest of the first few: (1, S)."""
    first = itertools.islice(windows(tokenizer, files, context), 8)
    return torch.tensor([max(first, key=len)])


def _warnings(model, ids: torch.Tensor) -> list[str]:
    """A wrong tokenizer whose ids fit shows in the loss: trained models guess far better than evenly."""
    ids = ids[:, :MISMATCH_TOKENS]
    if ids.shape[1] < 16 or model.get_output_embeddings() is None:
        return []
    with evaluation_mode(model):
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    loss, even = F.cross_entropy(logits, ids[0, 1:].to(logits.device)).item(), math.log(logits.shape[-1])
    if loss < even:
        return []
    return [
        f"The model predicts this text worse than an even guess would (loss {loss:.2f} nats per token against "
        f"{even:.2f}): its tokenizer probably does not match, or the model is not trained."
    ]
