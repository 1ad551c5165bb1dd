"""Models of which a stock config cannot say ReLU of the feed-forward blocks take a `model_type` of our own.

Importing this lets Transformers' Auto classes know these models.
"""

from collections.abc import Sequence
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from hf_twell.blocks import modeling_twell
from hf_twell.blocks.architectures import SUPPORTED, ExpertsSite, Site, activation_keys, decoder_of, has_own_type

modeling_twell.register()


def needs_own_type(model: nn.Module, sites: Sequence[Site]) -> bool:
    """Whether the config entry of the blocks' activation does not do: layers outside the blocks follow it, too (state
    spaces, a projector), or it is a mixture of experts, in which engines compute SiLU whatever the entry says.

    Raises:
        ValueError: so it is, and we have no type for such a model, or it may be a part of one that would not know of
            it; or its config has no such entry.
    """
    activation_keys(model.config)
    if has_own_type(model.config):
        return False
    mixture = next((site for site in sites if isinstance(site, ExpertsSite)), None)
    other = _follower(model, sites)
    if mixture is None and other is None:
        return False
    top = _top(model)
    kind, cls = type(top.config).model_type, type(top)
    advice = f"{SUPPORTED}."
    if mixture is not None:
        known = [name for name, paths in modeling_twell.ACTIVATIONS.items() if any("experts.act" in p for p in paths)]
        advice = (
            f"There are types of {', '.join(sorted(known))}. To add {kind}, add its line to ACTIVATIONS in "
            f"hf_twell/blocks/{modeling_twell.FILE}."
        )
    if kind in modeling_twell.ACTIVATIONS:
        advice = f"Convert a model of Transformers' own class, before {cls.__name__} is made of it."
        if cls is getattr(transformers, cls.__name__, None):
            if decoder_of(top) is not top or not kind.endswith("_text"):
                return True
            # The other model's config would say of itself that it is a stock one.
            advice = (
                f"{cls.__name__} may be a part of a model that sees: convert the whole of that, sparsify(model), or a "
                "causal language model that holds this one alone."
            )
    if other is not None:
        name, module = other
        raise ValueError(
            f"{name} ({type(module).__name__}) lies outside the feed-forward blocks but follows the same config entry, "
            f"so converting the config would change it too. {advice}"
        )
    assert mixture is not None
    raise ValueError(
        f"{mixture.name} ({type(mixture.module).__name__}) holds routed experts, in which engines compute SiLU "
        "whatever the config says, so such a model needs a type of this package's own, and there is none of "
        f"{kind} ({cls.__name__}). {advice}"
    )


def take_own_type(model: nn.Module) -> None:
    """Turn a live model that `needs_own_type` into one of ours: its class, and that of its config."""
    top = _top(model)
    stock: Any = type(top)
    top.__class__ = modeling_twell.twell_class(stock)
    # By the class's name Transformers knows what else a model may return: hidden states, the router's logits.
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(top)), top._can_record_outputs)
    give_own_type(top.config)


def give_own_type(config: PreTrainedConfig) -> None:
    """Turn a stock config, and the text model's in it, into one of our own type, whose blocks compute ReLU."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        if not has_own_type(part):
            stock: Any = type(part)
            part.__class__ = modeling_twell.twell_class(stock)
            modeling_twell.register_models(type(part))
            vars(part).pop("model_type", None)  # the stock one, where the config is a part of another
    say_relu(config)


def say_relu(config: PreTrainedConfig) -> None:
    """Write ReLU as the blocks' activation into a config."""
    config, keys = activation_keys(config)
    for key in keys:
        setattr(config, key, "relu")


def _top(model: nn.Module) -> PreTrainedModel:
    """The model itself; what a wrapper (PEFT's) holds."""
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def _follower(model: nn.Module, sites: Sequence[Site]) -> tuple[str, nn.Module] | None:
    blocks = [block for site in sites for block in site.blocks()]
    config, keys = activation_keys(model.config)
    kinds = {type(block.activation) for block in blocks} - {nn.ReLU}
    if not kinds:
        return None
    entries = {getattr(config, key) for key in keys}
    # A vision or audio tower has a config of its own.
    decoder = set(decoder_of(model).modules())
    towers = [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and module not in decoder and decoder.isdisjoint(module.modules())
    ]
    apart = {inner for outer in (*towers, *(block.module for block in blocks)) for inner in outer.modules()}
    for name, module in model.named_modules():
        # Some keep the name and look the function up when they run.
        named = any(isinstance(value, str) and value in entries for value in vars(module).values())
        if module not in apart and (named or type(module) in kinds):
            return name, module
    return None
