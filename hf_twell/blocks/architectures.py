"""Where a model's feed-forward blocks are: each is found by the names of its linear layers, one row of FORMS."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_twell.blocks import modeling_twell
from hf_twell.blocks.modeling_twell import decoder_of


class FfnForm(NamedTuple):
    """The attribute names of one kind of feed-forward block; gate and up may be one linear, gate's rows first."""

    gate: str | None
    up: str
    down: str
    activation: str

    @property
    def first(self) -> str:
        """The projection before the activation, whose sign says which neurons are active."""
        return self.gate or self.up

    @property
    def fused(self) -> bool:
        """Whether gate and up are one linear."""
        return self.gate == self.up

    @property
    def linears(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(filter(None, (self.gate, self.up, self.down))))

    @property
    def matrices(self) -> int:
        return 3 if self.gate else 2

    @property
    def settled(self) -> str:
        """What holds the weight whose memory order `hf_twell.blocks.layout` settles."""
        return self.down

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the activation gets, and up's result, of what `first` computes; None where that is another linear's."""
        return y.chunk(2, dim=-1) if self.fused else (y, None)


class ExpertsForm(NamedTuple):
    """The attribute names of a layer's routed experts.

    Their matrices lie in two parameters, (E, 2F, D), gate's rows first, and (E, D, F); the module is called with hidden
    states (T, D), the experts of each token (T, K) and their weights in the sum (T, K).

    With a `router` they are Llama 4's: the matrices lie transposed, and the module is called with (E T, D), for each
    expert all tokens times their score for it: zeros, but for the K = `router.top_k` experts that a token goes through.
    """

    gate_up: str
    down: str
    activation: str
    router: Any = None

    @property
    def transposed(self) -> bool:
        return self.router is not None

    @property
    def settled(self) -> str:
        """What `hf_twell.blocks.layout` settles; of transposed matrices down lies by columns anyway."""
        return self.gate_up if self.transposed else self.down

    def weights(self, module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """The parameters, or views of them: w_gate_up (E, 2F, D) and w_down (E, D, F)."""
        gate_up, down = getattr(module, self.gate_up), getattr(module, self.down)
        return (gate_up.mT, down.mT) if self.transposed else (gate_up, down)

    def tokens(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The T rows that stand for the tokens, of the hidden states that the module is called with."""
        return x[: len(x) // len(getattr(module, self.down))] if self.transposed else x

    def routing(
        self, module: nn.Module, x: torch.Tensor, index: torch.Tensor | None = None, weight: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Any, Any]:
        """x, index and weight as `hf_twell.ops.experts` has them, of what the module is called with.

        Of Llama 4 x is that of each pair, (T, K, D), and the score is in it, so weights are ones.
        """
        if not self.transposed:
            return x, index, weight
        x_ETD = x.view(len(getattr(module, self.down)), -1, x.shape[-1])
        came_TE = (x_ETD != 0).any(-1).mT
        index = came_TE.float().topk(self.router.top_k).indices.sort().values
        tokens = len(index)
        place = index * tokens + torch.arange(tokens, device=x.device).unsqueeze(1)
        x_TKD = x.index_select(0, place.flatten()).unflatten(0, index.shape)
        return x_TKD, index, torch.ones_like(index, dtype=x.dtype)

    def result(self, module: nn.Module, y: torch.Tensor) -> torch.Tensor:
        """What the module returns, of y (T, D): of Llama 4 (E T, D) over whose E is summed, so the first may have y."""
        if not self.transposed:
            return y
        return nn.functional.pad(y, (0, 0, 0, (len(getattr(module, self.down)) - 1) * len(y)))


FORMS = (
    FfnForm("gate_proj", "up_proj", "down_proj", "act_fn"),  # Llama, Qwen2, Qwen3, Mistral, Gemma, SmolLM3, OLMo
    FfnForm("gate_up_proj", "gate_up_proj", "down_proj", "activation_fn"),  # Phi-3, Phi-4, GLM-4
    FfnForm("gate_proj", "up_proj", "down_proj", "activation_fn"),  # Llama 4's dense layers and shared experts
    FfnForm("input_linear", "input_linear", "output_linear", "activation"),  # Granite's shared experts
    FfnForm(None, "up_proj", "down_proj", "act_fn"),  # Nemotron, Arcee
    FfnForm(None, "c_fc", "c_proj", "act"),  # StarCoder2
    FfnForm(None, "fc1", "fc2", "activation_fn"),  # Phi
    FfnForm(None, "dense_h_to_4h", "dense_4h_to_h", "act"),  # GPT-NeoX, Pythia
)

EXPERTS = ExpertsForm("gate_up_proj", "down_proj", "act_fn")  # Mixtral, OLMoE, Qwen's and DeepSeek's mixtures

# The names under which configs keep the activation of the feed-forward block.
ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function")

SUPPORTED = (
    "Supported are Llama, Qwen2, Qwen3, Mistral and stock models whose every layer has one dense feed-forward block of "
    "linears named " + ", ".join(dict.fromkeys("/".join(form.linears) for form in FORMS)) + ", or experts that are "
    f"called with hidden states, experts and weights, of two parameters, {EXPERTS.gate_up} (E, 2F, D) and "
    f"{EXPERTS.down} (E, D, F), or Llama 4's"
)


class FfnSite(NamedTuple):
    """One feed-forward block of a model: its dotted name, the module, its form, and the model's layer that it is in."""

    name: str
    module: nn.Module
    form: FfnForm
    layer: int

    def linear(self, which: str) -> nn.Module:
        return getattr(self.module, getattr(self.form, which))

    @property
    def activation(self) -> nn.Module:
        return getattr(self.module, self.form.activation)

    @property
    def intermediate_size(self) -> int:
        return self.linear("down").in_features

    def blocks(self) -> list["FfnSite"]:
        """The block itself; what PEFT's `modules_to_save` makes of one: the original and a copy for each adapter."""
        return [self._replace(module=module) for module in _copies(self.module)]


class ExpertsSite(NamedTuple):
    """A layer's routed experts, all of them together: as `FfnSite` has it."""

    name: str
    module: nn.Module
    form: ExpertsForm
    layer: int

    @property
    def activation(self) -> nn.Module:
        return getattr(self.module, self.form.activation)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(E, F, D)."""
        experts, hidden, width = self.form.weights(self.module)[1].shape
        return experts, width, hidden

    @property
    def intermediate_size(self) -> int:
        """F, of one expert."""
        return self.sizes[1]

    def blocks(self) -> list["ExpertsSite"]:
        return [self._replace(module=module) for module in _copies(self.module)]


Site = FfnSite | ExpertsSite


class Place(NamedTuple):
    """Where a block is: the model's layer and, where some layer has two blocks, its name in there."""

    layer: int
    part: str | None = None

    @property
    def label(self) -> str:
        """What figures and cards call the block: "3", or "3 experts" and "3 shared_expert"."""
        return str(self.layer) if self.part is None else f"{self.layer} {self.part}"


def find_ffns(model: nn.Module) -> list[Site]:
    """The feed-forward blocks of the model's text decoder, in layer order; a layer may have experts and a dense one. A
    ValueError names the module of a layer that has no block which can be made sparse."""
    if not isinstance(model, nn.Module) or not isinstance(getattr(model, "config", None), PreTrainedConfig):
        raise ValueError(
            f"{type(model).__name__} is no Transformers model; load one with from_pretrained. {SUPPORTED}."
        )
    sites: list[Site] = []
    layers: dict[str, int] = {}
    modules = dict(_decoder_modules(model))
    for name, module in modules.items():
        if "_orig_mod" in module._modules or any(name.startswith(site.name + ".") for site in sites):
            continue  # what torch.compile wraps around a module, or a part of a block that was found
        experts = getattr(module, "experts", None)
        form = _experts_form(module, _owner(modules, name)) or _form_of(module)
        unread = experts is not None and not _experts_form(base_layer(experts), module)
        only_router = experts is None and hasattr(module, "router")
        # Experts whose router is out of reach: a shared expert of their layer would pass for all that it has.
        only_experts = form is None and EXPERTS.gate_up in module._parameters
        if unread or only_router or only_experts:
            what = type(module if experts is None else experts).__name__
            raise ValueError(
                f"{name} ({type(module).__name__}) is a mixture of experts of another form ({what}). {SUPPORTED}."
            )
        if form:
            layer = layers.setdefault(layer_name(name), len(layers))
            site: Any = ExpertsSite if isinstance(form, ExpertsForm) else FfnSite
            sites.append(site(name, module, form, layer))
    _check_complete(model, sites)
    return sites


def dense_ffns(model: nn.Module, what: str) -> list[FfnSite]:
    """`find_ffns` for `what` reads blocks' linears, which also refuses a mixture of experts."""
    sites = find_ffns(model)
    for site in sites:
        if isinstance(site, ExpertsSite):
            raise ValueError(
                f"{site.name} ({type(site.module).__name__}) holds routed experts, and {what} reads dense feed-forward "
                "blocks alone; give a model without experts"
            )
    return [site for site in sites if isinstance(site, FfnSite)]


def layers_of(sites: Iterable[Site]) -> int:
    """How many of the model's layers these blocks are in."""
    return len({site.layer for site in sites})


def activation_keys(config: PreTrainedConfig) -> tuple[PreTrainedConfig, list[str]]:
    """The part of a model's config that holds its blocks' activation (a composite model's is nested), and its keys; a
    ValueError where there are none."""
    config = config.get_text_config()
    keys = [key for key in _keys(config) if isinstance(getattr(config, key, None), str)]
    if not keys:
        raise ValueError(
            f"{type(config).__name__} names no activation under {', '.join(ACTIVATION_KEYS)}, so a converted model "
            f"could not be saved. {SUPPORTED}."
        )
    return config, keys


def other_activations(config: PreTrainedConfig) -> set[str]:
    """The activations besides ReLU that a model's config names for its blocks."""
    config = config.get_text_config()
    return {name for key in _keys(config) if (name := getattr(config, key, None)) not in ("relu", None)}


def has_own_type(config: PreTrainedConfig) -> bool:
    """Whether its class's `model_type` is one of ours, which names the blocks' activation apart from other layers'.

    The class's: a stock class that reads such a checkpoint keeps what it read, and saves its own.
    """
    return type(config).model_type.startswith(modeling_twell.PREFIX)


def loading_class(config: Mapping) -> type[PreTrainedModel | AutoModelForCausalLM]:
    """What loads a checkpoint with this config.json: the stock class of another task, or AutoModelForCausalLM; of a
    `model_type` of ours, the Auto class of its task."""
    name = (config.get("architectures") or [""])[0]
    cls: Any = getattr(transformers, name.removeprefix("Twell"), None)
    known = isinstance(cls, type) and issubclass(cls, PreTrainedModel)
    if not known:
        return AutoModelForCausalLM
    if name.startswith("Twell"):
        heads = modeling_twell.heads(cls.config_class.model_type)
        found = (getattr(transformers, head) for head, own in heads.items() if own.__name__ == name)
        return next(found, AutoModelForCausalLM)
    return AutoModelForCausalLM if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() else cls


def text_class(config: Mapping) -> type[PreTrainedModel] | None:
    """Of a model with this config.json that sees or hears, the causal language model that Transformers' Auto class
    takes out of it; None where that is the whole model, or there is none."""
    kind, part = str(config.get("model_type")), config.get("text_config")
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind.removeprefix(modeling_twell.PREFIX), "")
    cls: Any = getattr(transformers, name, None)
    if cls is None or not isinstance(part, Mapping):
        return None
    if cls.config_class.model_type != str(part.get("model_type")).removeprefix(modeling_twell.PREFIX):
        return None
    return modeling_twell.twell_class(cls) if kind.startswith(modeling_twell.PREFIX) else cls


def _keys(config: PreTrainedConfig) -> tuple[str, ...]:
    return ("ffn_act",) if has_own_type(config) else ACTIVATION_KEYS


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The module's own class, without the subclass that `sparsify` gives it."""
    return getattr(type(module), "stock_class", type(module))


def input_name(cls: type[nn.Module]) -> str:
    """What a block's class calls the hidden states that its forward takes."""
    return list(inspect.signature(cls.forward).parameters)[1]  # after self


def only_input(ffn: nn.Module, x: torch.Tensor | None, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The hidden states of a sparse block's call that gave them by their name in the stock block; a TypeError of a call
    that the stock block does not take either."""
    if x is not None or named.keys() != {ffn.twell_input}:
        raise TypeError(f"{type(ffn).__name__} takes hidden states, {ffn.twell_input}, and nothing else")
    return named[ffn.twell_input]


def base_layer(linear: nn.Module) -> nn.Module:
    """What an adapter (LoRA) wraps, or what PEFT's `modules_to_save` trains a copy of; else the linear itself."""
    if "modules_to_save" in getattr(linear, "_modules", ()):
        linear = linear.original_module
    while hasattr(linear, "base_layer"):
        linear = linear.base_layer
    return linear


def _decoder_modules(model: nn.Module, *, every_name: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """The decoder and everything in it, each under its full name in the model, or under every name that it has."""
    decoder = decoder_of(model)
    prefix = next((name for name, module in model.named_modules() if module is decoder), "")
    return decoder.named_modules(prefix=prefix, remove_duplicate=not every_name)


def _form_of(module: nn.Module) -> FfnForm | None:
    for form in FORMS:
        if hasattr(module, form.activation) and all(_is_linear(getattr(module, name, None)) for name in form.linears):
            return form
    return None


def _experts_form(module: nn.Module | None, owner: nn.Module | None) -> ExpertsForm | None:
    """`EXPERTS`, or Llama 4's with the router that `owner` has; what it computes of them shows when it is run."""
    module = getattr(module, "_modules", {}).get("original_module", module)  # of PEFT's `modules_to_save`
    parameters = getattr(module, "_parameters", {})
    gate_up, down = (parameters.get(name) for name in (EXPERTS.gate_up, EXPERTS.down))
    if gate_up is None or down is None or not hasattr(module, EXPERTS.activation):
        return None
    if getattr(module, "has_bias", False) or getattr(module, "has_post_expert_norm", False) or down.ndim != 3:
        return None
    experts, hidden, width = down.shape
    if gate_up.shape == (experts, 2 * width, hidden) and not getattr(module, "is_transposed", False):
        return EXPERTS
    alone = len(inspect.signature(stock_class(module).forward).parameters) == 2  # self, and all tokens for each expert
    transposed = gate_up.shape == (experts, width, 2 * hidden)
    router = base_layer(getattr(owner, "router", None))
    return EXPERTS._replace(router=router) if alone and transposed and hasattr(router, "top_k") else None


def _owner(modules: Mapping[str, nn.Module], name: str) -> nn.Module | None:
    """The nearest module around one that has a router: adapters (LoRA) put wrappers between them."""
    while name:
        name = name.rpartition(".")[0]
        if hasattr(modules.get(name), "router"):
            return modules[name]
    return None


def _copies(module: nn.Module) -> list[nn.Module]:
    copies = module._modules.get("modules_to_save")
    return [module] if copies is None else [module.original_module, *copies.values()]


def layer_name(name: str) -> str:
    """The part of a block's dotted name that is its layer's: up to the first number."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else name


def block_places(names: Sequence[str]) -> list[Place]:
    """The places of a model's blocks, of these dotted names."""
    layers = [layer_name(name) for name in names]
    order = {layer: index for index, layer in enumerate(dict.fromkeys(layers))}
    if len(order) == len(names):
        return [Place(order[layer]) for layer in layers]
    # PEFT wraps experts whose parameters it adapts.
    parts = [name.replace(".base_layer", "").rpartition(".")[2] for name in names]
    return [Place(order[layer], part) for layer, part in zip(layers, parts, strict=True)]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(base_layer(module), nn.Linear)


def _check_complete(model: nn.Module, sites: list[Site]) -> None:
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    if sites and layers in (None, layers_of(sites)):
        return
    modules = dict(_decoder_modules(model))
    named = [name for name in modules if name.rpartition(".")[2] in ("mlp", "ffn", "feed_forward")]
    # Some have no block of their own: their linears lie in the layer.
    places = named or [
        name for name, module in modules.items() if isinstance(modules.get(name.rpartition(".")[0]), nn.ModuleList)
    ]
    unread = next((name for name in places if modules[name] not in [site.module for site in sites]), None)
    where = f"; {unread} ({_parts(modules[unread])}) cannot be read" if unread else ""
    if shared := _shared(model, sites):
        where += "; {} is the same block as {}, and layers may not share one".format(*shared)
    advice = f"{SUPPORTED}."
    if unread and type(modules[unread]).__name__.startswith("Liger"):
        advice = "Liger's SwiGLU computes SiLU always; in a new process, apply Liger with swiglu=False."
    blocks = f"{len(sites)} feed-forward blocks of a known form"
    raise ValueError(f"{type(model).__name__} has {layers} layers but {blocks}{where}. {advice}")


def _shared(model: nn.Module, sites: list[Site]) -> tuple[str, str] | None:
    """Two names of one block, where there is such a block: the second is that of its site."""
    names = {site.module: site.name for site in sites}
    every_name = _decoder_modules(model, every_name=True)
    return next(((name, names[module]) for name, module in every_name if name != names.get(module, name)), None)


def _parts(module: nn.Module) -> str:
    """What an unknown block is made of, so that a fused, quantized or renamed projection shows in the message."""
    children = ", ".join(f"{name}: {type(child).__name__}" for name, child in module.named_children())
    return f"{type(module).__name__} of {children}" if children else type(module).__name__
