"""Load on a server under test: streaming completions, and what each client saw. The transports have files of their own.

A call counts only when the server's own usage figures are what was asked for: prompt and answer of exactly so many
tokens. Everything else is a failed call, whatever its status.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field

CALL_S = 180.0


class CallFailedError(Exception):
    """The server refused, broke off, or answered with other numbers of tokens than asked for."""


@dataclass(slots=True)
class Call:
    """One completion as its client saw it, on time.perf_counter's clock. arrivals: of each message with tokens.
    tokens: how many the server says it made. failure: empty when the call counts."""

    started: float
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    finished: bool = False
    failure: str = ""

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.started

    @property
    def gaps_s(self) -> list[tuple[float, float]]:
        """(when it ended, how long it was) for each wait between two messages."""
        return [(b, b - a) for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: Sequence[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Part:
    """One message of a stream. prompt_tokens, completion_tokens: usage so far, where this message has it."""

    has_tokens: bool
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Client(ABC):
    """Owns its connections; `close` ends them."""

    @abstractmethod
    def parts(self, ask: Ask) -> AsyncGenerator[Part, None]:
        """Greedy, ignoring ends of text. Raises CallFailedError; closing it early ends the request."""

    @abstractmethod
    async def close(self) -> None: ...

    async def call(self, ask: Ask) -> Call:
        """Never raises but when it is cancelled: what went wrong is in the answer."""
        call = Call(time.perf_counter())
        try:
            async with asyncio.timeout(CALL_S):
                await self.follow(call, ask)
        except CallFailedError as error:
            call.failure = str(error)
        except TimeoutError:
            call.failure = f"no end within {CALL_S:.0f} s"
        return call

    async def follow(self, call: Call, ask: Ask) -> None:
        """Asks, into `call`: who cancels this still has what came until then. Raises CallFailedError."""
        usage: Part | None = None
        async with contextlib.aclosing(self.parts(ask)) as parts:
            async for part in parts:
                if part.has_tokens:
                    call.arrivals.append(time.perf_counter())
                if part.completion_tokens is not None:
                    usage = part
        if usage is None:
            raise CallFailedError("the stream ended without usage figures")
        told = (usage.prompt_tokens, usage.completion_tokens)
        if told != (len(ask.prompt), ask.max_tokens):
            raise CallFailedError(f"asked for {len(ask.prompt)} + {ask.max_tokens} tokens, the usage says {told}")
        if not call.arrivals:
            raise CallFailedError("no message held a token")
        call.tokens, call.finished = ask.max_tokens, True


@dataclass(slots=True)
class Window:
    """What was seen between `start` and `stop`, on time.perf_counter's clock."""

    start: float
    stop: float
    calls: list[Call] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.stop - self.start

    @property
    def failures(self) -> list[str]:
        return [call.failure for call in self.calls if call.failure]

    def ttfts_s(self) -> list[float]:
        """Of calls whose first token came within."""
        return [call.ttft_s for call in self._counting() if self._within(call.arrivals[0])]

    def gaps_s(self) -> list[float]:
        return [gap for call in self._counting() for end, gap in call.gaps_s if self._within(end)]

    def tokens(self) -> float:
        """Made within. A call's tokens are spread over its messages alike."""
        total = 0.0
        for call in self._counting():
            per_message = call.tokens / len(call.arrivals)
            total += per_message * sum(map(self._within, call.arrivals))
        return total

    def _counting(self) -> Iterator[Call]:
        return (call for call in self.calls if call.finished and not call.failure)

    def _within(self, when: float) -> bool:
        return self.start <= when < self.stop


async def closed_loop(
    client: Client, prompts: Iterator[Sequence[int]], clients: int, max_tokens: int, seconds: float
) -> Window:
    """`clients` callers, each asking again as soon as it is answered, for `seconds` after each had a first answer.

    Returns when the last call has ended; calls that ended before the window began are not in it. A caller whose call
    fails stops asking.
    """
    calls: list[Call] = []
    answered = 0
    all_answered = asyncio.Event()
    ending = asyncio.Event()

    async def caller() -> None:
        nonlocal answered
        first = True
        while not ending.is_set():
            call = await client.call(Ask(next(prompts), max_tokens))
            calls.append(call)
            if first:
                answered, first = answered + 1, False
                if answered == clients:
                    all_answered.set()
            if call.failure:
                return

    async with asyncio.TaskGroup() as callers:
        for _ in range(clients):
            callers.create_task(caller())
        await all_answered.wait()
        start = time.perf_counter()
        await asyncio.sleep(seconds)
        stop = time.perf_counter()
        ending.set()
    return Window(start, stop, calls)
