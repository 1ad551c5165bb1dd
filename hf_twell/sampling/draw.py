"""Words drawn from a model's own distribution, after prompts of one length."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria


@torch.no_grad()
def sample_after(
    model: PreTrainedModel,
    prompts_BL: torch.Tensor,
    mask_BL: torch.Tensor,
    new_tokens: int,
    *,
    seed: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    tell: Callable[[int, int], None] | None = None,
) -> torch.Tensor:
    """Token ids, (B, L + new_tokens), that begin with the prompts; sampling goes on after an end of a document.

    Args:
        mask_BL: 1 for a prompt's own tokens, 0 for the padding on its left.
        temperature: logits are divided by it.
        top_p: of each next word's distribution only the likeliest ones that make up this share are drawn from.
        tell: called after each word, with how many there are of each sample and how many there will be.
    """
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _plain_sampling(model, new_tokens, temperature, top_p):
        torch.manual_seed(seed)
        told = [] if tell is None else [_Told(tell, prompts_BL.shape[1], new_tokens)]
        return model.generate(prompts_BL, attention_mask=mask_BL, stopping_criteria=told)


class _Told(StoppingCriteria):
    """Never stops; `generate` asks it after each word."""

    def __init__(self, tell: Callable[[int, int], None], before: int, new_tokens: int) -> None:
        self.tell, self.before, self.new_tokens = tell, before, new_tokens

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        self.tell(input_ids.shape[1] - self.before, self.new_tokens)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@contextmanager
def _plain_sampling(model: PreTrainedModel, new_tokens: int, temperature: float, top_p: float) -> Iterator[None]:
    """By nothing but these, to the full length: `generate` fills what is not given from the model's config."""
    before, training = model.generation_config, model.training
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=temperature, top_k=0, top_p=top_p, max_new_tokens=new_tokens, pad_token_id=0
    )
    model.eval()
    try:
        yield
    finally:
        model.generation_config = before
        model.train(training)
