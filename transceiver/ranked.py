"""The transceiver of a worker that has several ranks, or reads from workers that have: rank 0 speaks for all.

A source's hand-off is one session, on its rank 0. At the destination every rank pulls what it needs from each rank of
the source that the planner pairs it with; one load, from rank 0 to rank 0, is the session's other end and tells the
source that it is done when all of them are. How they ended is agreed: cancelled before failed before completed, and
only when every rank's memory is at rest, or known not to be.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Protocol

from kvferry.core import BlockTable, ProcessIdentity, RankInfo, TokenRange, TransferError
from kvferry.kvcache import BlockHold
from kvferry.transceiver.base import CancelOutcome, LoadResult, PushSide, Transceiver
from kvferry.transceiver.control import ControlTarget, PushReport
from kvferry.transceiver.python_runtime import PythonTransceiver
from kvferry.transceiver.shares import pair_sources
from kvferry.transceiver.stats import TransferStats

logger = logging.getLogger(__name__)

_FIRST_CONTACT_S = 3.0
_READER_S = 1.5
"""How long other ranks look after their agents when a reader showed a sign of life; heartbeats come every second."""


@dataclass(frozen=True, slots=True)
class PartRequest:
    """What one rank is to pull from rank `source_rank` of the worker that made `handle`."""

    handle: bytes
    tokens_digest: bytes
    tables: tuple[BlockTable, ...]
    tokens: TokenRange
    source_rank: int


class OtherRank(Protocol):
    """Another rank of this worker, as rank 0 sees it. Methods return at once; callbacks run on any thread. A rank that
    is gone never answers: the worker then ends as a whole."""

    @property
    def info(self) -> RankInfo: ...

    def connect(self, endpoint: str, source_rank: int) -> Future[None]:
        """First contact with one rank of the worker at `endpoint`: TransferError when there is none."""

    def load(self, request: PartRequest, on_done: Callable[[LoadResult], None]) -> int: ...

    def cancel(self, load_id: int) -> None: ...

    def when_quiet(self, load_id: int, on_quiet: Callable[[], None]) -> None: ...

    def attend(self, seconds: float) -> None: ...


class Ending(IntEnum):
    """How a load ended on one rank. The worst of any is that of all."""

    COMPLETED = 0
    FAILED = 1
    CANCELLED = 2


def agree(load_id: int, results: Sequence[LoadResult], cancelled: bool) -> LoadResult:
    """One outcome for what all ranks say: cancelled before failed before completed, all bytes, any doubt.

    results: the first is that of the load which speaks for all."""
    errors = [result.error for result in results if result.error is not None]
    ending = max(Ending.CANCELLED if cancelled else Ending.COMPLETED, Ending.FAILED if errors else Ending.COMPLETED)
    error = {Ending.COMPLETED: None, Ending.FAILED: errors[0] if errors else None, Ending.CANCELLED: "cancelled"}[
        ending
    ]
    return LoadResult(
        load_id,
        nbytes=sum(result.nbytes for result in results) if error is None else 0,
        seconds=max(result.seconds for result in results),
        copies=sum(result.copies for result in results),
        error=error,
        in_doubt=any(result.in_doubt for result in results),
        in_part=any(result.in_part for result in results),
    )


class RankedTransceiver(Transceiver, ControlTarget):
    """Owns `own`, the transceiver of rank 0. others: the worker's other ranks, in order; none in a worker of one."""

    def __init__(self, own: PythonTransceiver, others: Sequence[OtherRank]) -> None:
        self._own = own
        self._others = tuple(others)
        self._lock = threading.Lock()
        self._loads: dict[int, _RankedLoad] = {}

    @property
    def local(self) -> RankInfo:
        return replace(self._own.local, others=tuple(other.info for other in self._others))

    def connect(self, endpoint: str) -> RankInfo:
        source = self._own.connect(endpoint)
        waited: list[Future[None]] = []
        for other in self._others:
            waited += [other.connect(endpoint, index) for index in _sources_of(other.info, source)]
        for index in _sources_of(self._own.local, source):
            self._own.connect_rank(endpoint, index)
        for future in waited:
            try:
                future.result(2 * _FIRST_CONTACT_S + 4.0)
            except TimeoutError:
                raise TransferError(f"a rank of this worker made no contact with {endpoint} in time") from None
        return source

    # -- source side ------------------------------------------------------------------------------------

    def advertise(
        self, hold: BlockHold, tokens: TokenRange, tokens_digest: bytes, on_release: Callable[[], None]
    ) -> bytes:
        self._attend(_READER_S)
        return self._own.advertise(hold, tokens, tokens_digest, on_release)

    def withdraw(self, handle: bytes) -> CancelOutcome:
        self._attend(_READER_S)
        return self._own.withdraw(handle)

    def answer_handshake(self, initiator: RankInfo) -> RankInfo:
        answer = self._own.answer_handshake(initiator)
        self._attend(_FIRST_CONTACT_S)
        return replace(answer, others=tuple(other.info for other in self._others))

    def answer_heartbeat(self, incarnation: str, transfer_ids: Sequence[int]) -> list[int]:
        self._attend(_READER_S)
        return self._own.answer_heartbeat(incarnation, transfer_ids)

    def answer_cancel(self, transfer_id: int, nonce: bytes) -> CancelOutcome:
        self._attend(_READER_S)
        return self._own.answer_cancel(transfer_id, nonce)

    def answer_open_push(self, incarnation: str, grant: bytes, process: ProcessIdentity) -> bytes:
        return self._own.answer_open_push(incarnation, grant, process)

    def answer_check_push(self, transfer_id: int, nonce: bytes, *, stop: bool) -> PushReport:
        return self._own.answer_check_push(transfer_id, nonce, stop=stop)

    @property
    def push_side(self) -> PushSide | None:
        """Between workers of one rank each; with several, ranks pull side by side."""
        return None if self._others else self._own.push_side

    def _attend(self, seconds: float) -> None:
        for other in self._others:
            other.attend(seconds)

    # -- destination side -------------------------------------------------------------------------------

    def load(
        self,
        handle: bytes,
        tokens_digest: bytes,
        tables: Sequence[BlockTable],
        tokens: TokenRange,
        on_done: Callable[[LoadResult], None],
    ) -> int:
        request = PartRequest(handle, tokens_digest, tuple(tables), tokens, 0)
        load = _RankedLoad(self._own, self._others, request, on_done, self._ended)
        with self._lock:
            load_id = self._own.load_for_all(handle, tokens_digest, tables, tokens, load.lead_done, load)
            load.load_id = load_id
            self._loads[load_id] = load
        load.known.set()
        return load_id

    def cancel_load(self, load_id: int) -> CancelOutcome:
        with self._lock:
            load = self._loads.get(load_id)
        if load is not None and load.open:
            load.cancelled = True
        return self._own.cancel_load(load_id)

    def when_quiet(self, load_id: int, on_quiet: Callable[[], None]) -> None:
        with self._lock:
            load = self._loads.pop(load_id, None)
        if load is None:  # ended well, or a push, which is this rank's alone
            self._own.when_quiet(load_id, on_quiet)
        else:
            load.when_quiet(on_quiet)

    def _ended(self, load: _RankedLoad, result: LoadResult) -> None:
        """One in doubt is remembered until somebody has asked when it is quiet."""
        if not result.in_doubt:
            with self._lock:
                self._loads.pop(load.load_id, None)

    def stats(self) -> TransferStats:
        return self._own.stats()

    def close(self) -> None:
        self._own.close()


@dataclass(slots=True, eq=False)
class _Part:
    """One other load. rank: whose; None for one of rank 0's own."""

    rank: OtherRank | None
    load_id: int = -1
    result: LoadResult | None = None


@dataclass(slots=True, eq=False)
class _RankedLoad:
    """One load of all ranks (`kvferry.transceiver.sessions.Companions`). The lead is that of rank 0 from rank 0."""

    own: PythonTransceiver
    others: Sequence[OtherRank]
    request: PartRequest
    on_done: Callable[[LoadResult], None]
    ended: Callable[[_RankedLoad, LoadResult], None]
    load_id: int = -1
    known: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False
    open: bool = True
    lead: LoadResult | None = None
    parts: list[_Part] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    # -- Companions (agent thread) ------------------------------------------------------------------------

    def begin(self, load_id: int, source: RankInfo) -> None:
        if self.parts or not len(self.request.tokens):
            return  # begun before a fence made the lead start over, or nothing to move
        try:
            parts = [(None, index) for index in _sources_of(self.own.local, source) if index]
            pairs: list[tuple[OtherRank | None, int]] = [*parts]
            for other in self.others:
                pairs += [(other, index) for index in _sources_of(other.info, source)]
        except TransferError as error:
            self.own.fail_load(load_id, error.message)
            return
        with self.lock:
            self.parts = [_Part(rank) for rank, _ in pairs]
        for part, (rank, index) in zip(self.parts, pairs, strict=True):
            self._start(part, rank, replace(self.request, source_rank=index), load_id)

    def _start(self, part: _Part, rank: OtherRank | None, request: PartRequest, load_id: int) -> None:
        def done(result: LoadResult) -> None:
            self._part_done(part, result, load_id)

        try:
            if rank is not None:
                part.load_id = rank.load(request, done)
            else:
                part.load_id = self.own.load_part(
                    request.handle, request.tokens_digest, request.tables, request.tokens, request.source_rank, done
                )
        except TransferError as error:
            done(LoadResult(-1, error=error.message))
        if self.lead is not None:
            self._cancel(part)  # the lead ended meanwhile, and could not know this one

    def _cancel(self, part: _Part) -> None:
        if part.result is not None or part.load_id < 0:
            return
        if part.rank is not None:
            part.rank.cancel(part.load_id)
        else:
            self.own.cancel_load(part.load_id)

    def all_done(self) -> bool:
        with self.lock:
            return all(part.result is not None and part.result.error is None for part in self.parts)

    # -- ends (any thread) --------------------------------------------------------------------------------

    def _part_done(self, part: _Part, result: LoadResult, load_id: int) -> None:
        with self.lock:
            part.result = result
        if result.error is not None:
            self.own.fail_load(load_id, result.error)
        elif self.all_done():
            self.own.companions_done(load_id)
        self._settle()

    def lead_done(self, result: LoadResult) -> None:
        with self.lock:
            self.lead = result
            running = [part for part in self.parts if part.result is None]
        for part in running:  # only after an error: the lead ends well when all of them have
            self._cancel(part)
        self._settle()

    def _settle(self) -> None:
        """Reports once everybody has ended."""
        with self.lock:
            results = [part.result for part in self.parts]
            if not self.open or self.lead is None or any(result is None for result in results):
                return
            self.open = False
        self.known.wait()
        ended = [self.lead, *(result for result in results if result is not None)]
        outcome = agree(self.load_id, ended, self.cancelled and self.lead.error is not None)
        self.ended(self, outcome)
        self.on_done(outcome)

    def when_quiet(self, on_quiet: Callable[[], None]) -> None:
        """Once every rank's pages are at rest."""
        waiting = [part for part in self.parts if part.result is not None and part.result.in_doubt]
        left = len(waiting) + 1

        def quiet() -> None:
            nonlocal left
            with self.lock:
                left -= 1
                last = left == 0
            if last:
                on_quiet()

        for part in waiting:
            if part.rank is not None:
                part.rank.when_quiet(part.load_id, quiet)
            else:
                self.own.when_quiet(part.load_id, quiet)
        self.own.when_quiet(self.load_id, quiet)


def _sources_of(destination: RankInfo, source: RankInfo) -> list[int]:
    """The numbers of the source's ranks that `destination` pulls from. source: rank 0 of the worker."""
    ranks = source.ranks
    numbers = {rank.incarnation: number for number, rank in enumerate(ranks)}
    return [numbers[rank.incarnation] for rank in pair_sources(destination, ranks)]
