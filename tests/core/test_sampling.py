"""Limits of sampling parameters, each error naming its field."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from kvferry.core import InvalidRequestError, ModelLimits, SamplingParams, check_prompt, codec, resolve_max_tokens
from kvferry.core.sampling import LIMITS
from kvferry.proto import generation_pb2

MODEL = ModelLimits(vocab_size=100, max_context_tokens=50)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", -(10**5000)),
        ("temperature", True),
        ("temperature", "1"),
        ("top_p", 10**400),
        ("min_p", math.nan),
        ("top_k", 2**31),
        ("top_k", 10**5000),
        ("top_k", 1.0),
        ("max_tokens", 2**31),
        ("max_tokens", True),
        ("min_tokens", 2**31),
        ("seed", 10**5000),
        ("stop", ("x" * 1025,)),
        ("stop", (1,)),
        ("stop_token_ids", (2**31,)),
        ("stop_token_ids", (1,) * 1025),
        ("logprobs", 10**5000),
        ("repetition_penalty", 10**400),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 10**400),
        ("logit_bias", {2**31: 1.0}),
        ("logit_bias", {10**5000: 1.0}),
        ("logit_bias", {1: 10**400}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
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
        ("ignore_eos", 1),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,  # pytest cannot write the longest
)
def test_out_of_limits_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert LIMITS[field] in caught.value.message
    assert len(caught.value.message) < 300


def test_every_field_has_its_limit_in_words_and_the_largest_values_cross_the_wire() -> None:
    assert set(LIMITS) == {field.name for field in fields(SamplingParams)}
    largest = SamplingParams(
        temperature=100,
        top_k=2**31 - 1,
        seed=2**64 - 1,
        max_tokens=2**31 - 1,
        min_tokens=2**31 - 1,
        stop_token_ids=(2**31 - 1,),
        logprobs=20,
        repetition_penalty=100,
        logit_bias={2**31 - 1: 100},
    )
    assert codec.sampling_from_wire(codec.sampling_to_wire(largest)) == largest


@pytest.mark.parametrize(
    "wire",
    [
        generation_pb2.SamplingParams(stop_token_ids=[2**32 - 1]),
        generation_pb2.SamplingParams(stop_token_ids=[1] * 1025),
        generation_pb2.SamplingParams(logit_bias={2**32 - 1: 1.0}),
        generation_pb2.SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)),
        generation_pb2.SamplingParams(stop=["x"] * 17),
        generation_pb2.SamplingParams(repetition_penalty=math.inf),
    ],
)
def test_limits_hold_for_what_came_over_the_wire(wire: generation_pb2.SamplingParams) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        codec.sampling_from_wire(wire)
    assert LIMITS[caught.value.field] in caught.value.message


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
        check_prompt(prompt[:49] + prompt[49:50] if words == "limit is 49" else prompt[-49:], MODEL)
    assert caught.value.field == "prompt"


def test_max_tokens_defaults_to_what_the_context_leaves() -> None:
    assert resolve_max_tokens(SamplingParams(), 20, MODEL) == 30
    assert resolve_max_tokens(SamplingParams(), 20, ModelLimits(100, 5000)) == 256
    assert resolve_max_tokens(SamplingParams(max_tokens=7), 20, MODEL) == 7


def test_max_tokens_over_the_context_names_both_numbers() -> None:
    with pytest.raises(InvalidRequestError, match=r"max_tokens is 31.*room for 30") as caught:
        resolve_max_tokens(SamplingParams(max_tokens=31), 20, MODEL)
    assert caught.value.field == "max_tokens"
