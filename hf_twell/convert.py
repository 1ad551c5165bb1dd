"""`sparsify` and `unpatch`: from a pretrained dense model to ReLU feed-forward blocks, in place."""

from collections.abc import Iterable
from numbers import Integral

from torch import nn

from hf_twell import ops
from hf_twell._layout import restore_down
from hf_twell.architectures import FfnSite, activation_keys, check_convertible, find_ffns, stock_class
from hf_twell.modeling import FfnSettings, SparseFfn, sparse_class

FORMAT_VERSION = 1


def sparsify(model: nn.Module, *, backend: str = "auto", layers: Iterable[int] | None = None) -> nn.Module:
    """Turn every feed-forward block's activation into ReLU, and let sparse kernels and the L1 term act on `layers`.

    Config and live modules both change, in place; parameters, their names and the model's class stay, so the model
    saves as its stock architecture with `hidden_act: "relu"`. Calling again changes nothing but `backend` and `layers`.

    Args:
        model: a Transformers causal language model (or its decoder), on any device, in float32, bfloat16 or float16.
        backend: "auto" takes the fastest backend at each call; "reference", "cpu" or "cuda" insist on one.
        layers: indices of the layers on which kernels and the L1 term act (negative ones count from the end). None
            means those that the checkpoint names, else all. The activation converts everywhere: a stock config has one.

    Returns:
        The same model.

    Raises:
        ValueError: a model that cannot be converted exactly (mixture of experts, quantized or meta-device weights, an
            unknown block), naming the module; nothing has changed then.

    Source: arXiv 2603.23198, section 2.
    """
    sites = find_ffns(model)
    check_convertible(model, sites)
    config, keys = activation_keys(model)
    ops.resolve(backend, sites[0].linear("up").weight.device.type)
    chosen = _chosen_layers(model, layers, len(sites))

    for key in keys:
        setattr(config, key, "relu")
    for index, site in enumerate(sites):
        _use_relu(site)
        if index in chosen:
            _make_sparse(site, index, backend)
        else:
            _restore_stock(site.module)
    model.config.twell = {"version": FORMAT_VERSION, "layers": chosen if len(chosen) < len(sites) else None}
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Give every block its stock forward again, in place. The activation stays ReLU, in the config too.

    Returns:
        The same model; one that was never patched comes back unchanged.
    """
    for module in model.modules():
        if isinstance(module, SparseFfn):
            _restore_stock(module)
    return model


def _chosen_layers(model, layers, count: int) -> list[int]:
    if layers is None:
        entry = getattr(model.config, "twell", None)
        layers = entry.get("layers") if isinstance(entry, dict) else None
    if layers is None:
        return list(range(count))
    indices = list(layers) if isinstance(layers, Iterable) else []
    bad = [i for i in indices if not isinstance(i, Integral) or isinstance(i, bool) or not -count <= i < count]
    if bad or not indices:
        raise ValueError(f"layers={layers!r} for a model of {count} layers; give integers from {-count} to {count - 1}")
    return sorted({int(index) % count for index in indices})


def _use_relu(site: FfnSite) -> None:
    old = site.activation
    if isinstance(old, nn.ReLU):
        return
    relu = nn.ReLU()
    relu.train(site.module.training)
    if isinstance(old, nn.Module):
        # Hooks that a user registered on the activation go on, and their handles still remove them.
        relu.__dict__.update({key: value for key, value in vars(old).items() if "hook" in key})
    setattr(site.module, site.form.activation, relu)


def _make_sparse(site: FfnSite, index: int, backend: str) -> None:
    site.module.twell = FfnSettings(site.name, index, site.form, backend)
    # A sparse one may have become a subclass since (FSDP2 makes one), and stays it.
    if not isinstance(site.module, SparseFfn):
        site.module.__class__ = sparse_class(type(site.module))


def _restore_stock(module: nn.Module) -> None:
    if isinstance(module, SparseFfn):
        restore_down(module)
        module.__class__ = stock_class(module)
        del module.twell
