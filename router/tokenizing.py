"""Tokenizing beside the event loop: bounded in text, threads, queue and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvferry.core import InvalidRequestError, ModelLimits, OverloadedError
from kvferry.text import Tokenizer

# Longer texts are tokenized on a thread: the event loop would stand still for everybody.
_INLINE_CHARS = 2_000
_INLINE_MESSAGES = 16
_THREADS = 2
_RETRY_AFTER_S = 1.0


def check_message_count(count: int, limits: ModelLimits) -> None:
    """Raises InvalidRequestError for a conversation of more messages than the context has tokens."""
    if count > limits.max_context_tokens:
        raise InvalidRequestError(
            f"messages holds {count} messages; the limit is {limits.max_context_tokens} (max_context_tokens)",
            field="messages",
        )


class Tokenizing:
    """The router's use of a tokenizer. Close it to drop what waits; what a thread has begun it finishes.

    A text is refused by its length alone when no tokenizer that keeps every character could make a prompt of it.
    """

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, max_queued: int) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._max_queued = max_queued
        self._on_thread = 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizing")
        self.max_chars = limits.max_context_tokens * tokenizer.longest_token_chars

    async def text(self, text: str, field: str) -> list[int]:
        """Cancel the caller to drop it from the queue. Raises InvalidRequestError and OverloadedError."""
        self._check_chars(len(text), field)
        return await self._run(lambda: self._tokenizer.encode(text), len(text) <= _INLINE_CHARS)

    async def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """As `text`, for a conversation."""
        check_message_count(len(messages), self._limits)
        chars = sum(len(message.get("content", "")) for message in messages)
        self._check_chars(chars, "messages")
        short = chars <= _INLINE_CHARS and len(messages) <= _INLINE_MESSAGES
        return await self._run(lambda: self._tokenizer.encode_chat(messages), short)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check_chars(self, chars: int, field: str) -> None:
        if chars > self.max_chars:
            raise InvalidRequestError(
                f"{field} has {chars} characters; the limit is {self.max_chars} (max_context_tokens "
                f"{self._limits.max_context_tokens} times {self._tokenizer.longest_token_chars}, the longest token)",
                field=field,
            )

    async def _run(self, work: Callable[[], list[int]], short: bool) -> list[int]:
        if short:
            return work()
        if self._on_thread >= _THREADS + self._max_queued:
            raise OverloadedError(
                f"{self._on_thread} long prompts are being tokenized; try again, or raise router.max_queued",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._on_thread += 1
        try:
            # Cancelling this await takes the work from the queue if no thread has begun it.
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._on_thread -= 1
