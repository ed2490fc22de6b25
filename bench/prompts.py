"""Prompts of an exact number of tokens, made of whole words, and never the same twice."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from kvferry.text import Tokenizer

_WORD = re.compile(r" [a-z]{3,}")


class PromptSource:
    """Random words that are one token each. Whoever takes prompts in the same order from the same seed gets the same
    ones; no two begin alike, so that no prefix cache helps unless a prompt is sent again."""

    def __init__(self, tokenizer: Tokenizer, seed: int = 0) -> None:
        self._words = [i for i in range(tokenizer.vocab_size) if _WORD.fullmatch(tokenizer.decode([i]))]
        if len(self._words) < 2:
            raise ValueError("this vocabulary has no tokens that are words")
        self._random = random.Random(seed)
        self._taken = 0

    def take(self, tokens: int) -> list[int]:
        self._taken += 1
        first, second = divmod(self._taken, len(self._words))
        begin = [self._words[second], self._words[first % len(self._words)]]
        return [*begin, *self._random.choices(self._words, k=tokens)][:tokens]

    def endless(self, tokens: int) -> Iterator[list[int]]:
        while True:
            yield self.take(tokens)
