"""Conversations that a chat model has with itself: it asks in the user's place, then answers.

A conversion that reads no conversations unlearns to answer: of all that an instruct model does, it loses most there.
Nothing is asked of the model but to go on after the template's opening of a user's turn (Magpie, Xu et al. 2024).
"""

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_twell.recipe.chat import render
from hf_twell.sampling.draw import sample_after

MARK = "\u2042"  # stands where a user's words go, to find what the template writes around them
QUESTION_SHARE = 0.25  # of a conversation's tokens, at most


class Turns:
    """What a chat template writes around a user's words, as tokens; a ValueError where there is none, or it does not
    write the words once, as they are, and a special token after."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        text = render(tokenizer, [{"role": "user", "content": MARK}], add_generation_prompt=True)
        if text.count(MARK) != 1:
            raise ValueError(f"the chat template writes a user's words {text.count(MARK)} times, not once")
        self.opening, self.closing = (tokenizer(part, add_special_tokens=False).input_ids for part in text.split(MARK))
        if not (self.opening and self.closing):
            raise ValueError("the chat template writes nothing before or nothing after a user's words")
        added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special = set(tokenizer.all_special_ids) | added
        if self.closing[0] not in self.special:  # what is written may hold it, so nothing tells where a turn ends
            ends = tokenizer.decode(self.closing[:1])
            raise ValueError(f"the chat template ends a user's words by {ends!r}, which is no special token")

    def question(self, words: list[int]) -> list[int]:
        """Up to the end of the user's turn; empty where it does not end, or other marks come first."""
        end = self._first_special(words)
        return words[:end] if end < len(words) and words[end] == self.closing[0] else []

    def answer(self, words: list[int]) -> list[int]:
        """Up to its end, or as far as it goes."""
        return words[: self._first_special(words)]

    def _first_special(self, words: list[int]) -> int:
        return next((at for at, word in enumerate(words) if word in self.special), len(words))


def sample_conversations(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int, batch_size: int, *, seed: int, **drawn: Any
) -> list[dict]:
    """Rows {"messages": a question and its answer, "tokens"} of at most `length` tokens with what the template writes.
    There are `batch_size` or fewer: a question that does not end in a quarter of `length` is left out; an answer that
    does not end is cut, and its message says "unfinished", which `hf_twell.recipe.chat.chat_tokens` reads. `drawn` are
    options of `sample_after`, for both. A ValueError of a chat template that leaves no room, or that sampling cannot go
    by."""
    turns = Turns(tokenizer)
    around, most = len(turns.opening) + len(turns.closing), int(QUESTION_SHARE * length)
    if most < 1 or around + most >= length:
        raise ValueError(f"length={length}; the chat template alone takes {around} tokens: give more")
    opening_BL = torch.tensor([turns.opening], device=model.device).expand(batch_size, -1)
    asked = sample_after(model, opening_BL, torch.ones_like(opening_BL), most + 1, seed=seed, **drawn)
    questions = [turns.question(words) for words in asked[:, len(turns.opening) :].tolist()]
    questions = [words for words in questions if tokenizer.decode(words).strip()]
    if not questions:
        return []
    longest = around + max(map(len, questions))
    prompts_BL = torch.zeros(len(questions), longest, dtype=torch.int64)
    mask_BL = torch.zeros_like(prompts_BL)
    for row, words in enumerate(questions):
        prompt = [*turns.opening, *words, *turns.closing]
        prompts_BL[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask_BL[row, longest - len(prompt) :] = 1
    # Another seed than any batch's questions have, in the 32 bits that a CPU's generator keeps.
    prompts_BL, mask_BL, answering = prompts_BL.to(model.device), mask_BL.to(model.device), seed ^ 1 << 31
    said = sample_after(model, prompts_BL, mask_BL, length - longest, seed=answering, **drawn)[:, longest:].tolist()
    rows = []
    for question, words in zip(questions, said, strict=True):
        answer = turns.answer(words)
        texts = [tokenizer.decode(part).strip() for part in (question, answer)]
        if all(texts):
            messages = [
                {"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)
            ]
            if len(answer) == len(words):
                messages[1]["unfinished"] = True
            rows.append({"messages": messages, "tokens": around + len(question) + len(answer)})
    return rows
