"""OpenAI-style answers and stream chunks, made from a job's updates. Pure."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kvferry.core import ErrorCode, FinishReason, KVFerryError, TokenLogprob, Usage
from kvferry.router.job import Job, Update

TokenText = Callable[[int], str]

_ERROR_TYPES = {
    ErrorCode.INVALID_ARGUMENT: "invalid_request_error",
    ErrorCode.NOT_FOUND: "invalid_request_error",
    ErrorCode.RESOURCE_EXHAUSTED: "overloaded_error",
    ErrorCode.UNAVAILABLE: "service_unavailable_error",
    ErrorCode.DEADLINE_EXCEEDED: "timeout_error",
}


def error_body(error: KVFerryError, request_id: str) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": _ERROR_TYPES.get(error.code, "server_error"),
            "param": error.field or None,
            "code": error.code.name,
            "request_id": request_id,
        }
    }


class Answer(ABC):
    """Shapes one job's answer: chunk by chunk, or whole."""

    object_name: str
    chunk_name: str
    id_prefix: str

    def __init__(self, job: Job, model: str, token_text: TokenText) -> None:
        self._job = job
        self._model = model
        self._token_text = token_text
        self._created = int(time.time())
        self._updates: list[Update] = []

    def add(self, update: Update) -> None:
        """Collects for `whole`."""
        self._updates.append(update)

    def whole(self) -> dict[str, Any]:
        last = self._updates[-1]
        text = "".join(update.delta.text for update in self._updates)
        logprobs = [logprob for update in self._updates for logprob in update.delta.logprobs]
        choice = {
            "index": 0,
            **self._content(text),
            "logprobs": self._logprobs(logprobs, 0) if logprobs else None,
            "finish_reason": _finish(last.delta.finish_reason),
        }
        return {**self._head(self.object_name), "choices": [choice], **_ending(last)}

    def opening(self) -> list[dict[str, Any]]:
        """Chunks sent before the first token."""
        return []

    def chunk(self, update: Update, text_offset: int) -> dict[str, Any]:
        """text_offset: characters of the answer before this chunk."""
        delta = update.delta
        choice = {
            "index": 0,
            **self._delta(delta.text),
            "logprobs": self._logprobs(delta.logprobs, text_offset) if delta.logprobs else None,
            "finish_reason": _finish(delta.finish_reason),
        }
        chunk = {**self._head(self.chunk_name), "choices": [choice]}
        if update.route is not None:
            chunk["kvferry"] = _ending(update)["kvferry"]
        return chunk

    def usage_chunk(self, update: Update) -> dict[str, Any]:
        return {**self._head(self.chunk_name), "choices": [], "usage": _usage(update.delta.usage)}

    def _head(self, object_name: str) -> dict[str, Any]:
        return {
            "id": f"{self.id_prefix}-{self._job.label}",
            "object": object_name,
            "created": self._created,
            "model": self._model,
        }

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _delta(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, logprobs: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]: ...


class CompletionAnswer(Answer):
    object_name = "text_completion"
    chunk_name = "text_completion"
    id_prefix = "cmpl"

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, logprobs: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]:
        tokens = [self._token_text(entry.token_id) for entry in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(text_offset)
            text_offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": [
                {self._token_text(token_id): value for token_id, value in entry.top} for entry in logprobs
            ],
            "text_offset": offsets,
        }


class ChatAnswer(Answer):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def opening(self) -> list[dict[str, Any]]:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [{**self._head(self.chunk_name), "choices": [choice]}]

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _logprobs(self, logprobs: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._token(entry.token_id, entry.logprob),
                    "top_logprobs": [self._token(token_id, value) for token_id, value in entry.top],
                }
                for entry in logprobs
            ]
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _finish(reason: FinishReason | None) -> str | None:
    return reason.value if reason is not None else None


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _ending(last: Update) -> dict[str, Any]:
    assert last.route is not None
    return {
        "usage": _usage(last.delta.usage),
        "kvferry": {"route": asdict(last.route), "timings": asdict(last.delta.timings)},
    }
