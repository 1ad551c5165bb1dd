"""Loss per token of a causal language model on text files, in strided windows that score every token exactly once."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_twell.measure.inference import check_ids, input_device, model_context
from hf_twell.models.modes import evaluation_mode

# A module for `evaluate.load`.
METRIC_PATH = str(Path(__file__).parents[1] / "metrics" / "token_perplexity.py")


def token_log_likelihoods(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """log p of each label given the tokens before it: what the metric at METRIC_PATH takes as predictions.

        Trainer(..., preprocess_logits_for_metrics=token_log_likelihoods, compute_metrics=...)

    keeps a number per token instead of one per entry of the vocabulary.

    Shapes: logits (B, T, V), labels (B, T); returns (B, T), fp32: 0 at the first position and where labels are -100.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    targets = labels[:, 1:].to(logits.device)
    losses = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), targets, reduction="none", ignore_index=-100)
    return F.pad(-losses, (1, 0))


def scoring_windows(length: int, context: int, stride: int) -> list[tuple[int, int, int]]:
    """Windows (start, first, end) over a sequence of `length` tokens, whose token 0 is given and never scored.

    A window reads the tokens [start, end - 1) and scores the tokens [first, end). The first window scores `context`
    tokens, each later one the next `stride`, with all the context before them that fits; together they score the tokens
    1 .. length - 1 once each.
    """
    spans: list[tuple[int, int, int]] = []
    first = 1
    while first < length:
        end = min(first + (stride if spans else context), length)
        spans.append((max(0, end - 1 - context), first, end))
        first = end
    return spans


def text_loss(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    *,
    batch_size: int = 8,
    context: int | None = None,
    name: str = "text",
) -> dict[str, Any]:
    """Loss per token, perplexity and bits per byte of `documents` under a causal language model.

        loss = -1/N  sum over documents, tokens t of  log p(t | tokens before it in its window)      (nats per token)
        perplexity = exp(loss),     bits per byte = loss * N / (ln 2 * UTF-8 bytes of the documents)

    Each document is tokenized by itself without special tokens, after BOS (EOS where the tokenizer has no BOS), which
    is read but not scored. Windows are `context` tokens long and advance by half of that, so that a token has at least
    half a window before it (all of its document, where that is shorter); every token is scored exactly once. Losses are
    taken from logits cast to fp32 and summed in fp64. Batches hold windows of similar length, padded at the right,
    which a causal model does not see.

    Perplexity depends on the tokenizer; only bits per byte compares models with different vocabularies.

    Args:
        documents: texts, each scored by itself.
        batch_size: windows per forward pass.
        context: window length in tokens; by default the model's own, at most 2,048.
        name: label of the progress bar.

    Raises:
        ValueError: the tokenizer has neither BOS nor EOS, `context` does not fit the model, or there is no token.
    """
    context = model_context(model, context)
    stride = max(1, context // 2)
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if prefix is None:
        raise ValueError("the tokenizer has neither a BOS nor an EOS token to start a document with; set its bos_token")

    sequences: list[torch.Tensor] = []
    spans: list[tuple[int, int, int, int]] = []
    for document in tqdm(documents, desc=f"Tokenizing {name}", unit="doc"):
        # verbose=False: that a document is longer than the model's context is what the windows are for.
        ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        spans += [(len(sequences), *span) for span in scoring_windows(len(ids) + 1, context, stride)]
        sequences.append(torch.tensor([prefix, *ids]))
    tokens = sum(len(sequence) - 1 for sequence in sequences)
    if not tokens:
        raise ValueError(f"{name}: the tokenizer makes no token of this text")
    check_ids(model, tokenizer, torch.cat(sequences))

    spans.sort(key=lambda span: span[1] - span[3])  # longest first: too large a batch fails at once, padding is small
    total, device = 0.0, input_device(model)
    with evaluation_mode(model), tqdm(total=tokens, desc=f"Scoring {name}", unit="tok") as progress:
        for at in range(0, len(spans), batch_size):
            batch = spans[at : at + batch_size]
            inputs = [sequences[document][start : end - 1] for document, start, _, end in batch]
            input_ids = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True, padding_value=prefix)
            logits_BTV = model(input_ids=input_ids.to(device), use_cache=False).logits
            for (document, start, first, end), logits_TV in zip(batch, logits_BTV, strict=True):
                scored = logits_TV[first - 1 - start : end - 1 - start].float()
                targets = sequences[document][first:end].to(scored.device)
                total += F.cross_entropy(scored, targets, reduction="none").double().sum().item()
                progress.update(end - first)

    text_bytes = sum(len(document.encode()) for document in documents)
    loss = total / tokens
    return {
        "documents": len(documents),
        "tokens": tokens,
        "bytes": text_bytes,
        "context": context,
        "stride": stride,
        "nats_per_token": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": total / math.log(2) / text_bytes,
    }
