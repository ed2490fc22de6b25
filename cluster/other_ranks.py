"""The transfers of a worker's other ranks, over the pipes between their processes and rank 0's: both ends.

Messages are lines of JSON (`kvferry.engine.rank_pipe`). Rank 0 says what to do, by a number it chose; the rank answers
with how it went.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvferry.core import BlockTable, KVFerryError, RankInfo, TokenRange, TransferError, codec
from kvferry.engine import Follower, Message, ParentPipe, RankLeader, RankLostError
from kvferry.transceiver import LoadResult, PartRequest, PythonTransceiver

logger = logging.getLogger(__name__)

_BEHIND_S = 30.0
"""How long a rank may take to reach the step after which its pages are free to be loaded into."""


class PipeRank:
    """Implements `transceiver.OtherRank` for the rank behind one pipe. Thread-safe."""

    def __init__(self, leader: RankLeader, number: int, info: RankInfo) -> None:
        """number: of the rank, from 1 on."""
        self._leader = leader
        self._child = leader.children[number - 1]
        self._info = info
        self._lock = threading.Lock()
        self._next = 0
        self._loads: dict[int, Callable[[LoadResult], None]] = {}
        self._quiet: dict[int, Callable[[], None]] = {}
        self._contacts: dict[int, Future[None]] = {}

    @property
    def info(self) -> RankInfo:
        return self._info

    def connect(self, endpoint: str, source_rank: int) -> Future[None]:
        contact: Future[None] = Future()
        number = self._number()
        self._contacts[number] = contact
        self._tell({"do": "connect", "id": number, "endpoint": endpoint, "source": source_rank})
        return contact

    def load(self, request: PartRequest, on_done: Callable[[LoadResult], None]) -> int:
        number = self._number()
        self._loads[number] = on_done
        # What the pages are used for until now, by steps announced before, must be over there too.
        self._tell({"do": "load", "id": number, "after": self._leader.number, **request_to_json(request)})
        return number

    def cancel(self, load_id: int) -> None:
        self._tell({"do": "cancel", "id": load_id})

    def when_quiet(self, load_id: int, on_quiet: Callable[[], None]) -> None:
        self._quiet[load_id] = on_quiet
        self._tell({"do": "quiet", "id": load_id})

    def attend(self, seconds: float) -> None:
        self._tell({"do": "attend", "seconds": seconds})

    def heard(self, message: Message) -> None:
        """What the rank said, on the thread that reads its pipe."""
        number = int(message["id"])
        match message["said"]:
            case "loaded":
                done = self._loads.pop(number, None)
                if done is not None:
                    done(result_from_json(number, message))
            case "quiet":
                quiet = self._quiet.pop(number, None)
                if quiet is not None:
                    quiet()
            case "contact":
                contact = self._contacts.pop(number, None)
                if contact is not None and message["error"]:
                    contact.set_exception(TransferError(f"rank {self._child.rank}: {message['error']}"))
                elif contact is not None:
                    contact.set_result(None)

    def _number(self) -> int:
        with self._lock:
            self._next += 1
            return self._next

    def _tell(self, message: Message) -> None:
        """To a rank that is gone nothing is said: the worker ends with it."""
        try:
            self._child.tell(message)
        except RankLostError as error:
            logger.debug("%s", error.message)


class RankTransfers:
    """The other end, in the rank's process. `heard` is called on the thread that reads the pipe."""

    def __init__(self, pipe: ParentPipe, follower: Follower, transceiver: PythonTransceiver) -> None:
        self._pipe = pipe
        self._follower = follower
        self._transceiver = transceiver
        self._loads: dict[int, int] = {}
        # First contacts and ranks that lag behind are waited for, one thread each; neither may stop the pipe.
        self._waiters = ThreadPoolExecutor(8, thread_name_prefix="rank-wait")

    def heard(self, message: Message) -> None:
        number = int(message.get("id", 0))
        match message["do"]:
            case "load":
                self._waiters.submit(self._load, number, int(message["after"]), request_from_json(message))
            case "cancel":
                self._waiters.submit(self._cancel, number)
            case "quiet":
                self._transceiver.when_quiet(
                    self._loads.pop(number, -1), lambda: self._pipe.say({"said": "quiet", "id": number})
                )
            case "connect":
                self._waiters.submit(self._connect, number, str(message["endpoint"]), int(message["source"]))
            case "attend":
                self._transceiver.attend(float(message["seconds"]))

    def _load(self, number: int, after: int, request: PartRequest) -> None:
        def done(result: LoadResult) -> None:
            if not result.in_doubt:
                self._loads.pop(number, None)
            self._pipe.say({"said": "loaded", "id": number, **result_to_json(result)})

        if not self._follower.await_step(after, _BEHIND_S):
            done(LoadResult(number, error="a rank of this worker is behind"))
            return
        try:
            self._loads[number] = self._transceiver.load_part(
                request.handle, request.tokens_digest, request.tables, request.tokens, request.source_rank, done
            )
        except TransferError as error:
            done(LoadResult(number, error=error.message))

    def _cancel(self, number: int) -> None:
        load_id = self._loads.get(number)
        if load_id is not None:
            self._transceiver.cancel_load(load_id)

    def _connect(self, number: int, endpoint: str, source_rank: int) -> None:
        error = ""
        try:
            self._transceiver.connect_rank(endpoint, source_rank)
        except KVFerryError as refused:
            error = refused.message
        self._pipe.say({"said": "contact", "id": number, "error": error})


def request_to_json(request: PartRequest) -> dict[str, Any]:
    return {
        "handle": request.handle.hex(),
        "digest": request.tokens_digest.hex(),
        "tables": [[table.first_block, list(table.block_ids)] for table in request.tables],
        "tokens": [request.tokens.start, request.tokens.stop],
        "source": request.source_rank,
    }


def request_from_json(message: Message) -> PartRequest:
    return PartRequest(
        handle=bytes.fromhex(message["handle"]),
        tokens_digest=bytes.fromhex(message["digest"]),
        tables=tuple(BlockTable(tuple(ids), (), first) for first, ids in message["tables"]),
        tokens=TokenRange(*message["tokens"]),
        source_rank=int(message["source"]),
    )


def result_to_json(result: LoadResult) -> dict[str, Any]:
    return {
        "nbytes": result.nbytes,
        "seconds": result.seconds,
        "copies": result.copies,
        "error": result.error,
        "in_doubt": result.in_doubt,
        "in_part": result.in_part,
    }


def result_from_json(load_id: int, message: Message) -> LoadResult:
    return LoadResult(
        load_id,
        nbytes=int(message["nbytes"]),
        seconds=float(message["seconds"]),
        copies=int(message["copies"]),
        error=message["error"],
        in_doubt=bool(message["in_doubt"]),
        in_part=bool(message["in_part"]),
    )


def info_from_facts(facts: Message) -> RankInfo:
    """What a rank said of itself when it began to serve."""
    return codec.rank_from_bytes(bytes.fromhex(facts["rank"]))
