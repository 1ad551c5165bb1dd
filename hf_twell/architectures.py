"""Where a model's feed-forward blocks are, and whether they can be made sparse.

A block is found by the names of its linear layers (one row of FORMS) and then checked by running its own forward on
tiny weights: whatever its class is called, it must compute down(relu(gate) * up) or down(relu(up)), and nothing else.
"""

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

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

# What weights are in, in a checkpoint and in the blocks that are converted.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

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
    def activation(self):
        return getattr(self.module, self.form.activation)

    @property
    def intermediate_size(self) -> int:
        return self.linear("up").out_features

    def blocks(self) -> list["FfnSite"]:
        """The block itself; what PEFT's `modules_to_save` makes of one: the original and a copy for each adapter."""
        copies = self.module._modules.get("modules_to_save")
        if copies is None:
            return [self]
        return [self._replace(module=module) for module in (self.module.original_module, *copies.values())]


def find_ffns(model: nn.Module) -> list[FfnSite]:
    """The feed-forward blocks of the model's text decoder, in layer order.

    Raises:
        ValueError: naming the module and its class, where a layer has no block that can be made sparse.
    """
    if not isinstance(model, nn.Module) or not isinstance(getattr(model, "config", None), PreTrainedConfig):
        raise ValueError(
            f"{type(model).__name__} is no Transformers model; load one with from_pretrained. {SUPPORTED}."
        )
    sites = []
    for name, module in _decoder_modules(model):
        if "_orig_mod" in module._modules or any(name.startswith(site.name + ".") for site in sites):
            continue  # what torch.compile wraps around a module, or a part of a block that was found
        if hasattr(module, "experts") or hasattr(module, "router"):
            raise ValueError(f"{name} ({type(module).__name__}) is a mixture of experts. {SUPPORTED}.")
        form = _form_of(module)
        if form:
            sites.append(FfnSite(name, module, form))
    _check_complete(model, sites)
    return sites


def check_convertible(model: nn.Module, sites: list[FfnSite]) -> None:
    """Refuse a model whose blocks hold something that cannot be converted exactly.

    Raises:
        ValueError: quantized or meta-device weights, a replaced forward, or a block that computes something else.
    """
    sites = [block for site in sites for block in site.blocks()]
    _check_other_activations(model, sites)
    for site in sites:
        where = f"{site.name} ({type(site.module).__name__})"
        if "forward" in vars(site.module):
            raise ValueError(
                f"{where} has its forward replaced on the instance (by accelerate's offloading, Liger or another "
                "patch), which would bypass the sparse block. Load the model without it."
            )
        activation = site.activation
        if isinstance(activation, nn.Module) and activation.state_dict():
            raise ValueError(
                f"{site.name}.{site.form.activation} ({type(activation).__name__}) has parameters of its own, which "
                f"ReLU would drop from the checkpoint. {SUPPORTED}."
            )
        for name in site.form.linears:
            # A block that computes ReLU already keeps computing through its linears, whatever they are.
            converts = not isinstance(activation, nn.ReLU)
            _check_linear(getattr(site.module, name), f"{site.name}.{name}", converts)
        _check_formula(site, where)


def is_plain(weight: torch.Tensor) -> bool:
    """Whether it holds its values themselves: torchao's quantized tensors say that they are float32."""
    return type(weight.data) in (torch.Tensor, nn.Parameter, DTensor)


def activation_keys(config: PreTrainedConfig) -> tuple[PreTrainedConfig, list[str]]:
    """The part of a model's config that holds its blocks' activation (a composite model's is nested), and its keys.

    Raises:
        ValueError: it holds none.
    """
    config = config.get_text_config()
    keys = [key for key in ACTIVATION_KEYS if isinstance(getattr(config, key, None), str)]
    if not keys:
        raise ValueError(
            f"{type(config).__name__} names no activation under {', '.join(ACTIVATION_KEYS)}, so a converted model "
            f"could not be saved. {SUPPORTED}."
        )
    return config, keys


def _decoder(model: nn.Module) -> nn.Module:
    return model.get_decoder() if hasattr(model, "get_decoder") else model


def _decoder_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The decoder and everything in it, each under its full name in the model."""
    decoder = _decoder(model)
    prefix = next((name for name, module in model.named_modules() if module is decoder), "")
    return decoder.named_modules(prefix=prefix)


def _form_of(module: nn.Module) -> FfnForm | None:
    for form in FORMS:
        if hasattr(module, form.activation) and all(_is_linear(getattr(module, name, None)) for name in form.linears):
            return form
    return None


def _is_linear(module) -> bool:
    return isinstance(_base_layer(module), nn.Linear)


def _base_layer(linear):
    # An adapter (LoRA) is no nn.Linear, but wraps one; so does what PEFT's `modules_to_save` trains a copy of.
    if "modules_to_save" in getattr(linear, "_modules", ()):
        linear = linear.original_module
    while hasattr(linear, "base_layer"):
        linear = linear.base_layer
    return linear


def _check_complete(model, sites):
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    if sites and layers in (None, len(sites)):
        return
    modules = dict(_decoder_modules(model))
    named = [name for name in modules if name.rpartition(".")[2] in ("mlp", "ffn", "feed_forward")]
    # Some have no block of their own: their linears lie in the layer.
    places = named or [
        name for name, module in modules.items() if isinstance(modules.get(name.rpartition(".")[0]), nn.ModuleList)
    ]
    unread = next((name for name in places if modules[name] not in [site.module for site in sites]), None)
    where = f"; {unread} ({_parts(modules[unread])}) cannot be read" if unread else ""
    advice = f"{SUPPORTED}."
    if unread and type(modules[unread]).__name__.startswith("Liger"):
        advice = "Liger's SwiGLU computes SiLU always; in a new process, apply Liger with swiglu=False."
    blocks = f"{len(sites)} feed-forward blocks of a known form"
    raise ValueError(f"{type(model).__name__} has {layers} layers but {blocks}{where}. {advice}")


def _parts(module: nn.Module) -> str:
    """What an unknown block is made of, so that a fused, quantized or renamed projection shows in the message."""
    children = ", ".join(f"{name}: {type(child).__name__}" for name, child in module.named_children())
    return f"{type(module).__name__} of {children}" if children else type(module).__name__


def _check_other_activations(model, sites):
    """The config entry must belong to the blocks alone: what else follows it (a state space, a projector) would change
    when the converted model is loaded again."""
    config, keys = activation_keys(model.config)
    kinds = {type(site.activation) for site in sites} - {nn.ReLU}
    if not kinds:
        return
    entries = {getattr(config, key) for key in keys}
    # A vision or audio tower has a config of its own.
    decoder = set(_decoder(model).modules())
    towers = [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and module not in decoder and decoder.isdisjoint(module.modules())
    ]
    apart = {inner for outer in (*towers, *(site.module for site in sites)) for inner in outer.modules()}
    for name, module in model.named_modules():
        if module in apart:
            continue
        # Some keep the name and look the function up when they run.
        named = any(isinstance(value, str) and value in entries for value in vars(module).values())
        if named or type(module) in kinds:
            raise ValueError(
                f"{name} ({type(module).__name__}) lies outside the feed-forward blocks but follows the same config "
                f"entry, so converting the config would change it too. {SUPPORTED}."
            )


def _check_linear(linear: nn.Module, name: str, converts: bool):
    weight = _base_layer(linear).weight
    if weight.is_meta:
        raise ValueError(
            f"{name} ({type(linear).__name__}) has its weight on the meta device; load the weights before converting "
            "(without init_empty_weights, and with a device_map that offloads nothing)."
        )
    # Eight-bit floats count as floating point too.
    if converts and (weight.dtype not in DTYPES or not is_plain(weight)):
        raise ValueError(
            f"{name} ({type(linear).__name__}) is quantized ({weight.dtype}, {type(weight.data).__name__}); convert "
            "the model in bfloat16, float16 or float32 and quantize the result."
        )


def _check_formula(site: FfnSite, where: str):
    """Run the block's own forward on tiny weights with ReLU, in both modes, and compare with the reference."""
    tiny = object.__new__(stock_class(site.module))
    replaced = (*site.form.linears, site.form.activation)
    others = {name: child for name, child in site.module._modules.items() if name not in replaced}
    tiny.__dict__ = {**vars(site.module), "_modules": copy.deepcopy(others)}
    # Whatever the caller's default dtype and device are.
    cpu = {"device": "cpu", "dtype": torch.float32}
    generator = torch.Generator("cpu").manual_seed(0)
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
        bias = _base_layer(getattr(site.module, name)).bias is not None
        linear = nn.utils.skip_init(nn.Linear, columns, rows, bias=bias, **cpu)
        for parameter in linear.parameters():
            parameter.data.normal_(generator=generator)
        tiny._modules[name] = linear
        weights |= {f"w_{key}": linear.weight, f"b_{key}": linear.bias}
    setattr(tiny, site.form.activation, nn.ReLU())
    x = torch.randn(2, 3, hidden, generator=generator, **cpu)
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
        expected = reference.ffn(x, **weights)
        for mode in (True, False):
            nn.Module.train(tiny, mode)
            try:
                exact = torch.allclose(tiny.forward(x), expected, rtol=1e-4, atol=1e-4)
            except Exception as error:
                raise ValueError(f"{where} takes more than hidden states through its linears. {SUPPORTED}.") from error
            if not exact:
                raise ValueError(
                    f"{where} does more than down(relu(gate) * up) (dropout, a norm, a scale, ...), so it cannot be "
                    f"replaced exactly. {SUPPORTED}."
                )


def stock_class(module: nn.Module) -> type:
    """The module's own class, without the subclass that `sparsify` gives it."""
    return getattr(type(module), "stock_class", type(module))
