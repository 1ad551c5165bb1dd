"""What a conversion will cost a dense model, before any training: its loss with ReLU, and with fewer neurons."""

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_twell.blocks.architectures import dense_ffns
from hf_twell.convert.convertible import check_convertible
from hf_twell.inspection.known_conversions import known_conversions, nearest_parent
from hf_twell.inspection.passages import batches, first_tokens, windows
from hf_twell.measure.inference import check_ids, input_device, model_context
from hf_twell.measure.negative_gates import column_norms
from hf_twell.measure.perplexity import token_log_likelihoods
from hf_twell.models.modes import evaluation_mode

DENSITIES = (0.50, 0.30, 0.20, 0.10, 0.05, 0.02)
MAX_TOKENS = 4096
MAX_CONTEXT = 512  # so that a few thousand tokens come from several places, and their logits take little memory
BATCH_TOKENS = 1024


def conversion_cost(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    files: Sequence[str | Path],
    *,
    context: int | None = None,
    max_tokens: int | None = None,
    densities: Sequence[float] = DENSITIES,
    progress: bool = False,
) -> dict[str, Any]:
    """The loss of a dense causal language model after the swap to ReLU, and with few neurons, without training.

    The swap computes down(relu(z) * up(x)) in every block. The oracle keeps, for each token and in each block, the
    k = ceil(density * F) neurons that put most into the output y = Wd h,

        those of largest  |h_j| ||Wd_:,j||

    and zeroes the others. A gate cannot know them beforehand, so this is about the least that so few neurons cost.

    Shapes: h (B, S, F), Wd (D, F).

    Args:
        files: UTF-8 text files, packed by xz or not, of which the beginning is read.
        context: window length in tokens; by default, and at most, 512 or the model's own. Each window starts afresh.
        max_tokens: how many tokens to read, at most 4,096 (the default): each density reads them again.
        densities: of the oracle, above 0 and up to 1.
        progress: show a progress bar on stderr.

    Returns:
        {"tokens" (read), "context", "loss" (nats per token, of the dense model), "relu": {"loss", "increase"},
        "oracle": [{"density", "loss", "increase"}, ...], "known", "nearest": what conversions have kept of parents that
        lose as much, or as little, by ReLU, and of the nearest one, as `known_conversions` and `nearest_parent` of
        `hf_twell.inspection.known_conversions` say}; "increase" is the loss over the dense one, minus 1. Where float16
        overflows, both are None.

    Raises:
        ValueError: a model that `sparsify` refuses, that has adapters, or no head; a text of no token to score.
        OSError: a file cannot be read.

    Source: the score is Wanda's (arXiv 2306.11695), |Wd_ij| |h_j|, of one token and a whole column.
    """
    sites = dense_ffns(model, "this estimate")
    check_convertible(model, sites)
    if model.get_output_embeddings() is None:
        raise ValueError(f"{type(model).__name__} has no language modelling head, so text has no loss")
    norms = [column_norms(site) for site in sites]
    for site, norm in zip(sites, norms, strict=True):
        if norm is None:
            raise ValueError(f"{site.name}: its down projection has an adapter; merge it first")
    for density in densities:
        if not 0 < density <= 1:
            raise ValueError(f"density {density}: give a share of the neurons above 0, up to 1")

    context = min(model_context(model, context), MAX_CONTEXT)
    passages = list(first_tokens(windows(tokenizer, files, context), min(max_tokens or MAX_TOKENS, MAX_TOKENS)))
    tokens = sum(map(len, passages))
    if tokens == len(passages):
        raise ValueError("the text has no token to score: the first one of a window is given")
    texts = [_padded(batch) for batch in batches(passages, max(1, BATCH_TOKENS // context))]
    for ids, _ in texts:
        check_ids(model, tokenizer, ids)

    total = tokens * (2 + len(densities))
    with tqdm(total=total, desc="cost of a conversion", unit="tok", unit_scale=True, disable=not progress) as bar:
        dense = _loss(model, texts, bar)
        relu = _loss(model, texts, bar, (site.activation.register_forward_hook(_relu) for site in sites))
        oracle = []
        for density in densities:
            hooks = [_keep_strongest(norm, density) for norm in norms]
            handles = (
                site.linear("down").register_forward_pre_hook(hook) for site, hook in zip(sites, hooks, strict=True)
            )
            oracle.append({"density": density, **_against(dense, _loss(model, texts, bar, handles))})
    swap = _against(dense, relu)
    return {
        "tokens": tokens,
        "context": context,
        "loss": dense,
        "relu": swap,
        "oracle": oracle,
        "known": known_conversions(swap["increase"]),
        "nearest": nearest_parent(swap["increase"], oracle),
    }


def _padded(batch: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, (B, S): padding is at the right, where a causal model does not see it, and has no label."""
    rows = [torch.tensor(window) for window in batch]
    ids, labels = (torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value) for value in (0, -100))
    return ids, labels


def _loss(model, texts, bar, handles: Iterable[RemovableHandle] = ()) -> float:
    """Nats per token, with hooks that are registered as `handles` is gone through, and removed at the end."""
    loss, scored, device = 0.0, 0, input_device(model)
    with contextlib.ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        # Compiled code may not notice the hooks.
        with evaluation_mode(model), torch.compiler.set_stance("force_eager"):
            for ids, labels in texts:
                logits = model(input_ids=ids.to(device), use_cache=False).logits
                loss -= token_log_likelihoods(logits, labels).cpu().double().sum().item()
                scored += int((labels[:, 1:] != -100).sum())
                bar.update(int((labels != -100).sum()))
    return loss / scored


def _relu(_module, args, _output) -> torch.Tensor:
    return torch.relu(args[0])


def _keep_strongest(norm_F: torch.Tensor, density: float) -> Callable:
    """A hook that gives the down projection only each token's k neurons of largest |h_j| ||Wd_:,j||."""
    count = math.ceil(density * len(norm_F))

    def hook(_module, args):
        h = args[0]
        strongest = (h * norm_F.to(h.device)).abs_().topk(count, dim=-1, sorted=False).indices
        return torch.zeros_like(h).scatter_(-1, strongest, h.gather(-1, strongest))

    return hook


def _against(dense: float, loss: float) -> dict[str, float | None]:
    if not math.isfinite(loss):
        return {"loss": None, "increase": None}
    return {"loss": loss, "increase": loss / dense - 1}
