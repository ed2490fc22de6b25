"""Limits of sampling parameters, each error naming its field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvferry.core import InvalidRequestError, ModelLimits, SamplingParams, check_prompt, resolve_max_tokens

LIMITS = ModelLimits(vocab_size=100, max_context_tokens=50)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("min_tokens", -1),
        ("stop", ("",)),
        ("stop", tuple("abcdefghijklmnopq")),
        ("stop_token_ids", (-1,)),
        ("logprobs", -1),
        ("logprobs", 21),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {-1: 1.0}),
    ],
)
def test_out_of_limits_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_one_stop_string_may_be_given_bare() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "empty"), ([1] * 50, "limit is 49"), ([1] * 49 + [100], "outside the vocabulary"), ([-1], "position 0")],
)
def test_bad_prompts(prompt: list[int], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        check_prompt(prompt[:49] + prompt[49:50] if words == "limit is 49" else prompt[-49:], LIMITS)
    assert caught.value.field == "prompt"


def test_max_tokens_defaults_to_what_the_context_leaves() -> None:
    assert resolve_max_tokens(SamplingParams(), 20, LIMITS) == 30
    assert resolve_max_tokens(SamplingParams(), 20, ModelLimits(100, 5000)) == 256
    assert resolve_max_tokens(SamplingParams(max_tokens=7), 20, LIMITS) == 7


def test_max_tokens_over_the_context_names_both_numbers() -> None:
    with pytest.raises(InvalidRequestError, match=r"max_tokens is 31.*room for 30") as caught:
        resolve_max_tokens(SamplingParams(max_tokens=31), 20, LIMITS)
    assert caught.value.field == "max_tokens"
