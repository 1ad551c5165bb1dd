"""A model that is run and not trained: its device, its context, its blocks' ways, the tokens it knows, its versions."""

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_twell
from hf_twell.blocks.calls import takes_kernels
from hf_twell.blocks.experts import SparseExperts
from hf_twell.blocks.modeling import SparseBlock, sparse_ffns

# Logits take batch x context x vocabulary values, so the whole context of a long-context model would not fit.
MAX_DEFAULT_CONTEXT = 2048


def input_device(model: torch.nn.Module) -> torch.device:
    """Where to put a model's inputs: of weights that accelerate offloads, only the meta device is seen."""
    return next((weight.device for weight in model.parameters() if not weight.is_meta), torch.device("cpu"))


def model_context(model: PreTrainedModel, context: int | None = None) -> int:
    """The window length in tokens: `context`, or by default the model's own, at most 2,048; a ValueError where
    `context` is not between 1 and the model's own."""
    limit = context_limit(model)
    if context is None:
        return min(limit or MAX_DEFAULT_CONTEXT, MAX_DEFAULT_CONTEXT)
    if context < 1 or (limit and context > limit):
        raise ValueError(
            f"context={context}: give 1 or more tokens, up to the model's own context ({limit or 'unknown'})"
        )
    return context


def context_limit(model: PreTrainedModel) -> int | None:
    """How many tokens a model takes, as its config says, or None where it says nothing."""
    config = model.config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "n_ctx")
    return next((value for name in names if isinstance(value := getattr(config, name, None), int) and value > 0), None)


def blocks_on_kernels(model: PreTrainedModel, ids: torch.Tensor) -> int:
    """How many sparse blocks go by kernels, now that they have seen some calls: those too dense take plain matmuls.

    Shapes:
        ids (B, T): tokens, of which as many at a time as are to be asked about.
    """
    ways = []

    def note(ffn: SparseBlock, args: tuple) -> None:
        if isinstance(ffn, SparseExperts):
            ways.append(ffn.takes_kernels(*args))
        else:
            ways.append(takes_kernels(ffn, args[0]))

    hooks = [block.register_forward_pre_hook(note) for block in sparse_ffns(model)]
    try:
        model(ids, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(ways)


def check_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor) -> None:
    """Refuse, by a ValueError, tokens that the model has no embedding for, as another model's tokenizer makes them."""
    known = model.get_input_embeddings().num_embeddings
    if ids.numel() and int(ids.max()) >= known:
        raise ValueError(
            f"the tokenizer ({len(tokenizer):,} pieces) makes token {int(ids.max())}, but the model has only {known:,} "
            "embeddings, so the tokenizer does not match; give the model's own"
        )


def describe(model: PreTrainedModel) -> dict[str, object]:
    """The model, dtype, device and versions that figures belong to."""
    return {
        "model": str(getattr(model, "name_or_path", "") or model.config._name_or_path) or type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "versions": {
            "hf_twell": hf_twell.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
