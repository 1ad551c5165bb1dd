"""`sparsify` and `unpatch`: from a pretrained dense model to ReLU feed-forward blocks, in place."""

import logging
import weakref
from collections.abc import Iterable
from numbers import Integral
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

import hf_twell
from hf_twell.blocks.architectures import (
    ExpertsSite,
    Site,
    base_layer,
    block_places,
    find_ffns,
    layers_of,
    stock_class,
)
from hf_twell.blocks.calls import store_density
from hf_twell.blocks.experts import SparseExperts
from hf_twell.blocks.layout import restore_down
from hf_twell.blocks.modeling import FfnSettings, FfnState, SparseBlock, SparseFfn, sparse_class, sparse_ffns
from hf_twell.blocks.operands import quantize_x_alike, quantized_parameters
from hf_twell.convert.convertible import check_convertible
from hf_twell.convert.entry import check_entry, new_entry
from hf_twell.convert.own_type import say_relu, take_own_type
from hf_twell.files.weights import is_plain
from hf_twell.ops import api

logger = logging.getLogger(__name__)

TAG = "hf_twell"  # on the Hub, and in the card that PEFT writes beside a saved adapter


def sparsify(model: nn.Module, *, backend: str = "auto", layers: Iterable[int] | None = None) -> nn.Module:
    """Turn every feed-forward block's activation into ReLU, and let sparse kernels and the L1 term act on `layers`.

    Config and live modules both change, in place; parameters, their names and the model's class stay, so the model
    saves as its stock architecture with `hidden_act: "relu"`. Of a mixture of experts each expert is such a block; its
    router stays as it is. Where that entry means other layers too (Qwen3.5), and of mixtures, whose experts engines
    would compute with SiLU, model and config take classes of our own, `TwellQwen3_5ForCausalLM` say, which save as a
    `model_type` of our own. Calling again changes nothing but `backend` and `layers`.

    Args:
        model: a Transformers causal language model (or its decoder), on any device, in float32, bfloat16 or float16.
        backend: "auto" takes the fastest backend at each call; "reference", "cpu" or "cuda" insist on one.
        layers: indices of the model's layers on which kernels and the L1 term act (negative ones count from the end).
            None keeps those that an earlier call or the checkpoint chose (`config.twell`), else means all; `range(n)`
            brings all n back. The activation converts everywhere: a stock config has one.

    Returns:
        The same model.

    Raises:
        ValueError: a model that cannot be converted exactly (quantized or meta-device weights, an unknown block or
            mixture of experts), naming the module, or a `twell` entry in the config that cannot be true; nothing has
            changed then.

    Source: arXiv 2603.23198, section 2.
    """
    sites = find_ffns(model)
    own_type = check_convertible(model, sites)
    check_entry(model.config)
    api.resolve(backend, next(sites[0].module.parameters()).device.type)
    chosen = chosen_layers(model.config, layers, layers_of(sites))

    if own_type:
        take_own_type(model)
    say_relu(model.config)
    patch(model, sites, chosen, backend)
    _tell_of_dense_blocks(site for site in sites if site.layer in chosen)
    return model


def _tell_of_dense_blocks(sites: Iterable[Site]) -> None:
    """One line for quantized weights that no kernel reads."""
    kinds = set()
    for site in sites:
        if isinstance(site, ExpertsSite):
            continue
        linears = [site.linear(key) for key in ("gate", "up", "down") if getattr(site.form, key)]
        quantized = [linear for linear in linears if not is_plain(base_layer(linear).weight)]
        by_kernels = all(map(quantized_parameters, linears)) and quantize_x_alike(*linears)
        if quantized and not by_kernels:
            weights = [base_layer(linear).weight for linear in quantized]
            kinds |= {f"{type(weight.data).__name__} on {weight.device.type}" for weight in weights}
    if kinds:
        logger.warning(
            "no kernel reads these quantized weights (%s); their blocks are computed by their own linears, as exact "
            "and as fast as dense ones (docs/compatibility.md)",
            ", ".join(sorted(kinds)),
        )


def patch(model: nn.Module, sites: list[Site], chosen: list[int], backend: str) -> None:
    """Make the chosen layers' blocks sparse ones and the others stock ones with ReLU, and say so in the config."""
    layers = layers_of(sites)
    places = block_places([site.name for site in sites])
    for index, (site, place) in enumerate(zip(sites, places, strict=True)):
        for block in site.blocks():
            _use_relu(block)
            if site.layer in chosen:
                _make_sparse(block, FfnSettings(site.name, site.layer, site.form, backend, index, place.part))
            else:
                _restore_stock(block.module)
    model.config.twell = new_entry(model.config, chosen if len(chosen) < layers else None, len(sites))
    entry = model.config.twell
    store_density(sparse_ffns(model), entry.get("density"), entry.get("unions"), model.config)
    if hasattr(model, "add_model_tags"):
        model.add_model_tags(TAG)
    if hasattr(model, "push_to_hub"):
        model.push_to_hub = PushToHub(model)


class PushToHub:
    """The `push_to_hub` that a sparsified model gets: Transformers' own would publish a card of its own.

    It holds the model weakly: a cycle would keep the weights in memory until the next garbage collection.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self, repo_id: str, **options: Any) -> dict:
        """`hf_twell.push_to_hub(model, repo_id, ...)`."""
        return hf_twell.push_to_hub(self._model(), repo_id, **options)  # by its public name: `models` is above us

    def __reduce__(self) -> tuple:
        return PushToHub, (self._model(),)


def unpatch(model: nn.Module) -> nn.Module:
    """Give every block its stock forward again, in place. The activation stays ReLU, in the config too.

    Returns:
        The same model; one that was never patched comes back unchanged.
    """
    for module in model.modules():
        if isinstance(module, SparseBlock):
            _restore_stock(module)
        if isinstance(vars(module).get("push_to_hub"), PushToHub):
            del module.push_to_hub
    return model


def chosen_layers(config: PreTrainedConfig, layers: Iterable[int] | None, count: int) -> list[int]:
    """Indices, from 0 and rising, of the layers that `sparsify` was asked for in a model of `count` layers; a
    ValueError of indices that it does not have, or of none."""
    source = ";"
    if layers is None:
        layers = (check_entry(config) or {}).get("layers")
        source = f", from the config's twell entry; pass layers=range({count}) for all of them, or"
    if layers is None:
        return list(range(count))
    indices = list(layers) if isinstance(layers, Iterable) else []
    bad = [i for i in indices if not isinstance(i, Integral) or isinstance(i, bool) or not -count <= i < count]
    if bad or not indices:
        raise ValueError(
            f"layers={layers!r} for a model of {count} layers{source} give integers from {-count} to {count - 1}"
        )
    return sorted({int(index) % count for index in indices})


def _use_relu(site: Site) -> None:
    old = site.activation
    if isinstance(old, nn.ReLU):
        return
    relu = nn.ReLU()
    relu.train(site.module.training)
    if isinstance(old, nn.Module):
        # Hooks that a user registered on the activation go on, and their handles still remove them.
        relu.__dict__.update({key: value for key, value in vars(old).items() if "hook" in key})
        relu.replaces = (old,)  # for the parent's loss; in a tuple, as it is no submodule
    setattr(site.module, site.form.activation, relu)


def _make_sparse(site: Site, settings: FfnSettings) -> None:
    site.module.twell, site.module.twell_state = settings, FfnState()
    # A sparse one may have become a subclass since (FSDP2 makes one), and stays it.
    if not isinstance(site.module, SparseBlock):
        stock: type = type(site.module)
        site.module.__class__ = sparse_class(stock, SparseExperts if isinstance(site, ExpertsSite) else SparseFfn)


def _restore_stock(module: nn.Module) -> None:
    if isinstance(module, SparseBlock):
        restore_down(module)
        module.__class__ = stock_class(module)
        del module.twell, module.twell_state
