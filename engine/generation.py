"""The scheduler of workers that generate: aggregated ones, and decode workers, whose KV may come from elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvferry.core import (
    BlockTable,
    DecodeLeg,
    KVFerryError,
    RequestCancelledError,
    TokenRange,
    TransferError,
    UnavailableError,
)
from kvferry.engine.runner import ModelRunner
from kvferry.engine.sampler import Sampled
from kvferry.engine.scheduler import BatchScheduler, Emit
from kvferry.engine.sequence import Sequence
from kvferry.kvcache import BlockHold, KVCacheManager, OutOfBlocksError

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

    def cancel(self, load_id: int) -> None:
        """`done` still follows."""

    def quarantine(self, load_id: int, hold: BlockHold) -> None:
        """Takes pages that may still be written to, and releases them when they no longer can be."""


@dataclass(slots=True)
class _Load:
    sequence: DecodeSequence
    load_id: int
    handle: bytes


class GenerationScheduler(BatchScheduler[DecodeLeg]):
    """Runs sequences to their end. With a loader, those added with a handle load their KV instead of computing it.

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
        self._handles: dict[int, bytes] = {}
        self._loading: dict[int, _Load] = {}

    def add_with_handle(self, sequence: DecodeSequence, handle: bytes) -> None:
        """As `add`, for a sequence whose KV but for the last token's is advertised under `handle`."""
        if self._loader is None:
            raise TransferError("this worker has no transceiver (transceiver.backend is NONE) and got a handle")
        if self.problem:
            raise UnavailableError(self.problem, field="transceiver.max_quarantined")
        self.add(sequence)
        self._handles[sequence.key] = handle

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
        load = self._loading.get(key)
        if load is None:
            self._handles.pop(key, None)
            super().cancel(key)
        elif not load.sequence.leg.ended:
            # The pages are being written: they are given back in `_loaded`.
            self._end_loading(load, DecodeLeg.CANCELLED, RequestCancelledError("the request was cancelled"))

    def _live(self) -> Iterator[DecodeSequence]:
        yield from super()._live()
        yield from [load.sequence for load in self._loading.values() if not load.sequence.leg.ended]

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
        # What is loaded starts at a block: copying a part of one first would save little.
        loads = sequence.key in self._handles
        cache = self._open_cache(sequence, 0 if loads else self._settings.min_partial_tokens)
        if cache is None:
            return False
        sequence.attach(cache)
        handle = self._handles.pop(sequence.key, None)
        if handle is not None:
            self._load(sequence, handle)
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
        # As for a newcomer: a block for each running sequence to grow into, or it would be suspended again at once.
        room = len(sequence.tokens) + self._admitted * self.runner.settings.tokens_per_block
        if self._admitted and not self.manager.can_reserve(room):
            return False
        try:
            sequence.cache.resume(sequence.tokens)
        except OutOfBlocksError:
            return False
        sequence.leg.to(DecodeLeg.PREFILLING if sequence.uncomputed > 1 else DecodeLeg.RUNNING)
        self._running.append(sequence)
        return True

    def _load(self, sequence: DecodeSequence, handle: bytes) -> None:
        cache, loader = sequence.cache, self._loader
        assert cache is not None
        assert loader is not None
        sequence.leg.to(DecodeLeg.RESERVED)
        sequence.mark("loading")
        target = len(sequence.tokens) - 1
        tables = tuple(
            BlockTable(tuple(cache.block_table(group)), (), cache.first_block(group))
            for group in range(len(self.manager.pools))
        )
        load = _Load(sequence, -1, handle)
        self._loading[sequence.key] = load
        sequence.leg.to(DecodeLeg.LOADING)
        try:
            load.load_id = loader.start(
                handle,
                sequence.digest(target),
                tables,
                TokenRange(cache.history, target),
                lambda outcome: self._loaded(sequence.key, outcome),
            )
        except TransferError as error:
            self._loaded(sequence.key, LoadOutcome(error=str(error)))

    def _loaded(self, key: int, outcome: LoadOutcome) -> None:
        """A load ended: run, compute here instead, or only give the pages back."""
        load = self._loading.pop(key)
        sequence = load.sequence
        if outcome.error is None and not sequence.leg.ended:
            self._begin_decoding(sequence, outcome)
            return
        self._give_pages_back(load, outcome.in_doubt)
        self._blocked_at_free = None
        if sequence.leg.ended:
            return
        logger.warning("KV load failed: %s", outcome.error, extra={"request_id": sequence.request.request_id})
        if self._recompute:
            sequence.leg.to(DecodeLeg.QUEUED)
            self._waiting.appendleft(sequence)
        else:
            error = TransferError(f"loading the KV cache failed: {outcome.error}")
            self._end(sequence, DecodeLeg.FAILED, error)

    def _begin_decoding(self, sequence: DecodeSequence, outcome: LoadOutcome) -> None:
        assert sequence.cache is not None
        sequence.transferred_bytes += outcome.nbytes
        if outcome.in_part:
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

    def _give_pages_back(self, load: _Load, in_doubt: bool) -> None:
        cache = load.sequence.cache
        assert cache is not None
        load.sequence.cache = None
        if in_doubt and self._loader is not None:
            self._loader.quarantine(load.load_id, cache.quarantine())
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
        self._handles.pop(sequence.key, None)
        load = self._loading.get(sequence.key)
        if load is not None:
            self._end_loading(load, leg, event)
        else:
            super()._end(sequence, leg, event)

    def _end_loading(self, load: _Load, leg: DecodeLeg, event: KVFerryError | object) -> None:
        """Answers the client now; the pages stay with the load until it ends."""
        assert self._loader is not None
        load.sequence.leg.to(leg)
        self._ended[leg.value] += 1
        self._emit(load.sequence.key, event)
        self._loader.cancel(load.load_id)
