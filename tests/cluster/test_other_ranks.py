"""Both ends of the pipe between rank 0 and another rank: transfers are asked for and answered in lines of JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.cluster.other_ranks import (
    PipeRank,
    RankTransfers,
    request_from_json,
    request_to_json,
    result_from_json,
    result_to_json,
)
from kvferry.core import BlockTable, TokenRange, TransferError
from kvferry.engine import RankLostError
from kvferry.engine.rank_pipe import END
from kvferry.transceiver import LoadResult, PartRequest

REQUEST = PartRequest(
    handle=b"\x00handle\xff",
    tokens_digest=b"d" * 32,
    tables=(BlockTable((3, 1, 2), (), 0), BlockTable((7,), (), 4)),
    tokens=TokenRange(16, 40),
    source_rank=2,
)
RESULT = LoadResult(5, nbytes=1 << 40, seconds=0.25, copies=3, error="boom", in_doubt=True, in_part=True)


class Transfers:
    """Stands where a rank's transceiver does."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.done: Callable[[LoadResult], None] | None = None
        self.loaded = threading.Event()

    def load_part(self, handle: bytes, digest: bytes, tables: Any, tokens: Any, source: int, on_done: Any) -> int:
        self.calls.append(PartRequest(handle, digest, tables, tokens, source))
        self.done = on_done
        self.loaded.set()
        return 41

    def cancel_load(self, load_id: int) -> None:
        self.calls.append(("cancel", load_id))
        assert self.done is not None
        self.done(LoadResult(load_id, error="cancelled", in_doubt=True))

    def when_quiet(self, load_id: int, on_quiet: Callable[[], None]) -> None:
        self.calls.append(("quiet", load_id))
        on_quiet()

    def connect_rank(self, endpoint: str, source_rank: int) -> None:
        if endpoint == "nobody":
            raise TransferError("nobody is there")
        self.calls.append(("connect", endpoint, source_rank))

    def attend(self, seconds: float) -> None:
        self.calls.append(("attend", seconds))


class Follower:
    """A rank that has done every step up to `done`."""

    done = 7

    def await_step(self, number: int, timeout_s: float) -> bool:
        return number <= self.done


class Child:
    """Rank 0's end of the pipe: what is told arrives at the other end as JSON."""

    rank = 1

    def __init__(self) -> None:
        self.heard: Callable[[Any], None] = lambda message: None
        self.gone = False

    def tell(self, message: Any) -> None:
        if self.gone:
            raise RankLostError("gone")
        self.heard(json.loads(json.dumps(message)))


class Leader:
    def __init__(self) -> None:
        self.children = [Child()]
        self.number = 7


class Pipe:
    """The other rank's end."""

    def __init__(self) -> None:
        self.heard: Callable[[Any], None] = lambda message: None

    def say(self, message: Any) -> None:
        self.heard(json.loads(json.dumps(message)))


@pytest.fixture
def ends() -> tuple[PipeRank, Transfers, Leader, Pipe]:
    leader, pipe, transfers = Leader(), Pipe(), Transfers()
    rank = PipeRank(leader, 1, info="whoever")  # type: ignore[arg-type]
    server = RankTransfers(pipe, Follower(), transfers)  # type: ignore[arg-type]
    leader.children[0].heard, pipe.heard = server.heard, rank.heard
    return rank, transfers, leader, pipe


def test_requests_and_results_arrive_as_they_were_said() -> None:
    assert request_from_json(json.loads(json.dumps(request_to_json(REQUEST)))) == REQUEST
    assert result_from_json(5, json.loads(json.dumps(result_to_json(RESULT)))) == RESULT


def test_a_load_is_asked_for_and_answered_once(ends: Any) -> None:
    rank, transfers, _, _ = ends
    results: list[LoadResult] = []
    number = rank.load(REQUEST, results.append)
    assert transfers.loaded.wait(5)
    assert transfers.calls == [REQUEST]
    transfers.done(LoadResult(41, nbytes=10, copies=2))
    transfers.done(LoadResult(41, nbytes=10, copies=2))
    assert results == [LoadResult(number, nbytes=10, copies=2)]


def test_a_rank_that_lags_behind_does_not_load(ends: Any) -> None:
    """Its pages may still be written by a step."""
    rank, transfers, leader, _ = ends
    leader.number = 8
    results: list[LoadResult] = []
    answered = threading.Event()
    rank.load(REQUEST, lambda result: (results.append(result), answered.set()))
    assert answered.wait(5)
    assert transfers.calls == []
    assert results[0].error == "a rank of this worker is behind"


def test_a_cancelled_load_in_doubt_is_quiet_later(ends: Any) -> None:
    rank, transfers, _, _ = ends
    ended, quiet = threading.Event(), threading.Event()
    number = rank.load(REQUEST, lambda result: ended.set())
    assert transfers.loaded.wait(5)
    rank.cancel(number)
    assert ended.wait(5)
    rank.when_quiet(number, quiet.set)
    assert quiet.wait(5)
    assert transfers.calls[1:] == [("cancel", 41), ("quiet", 41)]


def test_first_contact_is_made_or_refused_by_name(ends: Any) -> None:
    rank, transfers, _, _ = ends
    assert rank.connect("p:1", 3).result(5) is None
    assert transfers.calls == [("connect", "p:1", 3)]
    with pytest.raises(TransferError, match="rank 1: nobody is there"):
        rank.connect("nobody", 0).result(5)


def test_attention_is_passed_on_and_the_end_is_not_its_business(ends: Any) -> None:
    rank, transfers, leader, _ = ends
    rank.attend(1.5)
    leader.children[0].tell(END)
    assert transfers.calls == [("attend", 1.5)]


def test_nothing_is_said_to_a_rank_that_is_gone(ends: Any) -> None:
    rank, transfers, leader, _ = ends
    leader.children[0].gone = True
    rank.attend(1.0)
    rank.cancel(1)
    assert transfers.calls == []
