"""The scheduler of workers that generate: aggregated ones, and decode workers, whose KV may come from elsewhere."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.core import (
    BlockTable,
    DecodeLeg,
    HandOffPart,
    KVFerryError,
    PeerAddress,
    RequestCancelledError,
    TokenRange,
    TransferError,
    UnavailableError,
    WorkerRequest,
)
from kvferry.engine.runner import ModelRunner
from kvferry.engine.sampler import Sampled
from kvferry.engine.scheduler import BatchScheduler, Emit
from kvferry.engine.sequence import Sequence
from kvferry.kvcache import BlockHold, CacheLostError, KVCacheManager, OutOfBlocksError

logger = logging.getLogger(__name__)

DecodeSequence = Sequence[DecodeLeg]


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """How a load ended. in_doubt: the local pages may still be written to. in_part: a block got only what this sequence
    will look at, so it is no good for others."""

    nbytes: int = 0
    error: str | None = None
    in_doubt: bool = False
    in_part: bool = False


@dataclass(frozen=True, slots=True)
class Granted:
    """There is room for a reserved sequence. grant: what its writer needs to write to it; empty: it is to be pulled."""

    grant: bytes


class KVLoader(Protocol):
    """Brings KV computed elsewhere into local blocks. Called, and calls back, on the engine thread."""

    def start(
        self,
        handle: bytes,
        tokens_digest: bytes,
        tables: tuple[BlockTable, ...],
        tokens: TokenRange,
        done: Callable[[LoadOutcome], None],
    ) -> int:
        """Returns a load id; `done` follows exactly once, later. Raises TransferError for a handle that is void."""

    def grant(
        self,
        writer: PeerAddress,
        tokens_digest: bytes,
        tables: tuple[BlockTable, ...],
        tokens: TokenRange,
        done: Callable[[LoadOutcome], None],
    ) -> tuple[int, bytes] | None:
        """As `start`, for what `writer` will write by itself: the load id, and the grant it needs for that. None where
        KV is only pulled."""

    def due(self, load_id: int) -> None:
        """The writer has computed all that it is to write."""

    def cancel(self, load_id: int) -> None:
        """`done` still follows."""

    def quarantine(self, load_id: int, hold: BlockHold) -> None:
        """Takes pages that may still be written to, and releases them when they no longer can be."""


@dataclass(slots=True)
class _Arrival:
    """KV on its way from another worker, in one part or several. whole: no further part will come.

    load_id: of the part that is being loaded. reached: the position up to which parts have arrived. in_part: see
    `LoadOutcome`. failure: why the first one that did not failed; the sequence has no cache then.
    writer: who may write it here, if there is somebody. granted: the load that is under way is that of the writer.
    """

    sequence: DecodeSequence
    parts: deque[HandOffPart] = field(default_factory=deque)
    whole: bool = False
    load_id: int | None = None
    reached: int = 0
    nbytes: int = 0
    in_part: bool = False
    failure: str | None = None
    writer: PeerAddress | None = None
    granted: bool = False


class GenerationScheduler(BatchScheduler[DecodeLeg]):
    """Runs sequences to their end. With a loader, those added with a handle load their KV instead of computing it, and
    those that reserve load it part by part while it is computed.

    recompute: whether a sequence whose load failed computes its prompt here (else it fails). max_quarantined: the
    share of the blocks that may wait for late writers; beyond it nothing more is loaded.
    """

    def __init__(
        self,
        runner: ModelRunner,
        manager: KVCacheManager,
        emit: Emit,
        loader: KVLoader | None = None,
        recompute: bool = True,
        max_quarantined: float = 0.25,
    ) -> None:
        super().__init__(runner, manager, emit, DecodeLeg)
        self._max_quarantined = max_quarantined
        self._loader = loader
        self._recompute = recompute
        self._announced: dict[int, _Arrival] = {}
        self._loading: dict[int, _Arrival] = {}

    def add_with_handle(self, sequence: DecodeSequence, handle: bytes) -> None:
        """As `add`, for a sequence whose KV but for the last token's is advertised under `handle`."""
        part = HandOffPart(handle, len(sequence.tokens) - 1)
        self._announce(_Arrival(sequence, deque([part]), whole=True))

    def add_reserved(self, sequence: DecodeSequence, writer: PeerAddress | None = None) -> None:
        """As `add`, for a sequence whose KV another worker is about to compute: `add_part` says where it is, and
        `start`, which must follow, what the next token is. With a writer `Granted` is emitted once there is room: it
        writes all of it, or makes itself known by a part, which takes the grant back."""
        self._announce(_Arrival(sequence, writer=writer))

    def add_part(self, key: int, part: HandOffPart) -> None:
        """Unknown and ended keys are ignored."""
        arrival = self._arrival(key)
        if arrival is not None:
            self._pull(arrival, part)

    def start(self, key: int, request: WorkerRequest, handle: bytes, cached_tokens: int) -> None:
        """All that a reserved sequence lacks, but for the KV of the last token of `request`, is advertised under
        `handle` or, without one, written where it was granted. Unknown and ended keys are ignored."""
        arrival = self._arrival(key)
        if arrival is None:
            return
        sequence = arrival.sequence
        sequence.continue_with(request)
        sequence.cached_tokens = cached_tokens
        if key in self._loading:
            sequence.mark("loading")  # what came before was hidden behind the prompt's computing
        arrival.whole = True
        if handle:
            self._pull(arrival, HandOffPart(handle, len(sequence.tokens) - 1))
        elif arrival.granted and arrival.load_id is not None:
            assert self._loader is not None
            self._loader.due(arrival.load_id)
        else:
            self._load_next(arrival)

    def _pull(self, arrival: _Arrival, part: HandOffPart) -> None:
        """`part` is advertised. Its source then does not write: what it was granted is taken back first."""
        arrival.parts.append(part)
        if arrival.granted and arrival.load_id is not None:
            assert self._loader is not None
            self._loader.cancel(arrival.load_id)
        else:
            self._load_next(arrival)

    def _announce(self, arrival: _Arrival) -> None:
        if self._loader is None:
            raise TransferError("this worker has no transceiver (transceiver.backend is NONE) and got a handle")
        if self.problem:
            raise UnavailableError(self.problem, field="transceiver.max_quarantined")
        self.add(arrival.sequence)
        self._announced[arrival.sequence.key] = arrival

    def _arrival(self, key: int) -> _Arrival | None:
        arrival = self._announced.get(key) or self._loading.get(key)
        return None if arrival is None or arrival.sequence.leg.ended else arrival

    @property
    def problem(self) -> str:
        blocks = self.manager.counts()
        if blocks.quarantined <= self._max_quarantined * blocks.total:
            return ""
        return (
            f"{blocks.quarantined} of {blocks.total} blocks are in quarantine, kept from transfers that cannot be "
            f"stopped; the limit is the share transceiver.max_quarantined ({self._max_quarantined:g})"
        )

    def cancel(self, key: int) -> None:
        arrival = self._loading.get(key)
        if arrival is None:
            self._announced.pop(key, None)
            super().cancel(key)
        elif not arrival.sequence.leg.ended:
            self._end_loading(arrival, DecodeLeg.CANCELLED, RequestCancelledError("the request was cancelled"))

    def _live(self) -> Iterator[DecodeSequence]:
        yield from super()._live()
        arriving = [arrival.sequence for arrival in self._loading.values()]
        yield from [sequence for sequence in arriving if not sequence.leg.ended]

    @property
    def _admitted(self) -> int:
        return len(self._running) + len(self._loading)

    @property
    def has_work(self) -> bool:
        return super().has_work or bool(self._loading)  # a loading sequence has a deadline too

    # -- admission --------------------------------------------------------------------------------------

    def _start(self, sequence: DecodeSequence) -> bool:
        if sequence.leg.state is DecodeLeg.SUSPENDED:
            return self._resume(sequence)
        arrival = self._announced.get(sequence.key)
        if arrival is None:
            cache = self._open_cache(sequence, self._settings.min_partial_tokens)
        else:
            # What is loaded starts at a block: copying a part of one first would save little. Without its first output
            # token, all that is known of a sequence may be found here.
            in_one = arrival.whole and len(arrival.parts) == 1
            cache = self._open_cache(sequence, 0, 1 if arrival.whole else 0, loads=in_one, in_parts=not in_one)
        if cache is None:
            return False
        sequence.attach(cache)
        if arrival is not None:
            del self._announced[sequence.key]
            self._reserved(arrival)
        else:
            sequence.leg.to(DecodeLeg.PREFILLING)
            self._running.append(sequence)
        return True

    def _suspend(self, sequence: DecodeSequence) -> bool:
        if sequence.cache is None or not sequence.cache.suspend():
            return False
        sequence.leg.to(DecodeLeg.SUSPENDED)
        return True

    def _resume(self, sequence: DecodeSequence) -> bool:
        assert sequence.cache is not None
        if not self._room_to_resume(sequence):
            return False
        try:
            sequence.cache.resume(sequence.tokens)
        except OutOfBlocksError:
            return False
        except CacheLostError as error:
            logger.warning("%s", error, extra={"request_id": sequence.request.request_id})
            sequence.drop_cache()
            sequence.leg.to(DecodeLeg.QUEUED)
            return self._start(sequence)
        sequence.leg.to(DecodeLeg.PREFILLING if sequence.uncomputed > 1 else DecodeLeg.RUNNING)
        self._running.append(sequence)
        return True

    def _reserved(self, arrival: _Arrival) -> None:
        sequence = arrival.sequence
        assert sequence.cache is not None
        sequence.leg.to(DecodeLeg.RESERVED)
        if arrival.whole:
            sequence.mark("loading")
        arrival.reached = sequence.cache.history
        self._loading[sequence.key] = arrival
        if arrival.writer is not None and not arrival.parts and not arrival.whole:
            self._grant(arrival, arrival.writer)
        else:
            self._load_next(arrival)

    def _grant(self, arrival: _Arrival, writer: PeerAddress) -> None:
        """Lets the writer fill the cache, if there is something left to fill and it can."""
        assert self._loader is not None
        sequence = arrival.sequence
        stop = len(sequence.tokens)
        granted = None
        if arrival.reached < stop:
            tokens, part = TokenRange(arrival.reached, stop), HandOffPart(b"", stop)
            granted = self._loader.grant(
                writer,
                sequence.digest(stop),
                self._tables(sequence, arrival.reached),
                tokens,
                lambda outcome: self._loaded(sequence.key, part, outcome),
            )
        if granted is not None:
            sequence.leg.to(DecodeLeg.LOADING)
            arrival.load_id, arrival.granted = granted[0], True
        self._emit(sequence.key, Granted(granted[1] if granted is not None else b""))

    def _load_next(self, arrival: _Arrival) -> None:
        """Loads the next part there is, one at a time; what has failed before only tells the source to let go."""
        sequence = arrival.sequence
        if sequence.key not in self._loading or arrival.load_id is not None:
            return
        if not arrival.parts:
            if arrival.whole:
                self._arrived(arrival)
            return
        assert self._loader is not None
        part = arrival.parts.popleft()
        if sequence.leg.can(DecodeLeg.LOADING):
            sequence.leg.to(DecodeLeg.LOADING)
        start = min(part.stop, arrival.reached) if arrival.failure is None else part.stop
        arrival.load_id = -1  # should it end before it has an id
        try:
            arrival.load_id = self._loader.start(
                part.handle,
                sequence.digest(part.stop),
                self._tables(sequence, start),
                TokenRange(start, part.stop),
                lambda outcome: self._loaded(sequence.key, part, outcome),
            )
        except TransferError as error:
            self._loaded(sequence.key, part, LoadOutcome(error=str(error)))

    def _tables(self, sequence: DecodeSequence, start: int) -> tuple[BlockTable, ...]:
        """A window begins with the block to be filled first: that of position `start`, unless it lacks more."""
        cache = sequence.cache
        if cache is None:
            return ()
        tables = []
        for group, pool in enumerate(self.manager.pools):
            ids, first = tuple(cache.block_table(group)), cache.first_block(group)
            if pool.layout.window is not None and not cache.lacks_windows:
                filled = max(0, start // pool.layout.tokens_per_block - first)
                ids, first = ids[filled:], first + filled
            tables.append(BlockTable(ids, (), first))
        return tuple(tables)

    def _loaded(self, key: int, part: HandOffPart, outcome: LoadOutcome) -> None:
        """A part has come, or failed; pages that nobody waits for any more are given back."""
        arrival = self._loading[key]
        load_id, arrival.load_id = arrival.load_id, None
        taken_back = arrival.granted and bool(arrival.parts)
        arrival.granted = False
        if arrival.sequence.leg.ended:
            del self._loading[key]
            self._give_pages_back(arrival.sequence, load_id, outcome.in_doubt)
            return
        if outcome.error is None:
            arrival.nbytes += outcome.nbytes
            arrival.in_part |= outcome.in_part
            arrival.reached = max(arrival.reached, part.stop)
        elif taken_back and not outcome.in_doubt:
            logger.info("pulled, not pushed", extra={"request_id": arrival.sequence.request.request_id})
        elif arrival.failure is None:
            logger.warning(
                "KV load failed: %s", outcome.error, extra={"request_id": arrival.sequence.request.request_id}
            )
            arrival.failure = outcome.error
            self._give_pages_back(arrival.sequence, load_id, outcome.in_doubt)
            if not self._recompute:
                self._arrived(arrival)
                return
        self._load_next(arrival)

    def _arrived(self, arrival: _Arrival) -> None:
        """Nothing is left to load: run, compute here instead, or fail."""
        sequence = arrival.sequence
        del self._loading[sequence.key]
        if arrival.failure is None and arrival.reached < len(sequence.tokens) - 1:
            arrival.failure = f"only positions up to {arrival.reached} have come"
            self._give_pages_back(sequence, None, in_doubt=False)
        if arrival.failure is None:
            self._begin_decoding(arrival)
        elif self._recompute:
            sequence.leg.to(DecodeLeg.QUEUED)
            self._waiting.appendleft(sequence)
        else:
            error = TransferError(f"loading the KV cache failed: {arrival.failure}")
            self._end(sequence, DecodeLeg.FAILED, error)

    def _begin_decoding(self, arrival: _Arrival) -> None:
        sequence = arrival.sequence
        assert sequence.cache is not None
        sequence.transferred_bytes += arrival.nbytes
        if arrival.in_part:
            sequence.cache.keep_private()
        # What a window had dropped at the source did not come. An advance keeps blocks that it made stale for the
        # commit to publish; the second one lets go of them before that.
        for _ in range(2):
            sequence.cache.advance(len(sequence.tokens) - 1)
        sequence.cache.commit(sequence.tokens)
        self._take_snapshot(sequence)
        sequence.mark("loaded")
        sequence.leg.to(DecodeLeg.RUNNING)
        self._running.append(sequence)

    def _give_pages_back(self, sequence: DecodeSequence, load_id: int | None, in_doubt: bool) -> None:
        cache, sequence.cache = sequence.cache, None
        if cache is None:
            return
        self._blocked_at_free = None
        if in_doubt and self._loader is not None and load_id is not None:
            self._loader.quarantine(load_id, cache.quarantine())
        else:
            cache.close()

    # -- output -----------------------------------------------------------------------------------------

    def _accept(self, sequence: DecodeSequence, sampled: Sampled) -> None:
        if sequence.leg.state is DecodeLeg.PREFILLING:
            sequence.mark("prefilled")
            sequence.leg.to(DecodeLeg.RUNNING)
        delta = sequence.accept(sampled)
        if delta.finish_reason is not None:
            self._end(sequence, DecodeLeg.FINISHED, delta)
        else:
            self._emit(sequence.key, delta)

    def _end(self, sequence: DecodeSequence, leg: DecodeLeg, event: object) -> None:
        self._announced.pop(sequence.key, None)
        arrival = self._loading.get(sequence.key)
        if arrival is not None:
            self._end_loading(arrival, leg, event)
        else:
            super()._end(sequence, leg, event)

    def _end_loading(self, arrival: _Arrival, leg: DecodeLeg, event: KVFerryError | object) -> None:
        """Answers the client now; the pages stay with the load, if there is one, until it ends."""
        assert self._loader is not None
        sequence = arrival.sequence
        sequence.leg.to(leg)
        self._ended[leg.value] += 1
        self._emit(sequence.key, event)
        if arrival.load_id is not None:
            self._loader.cancel(arrival.load_id)
        else:
            del self._loading[sequence.key]
            self._give_pages_back(sequence, None, in_doubt=False)
