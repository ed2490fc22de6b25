"""From what a client sent to a job: every check a request must pass before a worker sees it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvferry.core import (
    InvalidRequestError,
    ModelLimits,
    ModelNotFoundError,
    SamplingParams,
    check_prompt,
    new_request_id,
    resolve_max_tokens,
)
from kvferry.router.job import Deadline, Job
from kvferry.router.settings import RouterSettings
from kvferry.router.tokenizing import Tokenizing

_SEED_BITS = 64
# A request ends this long before its client's deadline (or a tenth of it before): the client, whose own clock ends the
# call, would otherwise never get the answer that says why.
_ANSWER_TIME_S, _ANSWER_SHARE = 0.05, 0.1
_MAX_LABEL_CHARS = 256


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Sequence[Mapping[str, str]]


Prompt = TextPrompt | TokensPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request as a front end understood it. timeout_s: the client's deadline, None if it has none."""

    prompt: Prompt
    sampling: SamplingParams
    model: str = ""
    client_id: str = ""
    cache_salt: str = ""
    timeout_s: float | None = None


class Intake:
    """Checks asks against the served model."""

    def __init__(self, settings: RouterSettings, tokenizing: Tokenizing) -> None:
        self._model_name = settings.model_name
        self._max_timeout_s = settings.request_timeout_s
        self._tokenizing = tokenizing
        self.limits: ModelLimits = settings.limits
        self.max_prompt_chars = tokenizing.max_chars

    def check_model(self, model: str) -> None:
        """Raises ModelNotFoundError naming the served one."""
        if model and model != self._model_name:
            raise ModelNotFoundError(
                f"model {model[:_MAX_LABEL_CHARS]!r} is not served here; {self._model_name!r} is", field="model"
            )

    async def tokenize(self, model: str, prompt: Prompt, timeout_s: float | None) -> Sequence[int]:
        """Token ids of a prompt, unchecked. Raises as `job` does, and TimeoutError at the deadline."""
        self.check_model(model)
        return await self._token_ids(prompt, "text", self._deadline(timeout_s))

    async def job(self, ask: Ask, request_id: str, arrived: float) -> Job:
        """A job under a fresh id of ours. Cancel it when the client is gone.

        Raises InvalidRequestError or ModelNotFoundError naming the field, OverloadedError when too many long prompts
        wait to be tokenized, TimeoutError at the deadline.
        """
        self.check_model(ask.model)
        for name in ("client_id", "cache_salt"):
            _check_label("request_id" if name == "client_id" else name, getattr(ask, name))
        deadline = self._deadline(ask.timeout_s)
        token_ids = await self._token_ids(ask.prompt, "prompt", deadline)
        check_prompt(token_ids, self.limits, "messages" if isinstance(ask.prompt, ChatPrompt) else "prompt")
        return Job(
            request_id=request_id,
            prompt_token_ids=tuple(token_ids),
            sampling=self._complete(ask.sampling, len(token_ids)),
            deadline=deadline,
            arrived=arrived,
            scope=ask.cache_salt,
            client_id=ask.client_id,
        )

    async def _token_ids(self, prompt: Prompt, field: str, deadline: Deadline) -> Sequence[int]:
        async with asyncio.timeout(deadline.left_s()):
            if isinstance(prompt, TokensPrompt):
                return prompt.token_ids
            if isinstance(prompt, ChatPrompt):
                return await self._tokenizing.chat(prompt.messages)
            return await self._tokenizing.text(prompt.text, field)

    def _deadline(self, timeout_s: float | None) -> Deadline:
        if timeout_s is not None and timeout_s <= 0:
            raise InvalidRequestError(f"timeout must be above 0 seconds, got {timeout_s:g}", field="timeout")
        if timeout_s is None:
            return Deadline.after(self._max_timeout_s)
        ours_s = timeout_s - min(_ANSWER_TIME_S, timeout_s * _ANSWER_SHARE)
        return Deadline.after(min(self._max_timeout_s, ours_s))

    def _complete(self, sampling: SamplingParams, prompt_tokens: int) -> SamplingParams:
        """With max_tokens and a seed, so that every worker, and every replay, makes the same choices."""
        for name in ("logit_bias", "stop_token_ids"):
            for token_id in getattr(sampling, name):
                if token_id >= self.limits.vocab_size:
                    raise InvalidRequestError(
                        f"{name} names token id {token_id}, outside the vocabulary [0, {self.limits.vocab_size})",
                        field=name,
                    )
        return replace(
            sampling,
            max_tokens=resolve_max_tokens(sampling, prompt_tokens, self.limits),
            seed=secrets.randbits(_SEED_BITS) if sampling.seed is None else sampling.seed,
        )


def _check_label(name: str, value: str) -> None:
    if len(value) > _MAX_LABEL_CHARS:
        raise InvalidRequestError(f"{name} has {len(value)} characters; the limit is {_MAX_LABEL_CHARS}", field=name)


def new_arrival() -> tuple[str, float]:
    """A request id and the moment it is for, taken before anything else is done for a request."""
    return new_request_id(), time.monotonic()
