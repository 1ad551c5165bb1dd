"""The one model that Transformers' handlers of requests answer with, and how they generate from it."""

import torch
from fastapi import HTTPException
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import GenerateManager, GenerationState

from hf_twell.measure.inference import check_ids, own_context


class OneModel(ModelManager):
    """Transformers' manager loads what a request names, as its stock class; this one has its model, and no other."""

    def __init__(self, name: str, model, tokenizer):
        self.loaded = model, tokenizer
        super().__init__(force_model=name)  # requests that name another are refused

    def load_model_and_processor(self, *_, **__):
        return self.loaded

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id  # and no revision after it, which clients would read in each answer


class Generation(GenerationState):
    """Every request goes to one `StoppableGeneration`, whatever its model is called."""

    def __init__(self):
        super().__init__()
        self._manager = StoppableGeneration()

    def get_manager(self, model_id: str, use_cb: bool = False) -> "StoppableGeneration":
        return self._manager

    def stop(self) -> None:
        """End what is being generated and what waits for it at the next token; the answers so far are sent."""
        self._manager.stopped = True


class StoppableGeneration(GenerateManager):
    """One request after the other, each from its own seed and within the model's context."""

    def __init__(self):
        super().__init__()
        self.stopped = False

    def generate_streaming(self, model, processor, inputs, gen_config, *args, **options):
        inputs = self._checked(model, processor, inputs, gen_config)
        self._seed(gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, *args, **options)

    async def generate_non_streaming(self, model, processor, inputs, gen_config, *args, **options):
        inputs = self._checked(model, processor, inputs, gen_config)
        self._seed(gen_config)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, *args, **options)

    def _seed(self, generation_config) -> None:
        """Seed the generation that is submitted next, right before it: the thread takes both in this order."""
        seed = generation_config.__dict__.pop("seed", None)  # `generate` knows no such key
        if seed is not None:
            self.submit(torch.manual_seed, seed)  # nothing comes between, as no caller awaits before it submits

    def _checked(self, model, tokenizer, inputs, generation_config) -> dict:
        """What `generate` gets, and in `generation_config` no more new tokens than the context has room for.

        Raises:
            HTTPException: no prompt, or one without room for an answer. On a GPU, learned positions past the context
                would end the whole process.
            ValueError: tokens that the model has no embedding for, for the same reason.
        """
        tokens, context = inputs["input_ids"].shape[-1], own_context(model)
        if tokens == 0:
            raise HTTPException(400, "the prompt is empty; give at least one token")
        if context is not None and tokens >= context:
            raise HTTPException(
                400, f"the prompt has {tokens:,} tokens and the model's context {context:,}; leave room for an answer"
            )
        check_ids(model, tokenizer, inputs["input_ids"])
        if context is not None:
            generation_config.max_new_tokens = min(generation_config.max_new_tokens, context - tokens)
        return {**inputs, "stopping_criteria": [self._is_stopped]}

    def _is_stopped(self, input_ids: torch.Tensor, scores, **_) -> torch.Tensor:
        return torch.full(input_ids.shape[:1], self.stopped, device=input_ids.device)
