"""`Blend`: from the parent's activation to ReLU over some steps, instead of at once."""

from collections.abc import Callable

import torch
from torch import nn

from hf_twell.blocks.architectures import activation_keys, find_ffns
from hf_twell.convert.entry import mark_unfinished
from hf_twell.convert.sparsify import sparsify


class BlendedActivation(nn.Module):
    """(1 - share) * before(x) + share * relu(x). A block with it computes through its submodules."""

    def __init__(self, before: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.before = before
        # A tensor, so that compiled code need not be made anew for each value.
        self.register_buffer("share", torch.zeros(()), persistent=False)

    def forward(self, x):
        return torch.lerp(self.before(x), torch.relu(x), self.share.to(x.dtype))


class Blend:
    """Sparsifies a dense model, but lets its activation become ReLU only by and by.

        blend = Blend(model)  # in place of sparsify(model)
        trainer.add_callback(SparsityCallback(trainer, target_density=0.01, blend=blend, blend_steps=0.2))

    While `share` is below 1, a saved config records it, and neither Transformers nor `sparsify` takes that checkpoint
    for a finished model. At 1 the blocks have a plain ReLU.

    Args:
        model: a dense model.
        backend, layers: as for `sparsify`.

    Raises:
        ValueError: a model that cannot be converted, or has ReLU already.
    """

    def __init__(self, model: nn.Module, *, backend: str = "auto", layers=None):
        self.model = model
        sites = find_ffns(model)
        before = [site.activation for site in sites]
        config, keys = activation_keys(model.config)
        self.name = getattr(config, keys[0])
        if any(isinstance(activation, nn.ReLU) for activation in before):
            raise ValueError(f"the model's activation is {self.name!r}; blending to ReLU starts from a dense parent")
        sparsify(model, backend=backend, layers=layers)
        self._blocks = []  # of each the site, the blended activation and the ReLU
        for site, activation in zip(sites, before, strict=True):
            blended = BlendedActivation(activation).to(next(site.module.parameters()).device)
            self._blocks.append((site, blended, site.activation))
        self.set(0.0)

    def set(self, share: float) -> None:
        """Blend in `share` of ReLU; from 1 on the blend is over."""
        self.share = min(1.0, share)
        config, keys = activation_keys(self.model.config)
        done = self.share == 1.0
        for site, blended, relu in self._blocks:
            blended.share.fill_(self.share)
            setattr(site.module, site.form.activation, relu if done else blended)
        for key in keys:
            # No activation has this name, so that nothing loads an unfinished model as a whole one.
            setattr(config, key, "relu" if done else f"unfinished blend of {self.name} and {self.share:.4f} relu")
        reason = None if done else f"its activation is {self.name} blended with {self.share:.4f} of relu"
        mark_unfinished(self.model.config, "activation", reason)
