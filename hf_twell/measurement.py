"""`measure_sparsity`: how many neurons of each layer a model really uses on given batches."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from tqdm.auto import tqdm

from hf_twell import reference
from hf_twell.architectures import find_ffns
from hf_twell.penalty import batch_size_tokens, token_weight


@torch.no_grad()
def measure_sparsity(
    model: nn.Module, batches: Iterable[Mapping | torch.Tensor], *, progress: bool = False
) -> dict[str, object]:
    """L0, density, L1 and dead neurons of every feed-forward block, averaged over non-padding tokens.

    Works on dense, sparsified and unpatched models alike; the model's mode and weights stay as they are. A layer's
    neuron is active for a token where h, the input of its down projection, is not zero.

    Args:
        model: a Transformers model.
        batches: what the model is called with: mappings with `input_ids` and, where there is padding,
            `attention_mask`; or tensors of token ids, (batch, sequence).
        progress: show a progress bar on stderr.

    Returns:
        {"tokens", "l0", "density", "l1", "dead" (share of neurons never active), "layers": [{"name",
        "intermediate_size", "l0", "density", "l1", "dead", "dead_neurons"}, ...]}; the top figures are layer means.

    Raises:
        ValueError: no tokens, or a model whose blocks cannot be read.
    """
    sites = find_ffns(model)
    device = next(model.parameters()).device
    totals = [torch.zeros(1 + site.intermediate_size, dtype=torch.float64) for site in sites]
    weight = None

    def add(total):
        # A hook on the down projection also sends a sparse block through its submodules, where h exists.
        def hook(_, args):
            h = args[0]
            total.add_(reference.count(h, None if weight is None else weight.to(h.device)).cpu())

        return hook

    hooks = [
        site.linear("down").register_forward_pre_hook(add(total)) for site, total in zip(sites, totals, strict=True)
    ]
    modes = {module: module.training for module in model.modules()}
    tokens = 0
    model.eval()
    # Compiled code may not notice the hooks.
    eager = torch.compiler.set_stance("force_eager")
    try:
        with eager:
            for batch in tqdm(batches, desc="measuring sparsity", disable=not progress):
                batch = _inputs(batch, device)
                weight = token_weight(batch)
                counted = batch_size_tokens(batch) if weight is None else int(weight.sum())
                if counted:
                    model(**batch)
                    tokens += counted
    finally:
        for module, mode in modes.items():
            module.training = mode
        for hook in hooks:
            hook.remove()
    if not tokens:
        raise ValueError("no tokens to measure on: the batches are empty or all padding")
    layers = [_layer(site, total, tokens) for site, total in zip(sites, totals, strict=True)]
    mean = {key: sum(layer[key] for layer in layers) / len(layers) for key in ("l0", "density", "l1", "dead")}
    return {"tokens": tokens, **mean, "layers": layers}


def _inputs(batch, device) -> dict:
    if isinstance(batch, torch.Tensor) and batch.ndim == 2:
        batch = {"input_ids": batch}
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"a batch of type {type(batch).__name__}; batches holds mappings with input_ids, or tensors of token ids "
            "(batch, sequence). Put a single batch into a list."
        )
    moved = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    moved.pop("labels", None)
    return {**moved, "use_cache": False}


def _layer(site, total: torch.Tensor, tokens: int) -> dict:
    active = total[1:]
    l0, dead = active.sum().item() / tokens, int((active == 0).sum())
    return {
        "name": site.name,
        "intermediate_size": len(active),
        "l0": l0,
        "density": l0 / len(active),
        "l1": total[0].item() / tokens,
        "dead": dead / len(active),
        "dead_neurons": dead,
    }
