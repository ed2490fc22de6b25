"""Prompts of whole words: of an exact length, repeatable, and never the same twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvferry.bench.prompts import PromptSource


class Letters:
    """Tokens 0 and 1 are no words; 2 and up are."""

    vocab_size = 30

    def decode(self, token_ids: Sequence[int]) -> str:
        return (
            "<s>"
            if token_ids[0] == 0
            else "word"
            if token_ids[0] == 1
            else f" word{'abcdefghijklmnopqrstuvwxyzab'[token_ids[0] - 2]}"
        )


def source(seed: int = 0) -> PromptSource:
    return PromptSource(Letters(), seed)  # type: ignore[arg-type]


def test_prompts_are_words_of_the_asked_length() -> None:
    prompts = [source().take(length) for length in (1, 2, 3, 64)]
    assert [len(prompt) for prompt in prompts] == [1, 2, 3, 64]
    assert all(token >= 2 for prompt in prompts for token in prompt)


def test_no_two_begin_alike_and_the_order_is_the_seeds() -> None:
    first, again = source(), source()
    prompts = [tuple(first.take(16)) for _ in range(500)]
    assert len({prompt[:2] for prompt in prompts}) == 500
    assert prompts == [tuple(again.take(16)) for _ in range(500)]
    assert tuple(source(1).take(16)) != prompts[0]


def test_endless_takes_one_after_the_other() -> None:
    endless = source().endless(4)
    assert next(endless) != next(endless)


def test_a_vocabulary_without_words_is_refused() -> None:
    letters = Letters()
    letters.vocab_size = 2
    with pytest.raises(ValueError, match="no tokens that are words"):
        PromptSource(letters)  # type: ignore[arg-type]
