"""lm-eval's Hugging Face model, whose rows each stop generating at their own stop string.

lm-eval's own runs a batch until all of its rows have written the same one, which is mostly until the longest length.
The texts are the same, because lm-eval cuts them at the first stop string.
"""

from collections.abc import Sequence

import torch
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList


class StoppingRows(HFLM):
    """lm-eval's model of Transformers; generation alone is overridden."""

    def _model_generate(self, context, max_length: int, stop: list[str], **options) -> torch.Tensor:
        if not options.get("do_sample"):
            options.pop("temperature", None)  # 0 from lm-eval, which Transformers warns of
        criteria = StoppingCriteriaList([StopStrings(self.tokenizer, stop, context.shape[1])])
        return self.model.generate(
            input_ids=context,
            max_length=max_length,
            stopping_criteria=criteria,
            pad_token_id=self.tokenizer.pad_token_id,
            use_cache=True,
            **options,
        )


class StopStrings(StoppingCriteria):
    """Stops each row once it has written one of the strings after its prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str], prompt_length: int) -> None:
        self.tokenizer, self.prompt_length = tokenizer, prompt_length
        self.strings = [string for string in strings if string]
        # The same string can be written in other tokens than its encoding has, so two more are looked at.
        lengths = [len(tokenizer.encode(string, add_special_tokens=False)) for string in self.strings]
        self.window = max(lengths, default=0) + 2
        self.done: list[bool] = []

    def __call__(self, input_ids: torch.LongTensor, scores, **options) -> torch.BoolTensor:
        self.done = self.done or [False] * len(input_ids)
        start = max(self.prompt_length, input_ids.shape[1] - self.window)
        for index, row in enumerate(input_ids[:, start:].tolist()):
            if not self.done[index]:
                text = self.tokenizer.decode(row)
                self.done[index] = any(string in text for string in self.strings)
        return torch.tensor(self.done, device=input_ids.device)
