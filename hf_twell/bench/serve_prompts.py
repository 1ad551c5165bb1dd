"""Prompts of a given number of tokens, another for every request: an engine may keep what it has read before."""

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORDS = 4096  # drawn from a vocabulary
TRIES = 100  # words to end a prompt with


class Prompts:
    """Of a text's passages, or of random words of the tokenizer's vocabulary.

    Args:
        text: whose passages are taken; None for random words, whose activity is no real text's.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", text: str | None = None):
        self.tokenizer, self.from_text = tokenizer, text is not None
        self.words = text.split() if text is not None else _vocabulary(tokenizer)
        if not self.words:
            raise ValueError("the text has no words; give another --text")

    def make(self, count: int, tokens: int, seed: str) -> list[str]:
        """`count` prompts of `tokens` tokens each, the same ones for the same seed."""
        chance = random.Random(seed)
        return [self._prompt(tokens, chance) for _ in range(count)]

    def _prompt(self, tokens: int, chance: random.Random) -> str:
        chosen = self._words(tokens + 8, chance)
        few, many = 0, len(chosen)  # words that are not too many tokens, and the most that may not be
        while few < many:
            middle = (few + many + 1) // 2
            few, many = (middle, many) if self._tokens(chosen[:middle]) <= tokens else (few, middle - 1)
        chosen = chosen[: max(few, 1)]
        for word in chance.choices(self.words, k=TRIES):
            if self._tokens(chosen) == tokens:
                break
            for end in (word, word[:1]):
                if self._tokens([*chosen, end]) <= tokens:
                    chosen.append(end)
                    break
        return " ".join(chosen)

    def _words(self, count: int, chance: random.Random) -> list[str]:
        if not self.from_text:
            return chance.choices(self.words, k=count)
        start = chance.randrange(len(self.words))
        return [self.words[(start + index) % len(self.words)] for index in range(count)]

    def _tokens(self, words: list[str]) -> int:
        """As a server counts them, with what its tokenizer adds."""
        return len(self.tokenizer(" ".join(words))["input_ids"])


def _vocabulary(tokenizer) -> list[str]:
    """Pieces of letters alone."""
    ids = random.Random(0).sample(range(len(tokenizer)), min(WORDS, len(tokenizer)))
    words = (tokenizer.decode([index]).strip() for index in ids)
    return [word for word in words if word.isalpha()] or ["a"]
