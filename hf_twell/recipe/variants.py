"""Which of a model's weights are trained: all, some, the feed-forward blocks alone, or these beside LoRA adapters."""

from torch import nn

from hf_twell.blocks.architectures import find_ffns
from hf_twell.convert.entry import mark_unfinished
from hf_twell.files.configs import one_line_errors
from hf_twell.files.packages import how_to_install

LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


class LoraOutsideFfns:
    """LoRA on linears outside the feed-forward blocks, of a sparsified model whose blocks are trained in full. The
    adapters live in the model itself, so that its checkpoints hold blocks and adapters alike; until `merge`, its config
    says that it is unfinished. `settings` are arguments of `peft.LoraConfig` in place of `LORA`. A ValueError where
    peft is not installed or takes no such settings, or an adapter would lie in a feed-forward block."""

    def __init__(self, model: nn.Module, settings: dict | None = None) -> None:
        try:
            from peft import LoraConfig, LoraModel
        except ImportError:
            raise ValueError(f"LoRA adapters need the package peft: {how_to_install('peft')}") from None
        sites = find_ffns(model)
        parameters = [parameter for site in sites for parameter in site.module.parameters()]
        self.model = model
        with one_line_errors("lora gives no adapters"):
            self._tuner = LoraModel(model, LoraConfig(**{**LORA, **(settings or {})}), "default")
        # Names, parts of names, patterns and "all-linear" may all reach them.
        children = [child for site in sites for child in site.module.named_modules()]
        inside = sorted({name for name, child in children if hasattr(child, "base_layer")})
        if inside:
            self._tuner.unload()
            model.requires_grad_(True)
            raise ValueError(f"lora: {', '.join(inside)} is in the feed-forward blocks, which are trained in full")
        for parameter in parameters:
            parameter.requires_grad_(True)
        self._marked = getattr(model.config, "twell", None) is not None
        if self._marked:
            mark_unfinished(model.config, "adapters", "its LoRA adapters are not merged")

    def merge(self) -> None:
        """Add the adapters to the weights and take them off."""
        self._tuner.merge_and_unload()
        for parameter in self.model.parameters():
            parameter.requires_grad_(True)
        if self._marked:
            mark_unfinished(self.model.config, "adapters", None)


def train_ffns_alone(model: nn.Module) -> None:
    """Freeze everything but the feed-forward blocks."""
    model.requires_grad_(False)
    for site in find_ffns(model):
        site.module.requires_grad_(True)


def freeze(model: nn.Module, parts: list[str]) -> None:
    """Freeze the weights whose names have one of the parts in them; a ValueError of a part that is in no name."""
    named = dict(model.named_parameters())
    for part in parts:
        found = [parameter for name, parameter in named.items() if part in name]
        if not found:
            words = dict.fromkeys(word for name in named for word in name.split(".") if not word.isdigit())
            raise ValueError(
                f"freeze has {part!r}, and no weight has it in its name; parts of their names: {', '.join(words)}"
            )
        for parameter in found:
            parameter.requires_grad_(False)
