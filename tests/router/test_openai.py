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
        ({}, "prompt", "prompt is missing: it must be a string or a list of token ids"),
        (
            {"prompt": "x", "temperature": "hot"},
            "temperature",
            "temperature must be a number between 0 and 100, got 'hot'",
        ),
        ({"prompt": "x", "temperature": True}, "temperature", "a number between 0 and 100, got true"),
        ({"prompt": "x", "temperature": "1"}, "temperature", "a number between 0 and 100, got '1'"),
        ({"prompt": "x", "temperature": 10**400}, "temperature", "between 0 and 100"),
        ({"prompt": "x", "temperature": [0]}, "temperature", "got a list"),
        ({"prompt": "x", "top_p": 0}, "top_p", "above 0 and at most 1, got 0"),
        ({"prompt": "x", "top_k": 2**31}, "top_k", "between 0 (off) and 2147483647, got 2147483648"),
        ({"prompt": "x", "top_k": 10**400}, "top_k", "between 0 (off) and 2147483647"),
        ({"prompt": "x", "max_tokens": 2**31}, "max_tokens", "between 1 and 2147483647"),
        ({"prompt": "x", "min_tokens": 2**63}, "min_tokens", "between 0 and 2147483647"),
        ({"prompt": "x", "logprobs": 2**31}, "logprobs", "between 0 and 20"),
        ({"prompt": "x", "stop_token_ids": [2**40]}, "stop_token_ids", "between 0 and 2147483647"),
        (
            {"prompt": "x", "stop_token_ids": [1.5]},
            "stop_token_ids",
            "stop_token_ids must be a list of at most 1024",
        ),
        ({"prompt": "x", "stop": ["a", 1]}, "stop", "stop must be a string, or a list of at most 16 non-empty"),
        ({"prompt": "x", "logit_bias": {"9" * 30: 1}}, "logit_bias", "between 0 and 2147483647"),
        ({"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "logit_bias", "between 0 and 2147483647"),
        ({"prompt": "x", "logit_bias": {"1": 10**400}}, "logit_bias", "between -100 and 100"),
        ({"prompt": "x", "repetition_penalty": 10**400}, "repetition_penalty", "at most 100"),
        (
            {"prompt": "x", "stream_options": {"include_usage": 1}},
            "stream_options",
            "include_usage must be true or false",
        ),
        ({"prompt": "x", "temperature": -1}, "temperature", "between 0 and 100"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens", "integer"),
        ({"prompt": "x", "max_tokens": "7"}, "max_tokens", "integer"),
        ({"prompt": "x", "n": 2}, "n", "not supported"),
        ({"prompt": "x", "echo": True}, "echo", "not supported"),
        ({"prompt": "x", "guided_json": {}}, "guided_json", "not supported"),
        ({"prompt": ["a", "b"]}, "prompt", "the limit is 1"),
        ({"prompt": [1, "b"]}, "prompt", "list of token ids"),
        ({"prompt": [1, True]}, "prompt", "list of token ids"),
        ({"prompt": "x", "stream": "yes"}, "stream", "stream must be true or false, got 'yes'"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "an object of at most 1024 token ids"),
        ({"prompt": "x", "seed": -1}, "seed", "between 0"),
    ],
)
def test_bad_completion_bodies(body: dict[str, Any], field: str, needle: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**body).ask("")
    assert caught.value.field == field
    assert needle in caught.value.message
    assert "Input should" not in caught.value.message


@pytest.mark.parametrize(
    ("body", "field", "needle"),
    [
        ({"messages": "hi"}, "messages", "messages must be a list of messages, got 'hi'"),
        ({"messages": [{"role": "user"}]}, "messages", "messages[0].content is missing"),
        ({"messages": ["hi"]}, "messages", "messages[0] must be an object with a role and a content, got 'hi'"),
        ({"messages": [{"role": 1, "content": "x"}]}, "messages", "messages[0].role must be a string, got 1"),
        ({"messages": [{"role": "u", "content": 5}]}, "messages", "[0].content must be a string or a list of text"),
        ({"messages": [{"role": "u", "content": [{}]}]}, "messages", "messages[0].content[0].type is missing"),
        ({"logprobs": 2}, "logprobs", "logprobs must be true or false, got 2"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "between 1 and 2147483647, got 0"),
        ({"messages": [{"role": "u", "content": [{"type": "image_url"}]}]}, "messages", "only text"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"use_beam_search": True}, "use_beam_search", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20, got 21"),
    ],
)
def test_bad_chat_bodies(body: dict[str, Any], field: str, needle: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**body).ask("")
    assert caught.value.field == field
    assert needle in caught.value.message
    assert "Input should" not in caught.value.message


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_what_is_not_an_object_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(CompletionBody, data)
    assert caught.value.field == "body"
    assert "not valid JSON" in caught.value.message or "must be a JSON object, got " in caught.value.message
