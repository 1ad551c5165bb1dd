"""Where a model's feed-forward blocks are, and whether they can be made sparse.

A block is found by the names of its linear layers (one row of FORMS) and then checked by running its own forward on
tiny weights: whatever its class is called, it must compute down(relu(gate) * up) or down(relu(up)), and nothing else.
"""

import copy
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.activations import ACT2FN

from hf_twell import reference


class FfnForm(NamedTuple):
    """The attribute names of one kind of feed-forward block."""

    gate: str | None
    up: str
    down: str
    activation: str

    @property
    def linears(self) -> tuple[str, ...]:
        return tuple(name for name in (self.gate, self.up, self.down) if name)


FORMS = (
    FfnForm("gate_proj", "up_proj", "down_proj", "act_fn"),  # Llama, Qwen2, Qwen3, Mistral, Gemma, SmolLM3, OLMo
    FfnForm(None, "up_proj", "down_proj", "act_fn"),  # Nemotron, Arcee
    FfnForm(None, "c_fc", "c_proj", "act"),  # StarCoder2
    FfnForm(None, "fc1", "fc2", "activation_fn"),  # Phi
    FfnForm(None, "dense_h_to_4h", "dense_4h_to_h", "act"),  # GPT-NeoX, Pythia
)

# The names under which configs keep the activation of the feed-forward block.
ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function")

SUPPORTED = (
    "Supported are Llama, Qwen2, Qwen3, Mistral and stock models whose every layer has one dense feed-forward block of "
    "linears named " + ", ".join("/".join(form.linears) for form in FORMS)
)


class FfnSite(NamedTuple):
    """One feed-forward block of a model: its dotted name, the module, and its form."""

    name: str
    module: nn.Module
    form: FfnForm

    def linear(self, which: str) -> nn.Module:
        return getattr(self.module, getattr(self.form, which))

    @property
    def intermediate_size(self) -> int:
        return self.linear("up").out_features


def find_ffns(model: nn.Module) -> list[FfnSite]:
    """The feed-forward blocks of the model's text decoder, in layer order.

    Raises:
        ValueError: naming the module and its class, where a layer has no block that can be made sparse.
    """
    if not hasattr(model, "config"):
        raise ValueError(f"{type(model).__name__} has no config; pass a Transformers model. {SUPPORTED}.")
    decoder = _decoder(model)
    prefix = next((name + "." for name, module in model.named_modules() if module is decoder and name), "")
    sites = []
    for name, module in decoder.named_modules(prefix=prefix.rstrip(".")):
        if any(name.startswith(site.name + ".") for site in sites):
            continue
        if hasattr(module, "experts") or hasattr(module, "router"):
            raise ValueError(f"{name} ({type(module).__name__}) is a mixture of experts. {SUPPORTED}.")
        form = _form_of(module)
        if form:
            sites.append(FfnSite(name, module, form))
    _check_complete(model, decoder, sites)
    return sites


def check_convertible(model: nn.Module, sites: list[FfnSite]) -> None:
    """Refuse a model whose blocks hold something that cannot be converted exactly.

    Raises:
        ValueError: quantized or meta-device weights, a replaced forward, or a block that computes something else.
    """
    config, keys = activation_keys(model)
    _check_other_activations(_decoder(model), sites, type(ACT2FN[getattr(config, keys[0])]))
    probed = set()
    for site in sites:
        where = f"{site.name} ({type(site.module).__name__})"
        if "forward" in vars(site.module):
            raise ValueError(
                f"{where} has its forward replaced on the instance (by accelerate's offloading, Liger or another "
                "patch), which would bypass the sparse block. Load the model without it."
            )
        for name in site.form.linears:
            _check_linear(getattr(site.module, name), f"{site.name}.{name}")
        structure = (type(site.module), site.form)
        if structure not in probed:
            _check_formula(site, where)
            probed.add(structure)


def activation_keys(model: nn.Module) -> tuple[object, list[str]]:
    """The config that holds the blocks' activation (a composite model's is nested), and the keys it uses."""
    config = model.config.get_text_config()
    keys = [key for key in ACTIVATION_KEYS if isinstance(getattr(config, key, None), str)]
    if not keys:
        raise ValueError(
            f"{type(config).__name__} names no activation under {', '.join(ACTIVATION_KEYS)}, so a converted model "
            f"could not be saved. {SUPPORTED}."
        )
    return config, keys


def _decoder(model: nn.Module) -> nn.Module:
    return model.get_decoder() if hasattr(model, "get_decoder") else model


def _form_of(module: nn.Module) -> FfnForm | None:
    for form in FORMS:
        if hasattr(module, form.activation) and all(_is_linear(getattr(module, name, None)) for name in form.linears):
            return form
    return None


def _is_linear(module) -> bool:
    # An adapter (LoRA) is no nn.Linear, but answers for the one it wraps.
    return isinstance(module, nn.Linear) or isinstance(getattr(module, "base_layer", None), nn.Linear)


def _check_complete(model, decoder, sites):
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    if sites and layers in (None, len(sites)):
        return
    names = {site.name for site in sites}
    unread = next(
        (
            f"; {name} ({type(module).__name__}) cannot be read"
            for name, module in decoder.named_modules()
            if name.endswith(("mlp", "ffn", "feed_forward")) and not any(n.endswith(name) for n in names)
        ),
        "",
    )
    raise ValueError(
        f"{type(model).__name__} has {layers} layers but {len(sites)} feed-forward blocks of a known form{unread}. "
        f"{SUPPORTED}."
    )


def _check_other_activations(decoder, sites, activation):
    blocks = {id(module) for site in sites for module in site.module.modules()}
    for name, module in decoder.named_modules():
        if id(module) not in blocks and type(module) is activation and activation is not nn.ReLU:
            raise ValueError(
                f"{name} ({type(module).__name__}) lies outside the feed-forward blocks but follows the same config "
                f"entry, so converting the config would change it too. {SUPPORTED}."
            )


def _check_linear(linear: nn.Module, name: str):
    weight = getattr(linear, "base_layer", linear).weight
    if weight.is_meta:
        raise ValueError(
            f"{name} ({type(linear).__name__}) has its weight on the meta device; load the weights before converting "
            "(without init_empty_weights, and with a device_map that offloads nothing)."
        )
    if not weight.is_floating_point() or type(weight.data) not in (torch.Tensor, nn.Parameter, DTensor):
        raise ValueError(
            f"{name} ({type(linear).__name__}) is quantized ({weight.dtype}, {type(weight.data).__name__}); convert "
            "the model in bfloat16, float16 or float32 and quantize the result."
        )


def _check_formula(site: FfnSite, where: str):
    """Run the block's own forward on tiny weights with ReLU, in both modes, and compare with the reference."""
    tiny = copy.copy(site.module)
    others = {name: child for name, child in site.module._modules.items() if name not in site.form.linears}
    tiny.__dict__ = {**vars(site.module), "_modules": copy.deepcopy(others)}
    generator = torch.Generator().manual_seed(0)
    hidden, intermediate = 8, 24
    weights = {}
    for key, rows, columns in (
        ("gate", intermediate, hidden),
        ("up", intermediate, hidden),
        ("down", hidden, intermediate),
    ):
        name = getattr(site.form, key)
        if name is None:
            continue
        linear = nn.utils.skip_init(nn.Linear, columns, rows, bias=getattr(site.module, name).bias is not None)
        for parameter in linear.parameters():
            parameter.data.normal_(generator=generator)
        tiny._modules[name] = linear
        weights |= {f"w_{key}": linear.weight, f"b_{key}": linear.bias}
    setattr(tiny, site.form.activation, nn.ReLU())
    x = torch.randn(2, 3, hidden, generator=generator)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        expected = reference.ffn(x, **weights)
        for mode in (True, False):
            nn.Module.train(tiny, mode)
            try:
                exact = torch.allclose(stock_class(site.module).forward(tiny, x), expected, rtol=1e-4, atol=1e-4)
            except Exception as error:
                raise ValueError(f"{where} could not be run as a feed-forward block: {error}. {SUPPORTED}.") from error
            if not exact:
                raise ValueError(
                    f"{where} does more than down(relu(gate) * up) (dropout, a norm, a scale, ...), so it cannot be "
                    f"replaced exactly. {SUPPORTED}."
                )


def stock_class(module: nn.Module) -> type:
    """The module's own class, without the subclass that `sparsify` gives it."""
    return getattr(type(module), "stock_class", type(module))
