"""Load drivers: what counts as an answer, what is measured of it, and how many are asked at once."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

import fake_completions
import pytest

from kvferry.bench.http_client import HTTPClient, event_part
from kvferry.bench.load import Ask, Call, CallFailedError, Client, Part, Window, closed_loop


@contextmanager
def serving(fault: str = "") -> Iterator[str]:
    server = fake_completions.serve(0, fault)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def one_call(base: str, ask: Ask) -> Call:
    client = HTTPClient(base, "m")
    try:
        return await client.call(ask)
    finally:
        await client.close()


async def test_a_good_stream_is_measured_token_by_token() -> None:
    with serving() as base:
        call = await one_call(base, Ask([1, 2, 3], 6))
    assert (call.failure, call.finished, call.tokens, len(call.arrivals)) == ("", True, 6, 6)
    assert call.ttft_s >= fake_completions.TOKEN_S
    assert len(call.gaps_s) == 5
    assert sum(gap for _, gap in call.gaps_s) == pytest.approx(call.arrivals[-1] - call.arrivals[0])


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("usage", "asked for 3 + 6 tokens, the usage says (3, 7)"),
        ("error", 'error event: {"message": "the worker is gone"}'),
        ("cut", "the stream broke off"),
        ("refuse", "HTTP 503: no room"),
    ],
)
async def test_an_answer_that_is_not_what_was_asked_for_is_a_failure(fault: str, says: str) -> None:
    with serving(fault) as base:
        call = await one_call(base, Ask([1, 2, 3], 6))
    assert not call.finished
    assert says in call.failure


async def test_every_call_has_a_connection_of_its_own() -> None:
    """Some servers close one after a stream without having said so: the next request over it would be lost."""
    with serving("once") as base:
        client = HTTPClient(base, "m")
        try:
            calls = [await client.call(Ask([1, 2, 3], 4)) for _ in range(3)]
        finally:
            await client.close()
    assert [(call.failure, call.tokens) for call in calls] == [("", 4)] * 3


async def test_nobody_listening_is_a_failure() -> None:
    call = await one_call("http://127.0.0.1:9", Ask([1], 1))
    assert "Connect" in call.failure


def test_events() -> None:
    assert event_part({"choices": [{"text": "a"}]}) == Part(has_tokens=True)
    assert event_part({"choices": [{"text": "", "finish_reason": "length"}]}) == Part(has_tokens=False)
    usage = {"prompt_tokens": 4, "completion_tokens": 2}
    assert event_part({"choices": [], "usage": usage}) == Part(False, 4, 2)
    with pytest.raises(CallFailedError, match="gone"):
        event_part({"error": "gone"})


class ScriptedClient(Client):
    """Yields one token and usage per call, `fails_from` on it breaks off. Counts how many run at once."""

    def __init__(self, fails_from: int | None = None) -> None:
        self.fails_from = fails_from
        self.calls = self.running = self.most_running = 0
        self.prompts: list[int] = []

    async def parts(self, ask: Ask) -> AsyncGenerator[Part, None]:
        self.calls += 1
        self.prompts.append(ask.prompt[0])
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self.fails_from is not None and self.calls >= self.fails_from:
                raise CallFailedError("scripted")
            for _ in range(ask.max_tokens):
                await asyncio.sleep(0.002)
                yield Part(has_tokens=True)
            yield Part(False, len(ask.prompt), ask.max_tokens)
        finally:
            self.running -= 1

    async def close(self) -> None:
        pass


async def test_the_loop_is_closed() -> None:
    client = ScriptedClient()
    window = await closed_loop(client, ([n] for n in itertools.count()), clients=3, max_tokens=4, seconds=0.2)
    assert client.most_running == 3
    assert client.running == 0
    assert client.prompts == list(range(client.calls))
    assert window.failures == []
    assert 0 < window.tokens() <= 4 * client.calls
    assert window.seconds == pytest.approx(0.2, abs=0.1)
    assert len(window.gaps_s()) > len(window.ttfts_s()) > 0


async def test_failures_are_counted_and_never_measured() -> None:
    client = ScriptedClient(fails_from=4)
    window = await closed_loop(client, ([n] for n in itertools.count()), clients=3, max_tokens=2, seconds=0.1)
    assert window.failures == ["scripted"] * 3
    assert len(window.calls) == 6  # each caller stops at its first failure
    assert all(call.tokens == 0 for call in window.calls if call.failure)


async def test_when_every_first_call_fails_the_window_is_empty() -> None:
    window = await closed_loop(ScriptedClient(1), ([n] for n in itertools.count()), 2, 2, seconds=0.01)
    assert len(window.failures) == 2
    assert (window.tokens(), window.ttfts_s(), window.gaps_s()) == (0, [], [])


def test_a_window_counts_what_lies_within_it() -> None:
    call = Call(started=0.5, arrivals=[0.9, 1.1, 1.5, 2.5], tokens=8, finished=True)
    broken = Call(started=1.0, arrivals=[1.1, 1.2], failure="broke off")
    window = Window(1.0, 2.0, [call, broken])
    assert window.tokens() == 4.0  # two of four messages with two tokens each
    assert window.gaps_s() == pytest.approx([0.2, 0.4])
    assert window.ttfts_s() == []
    assert window.failures == ["broke off"]
