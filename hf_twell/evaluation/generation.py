"""lm-eval's Hugging Face model with the same scores in less time.

Each row stops generating at its own stop string. lm-eval's own runs a batch until all of its rows have written the same
one, which is mostly until the longest length. The texts are the same, because lm-eval cuts them at the first stop
string. And texts to score are tokenized together, over all cores, where lm-eval's own takes them one by one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList


class StoppingRows(HFLM):
    """lm-eval's model of Transformers; how texts are generated and tokenized is overridden."""

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        pairs = [request.args for request in requests]
        # As lm-eval encodes a pair: the context without the spaces at its end, and the whole.
        texts = {context.rstrip() for context, _ in pairs} | {context + rest for context, rest in pairs}
        one_by_one, known = self.tokenizer.encode, {}

        def encode(text: str, **options) -> list[int]:
            if text not in texts:
                return one_by_one(text, **options)
            how = tuple(sorted(options.items()))
            if how not in known:
                found = self.tokenizer(list(texts), verbose=False, **options)["input_ids"]
                known[how] = dict(zip(texts, found, strict=True))
            return known[how][text]

        self.tokenizer.encode = encode
        try:
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        finally:
            self.tokenizer.encode = one_by_one

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

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **options: Any) -> torch.BoolTensor:
        self.done = self.done or [False] * len(input_ids)
        start = max(self.prompt_length, input_ids.shape[1] - self.window)
        for index, row in enumerate(input_ids[:, start:].tolist()):
            if not self.done[index]:
                text = self.tokenizer.decode(row)
                self.done[index] = any(string in text for string in self.strings)
        return torch.tensor(self.done, device=input_ids.device)
