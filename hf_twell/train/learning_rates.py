"""Which learning rate a conversion takes by the model's size, and what is said of one that is far from it."""

import math
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from hf_twell.blocks.architectures import ExpertsSite, find_ffns

# Of conversions whose embeddings and norms were frozen, by AdamW: parameters, and of the learning rates that were tried
# the one at which the least loss was added (model_cards/smollm2, model_cards/qwen2.5-coder-0.5b and
# model_cards/qwen2.5-coder-1.5b). Of both Coders it is the lowest that was tried.
MEASURED = {
    "SmolLM2-135M": (135e6, 1.5e-3),
    "Qwen2.5-Coder-0.5B": (494e6, 1.5e-4),
    "Qwen2.5-Coder-1.5B": (1.54e9, 1.2e-4),
}
ALIKE = 1.25  # times a measured size: an output matrix of its own, as in a GGUF file, makes 1.78e9 of 1.54e9
SMALLEST_PRETRAINED = 1e8  # parameters; smaller models are mostly tests, which take other rates
TOO_HIGH, TOO_LOW = 2, 1 / 4  # times the proposal; judgement: twice the 0.5B's lost more, four times ruined it


class Proposal(NamedTuple):
    rate: float
    why: str  # in words
    larger: bool  # than all measured models


def proposal(model: nn.Module, optim: str) -> Proposal | None:
    """Interpolated between the measured models, log(rate) in log(parameters); beyond them that of the nearest.

    None where other rates hold, which were not measured: small models, mixtures of experts, those without a causal
    loss, adapters (LoRA), blocks that are not trained, and optimizers (of TrainingArguments' `optim`) other than AdamW.
    """
    parameters, sites = sum(weight.numel() for weight in model.parameters()), find_ffns(model)
    if (
        parameters < SMALLEST_PRETRAINED
        or any(isinstance(site, ExpertsSite) for site in sites)
        or getattr(model, "loss_type", None) not in ("ForCausalLM", "ForConditionalGeneration")
        or hasattr(model, "peft_config")
        or not optim.startswith(("adamw", "paged_adamw"))
        or not all(weight.requires_grad for site in sites for weight in site.module.parameters())
    ):
        return None
    return proposed(parameters)


def proposed(parameters: float) -> Proposal:
    """Of a model of so many parameters."""
    points = sorted(MEASURED.values())
    (smallest, first), (largest, last) = points[0], points[-1]
    rate = first if parameters < smallest else last
    for (low, low_rate), (high, high_rate) in pairwise(points):
        if low <= parameters <= high:
            rate = low_rate * (high_rate / low_rate) ** (math.log(parameters / low) / math.log(high / low))
    is_guess = not smallest / ALIKE <= parameters <= largest * ALIKE
    size = f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"
    least = ", ".join(f"{name} at {best:g}" for name, (_, best) in MEASURED.items())
    how = "a guess beyond the measured sizes" if is_guess else "by measured models"
    why = f"for {size} parameters, {how} (of the rates tried least was lost by {least})"
    return Proposal(float(f"{rate:.2g}"), why, parameters > largest * ALIKE)


def rate_warning(rate: float, proposal: Proposal, name: str) -> str | None:
    """What to say of a learning rate; `name` is how the user writes it. None if it is near the proposal, or lower for a
    model larger than the measured ones: they want lower rates, nobody measured how much."""
    if rate <= TOO_HIGH * proposal.rate and (rate >= TOO_LOW * proposal.rate or proposal.larger):
        return None
    harm = "may ruin the model" if rate > proposal.rate else "is so low that the run may hardly learn"
    ruined = "; four times its rate ruined Qwen2.5-Coder-0.5B" if rate > proposal.rate else ""
    return (
        f"{name} {rate:g} {harm}: {proposal.rate:g} is proposed {proposal.why}{ruined}; write "
        f"{name}={proposal.rate:g}, or try several on a few million tokens"
    )
