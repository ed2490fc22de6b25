from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.core import InvalidRequestError, SamplingParams
from kvferry.router.intake import ChatPrompt, TextPrompt, TokensPrompt
from kvferry.router.openai import ChatBody, CompletionBody, parse_body


def completion(**body: Any) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps(body).encode())


def chat(**body: Any) -> ChatBody:
    return parse_body(ChatBody, json.dumps({"messages": [{"role": "user", "content": "hi"}], **body}).encode())


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", TextPrompt("hi")),
        (["hi"], TextPrompt("hi")),
        ([1, 2], TokensPrompt([1, 2])),
        ([[1, 2]], TokensPrompt([1, 2])),
        ([], TokensPrompt([])),
    ],
)
def test_prompts_of_every_shape(prompt: Any, expected: object) -> None:
    assert completion(prompt=prompt).ask("").prompt == expected


def test_sampling_is_translated_and_the_rest_keeps_its_defaults() -> None:
    body = completion(prompt="x", temperature=0, max_tokens=3, stop="a", logit_bias={"5": -1}, logprobs=2, user="me")
    assert body.ask("").sampling == SamplingParams(
        temperature=0, max_tokens=3, stop=("a",), logit_bias={5: -1}, logprobs=2
    )
    assert completion(prompt="x").ask("").sampling == SamplingParams()
    assert chat(logprobs=True, top_logprobs=3, max_completion_tokens=9).ask("").sampling == SamplingParams(
        logprobs=3, max_tokens=9
    )
    assert chat(logprobs=True).ask("").sampling.logprobs == 0
    assert chat(n=1, tools=[], response_format={"type": "text"}).ask("").sampling == SamplingParams()


def test_chat_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).ask("").prompt == ChatPrompt(
        [{"role": "user", "content": "ab"}]
    )


@pytest.mark.parametrize(
    ("body", "field", "needle"),
    [
        ({}, "prompt", "Field required"),
        ({"prompt": "x", "temperature": "hot"}, "temperature", "temperature"),
        ({"prompt": "x", "temperature": -1}, "temperature", "between 0 and 100"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens", "integer"),
        ({"prompt": "x", "max_tokens": "7"}, "max_tokens", "integer"),
        ({"prompt": "x", "n": 2}, "n", "not supported"),
        ({"prompt": "x", "echo": True}, "echo", "not supported"),
        ({"prompt": "x", "guided_json": {}}, "guided_json", "not supported"),
        ({"prompt": ["a", "b"]}, "prompt", "the limit is 1"),
        ({"prompt": [1, "b"]}, "prompt", "list of token ids"),
        ({"prompt": [1, True]}, "prompt", "list of token ids"),
        ({"prompt": "x", "stream": "yes"}, "stream", "boolean"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "logit_bias"),
        ({"prompt": "x", "seed": -1}, "seed", "between 0"),
    ],
)
def test_bad_completion_bodies(body: dict[str, Any], field: str, needle: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**body).ask("")
    assert caught.value.field == field
    assert needle in caught.value.message


@pytest.mark.parametrize(
    ("body", "field", "needle"),
    [
        ({"messages": "hi"}, "messages", "array"),
        ({"messages": [{"role": "user"}]}, "messages", "Field required"),
        ({"messages": [{"role": "u", "content": [{"type": "image_url"}]}]}, "messages", "only text"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs", "between 0 and 20"),
    ],
)
def test_bad_chat_bodies(body: dict[str, Any], field: str, needle: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**body).ask("")
    assert caught.value.field == field
    assert needle in caught.value.message


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_what_is_not_an_object_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(CompletionBody, data)
    assert caught.value.field == "body"
