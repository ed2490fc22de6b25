"""Continuous batching with chunked prefill: what every role's scheduler shares.

One step is: expire, admit, plan, make room, execute, accept. A sequence that is decoding is one with a single
uncomputed token, so prompts and streams share one plan. Everything here runs on the engine thread.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Generic, TypeVar

from kvferry.core import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    KVFerryError,
    OutputDelta,
    OverloadedError,
    RequestCancelledError,
)
from kvferry.engine.budget import StepBudget, plan_chunks
from kvferry.engine.rank_group import RankLostError
from kvferry.engine.runner import Chunk, ModelRunner
from kvferry.engine.sampler import Sampled
from kvferry.engine.sequence import Sequence
from kvferry.engine.snapshots import SnapshotRule
from kvferry.kvcache import KVCache, KVCacheManager, OutOfBlocksError

logger = logging.getLogger(__name__)

READ_AHEAD_S = 5.0
"""How long the prefix of a waiting sequence is read in the background; what is lacking then is read when it starts."""

COPY_WAIT_S = 0.02
"""How long a step with nothing to compute waits for a copy between the KV cache's tiers."""

L = TypeVar("L", bound=Enum)
Emit = Callable[[int, object], None]
"""(sequence key, event): an OutputDelta, a role's own result, or a KVFerryError. The last event of a key is an
error, a result, or a delta with a finish_reason."""


class BatchScheduler(ABC, Generic[L]):
    """The state of one worker's batch. `legs` is the role's state enum."""

    def __init__(self, runner: ModelRunner, manager: KVCacheManager, emit: Emit, legs: type[L]) -> None:
        self.runner = runner
        self.manager = manager
        self._emit = emit
        self._legs = legs
        self._settings = runner.settings
        self._budget = StepBudget(self._settings.step_token_budget, self._settings.max_step_ms)
        rule = SnapshotRule(self._settings.snapshot_tokens, self._settings.tokens_per_block)
        self._snapshots = rule if manager.takes_snapshots else None
        self._waiting: deque[Sequence[L]] = deque()
        self._running: list[Sequence[L]] = []  # in order of admission: the last is preempted first
        self._blocked_at_free: int | None = None
        self._reading: tuple[int, float] | None = None  # key of the sequence that is read ahead for, since when
        self._ended: Counter[str] = Counter()

    # -- entry points -----------------------------------------------------------------------------------

    def add(self, sequence: Sequence[L]) -> None:
        """Queues a sequence. Raises OverloadedError when the queue is full, InvalidRequestError when the KV pool
        could never hold it."""
        needed = sequence.prompt_len + sequence.max_tokens
        most = self.manager.max_tokens()
        if needed > most:
            raise InvalidRequestError(
                f"prompt and max_tokens need {needed} tokens of KV cache, but the pool holds {most}: "
                "lower max_tokens or raise kv_cache.bytes",
                field="max_tokens",
            )
        if len(self._waiting) >= self._settings.max_queued:
            raise OverloadedError(
                f"{len(self._waiting)} requests are queued, the limit engine.max_queued", retry_after_s=1.0
            )
        self._waiting.append(sequence)

    def cancel(self, key: int) -> None:
        """Ends a sequence now and gives its blocks back. Unknown and ended keys are ignored."""
        for sequence in self._live():
            if sequence.key == key:
                self._end(sequence, self._legs["CANCELLED"], RequestCancelledError("the request was cancelled"))
                return

    def step(self) -> bool:
        """Computes one step; False when there was nothing to compute, or to wait for."""
        self.manager.poll()
        self._expire()
        self._admit()
        chunks = self._make_chunks()
        if not chunks:
            if self.manager.poll(COPY_WAIT_S):
                return True  # what all were waiting for may be there now
            if self._settings.check_cache:
                self.manager.check_integrity()
            return False
        started = time.monotonic()
        try:
            sampled = self.runner.execute(chunks, self.manager.pools)
        except RankLostError:
            raise  # no step will succeed any more
        except Exception:
            self._fail_step(chunks)
            return True
        self._budget.observe(sum(chunk.length for chunk in chunks), time.monotonic() - started)
        for chunk, choice in zip(chunks, sampled, strict=True):
            if self._snapshots is not None and self._snapshots.due(chunk.cache.history, chunk.sequence.prompt_len):
                self._take_snapshot(chunk.sequence)
            if choice is not None:
                self._accept(chunk.sequence, choice)
            else:
                self._progressed(chunk.sequence)
        return True

    def close(self) -> None:
        """Ends every live sequence as cancelled."""
        for sequence in list(self._live()):
            self._end(sequence, self._legs["CANCELLED"], RequestCancelledError("the worker is shutting down"))

    def counts(self) -> dict[str, int]:
        """Leg state -> sequences: live ones now, ended ones since start."""
        counts = Counter(self._ended)
        counts.update(sequence.leg.state.value for sequence in self._live())
        return dict(counts)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def problem(self) -> str:
        """Why this worker should get no new work for now; empty when it should."""
        return ""

    @property
    def queued(self) -> int:
        return len(self._waiting)

    # -- what roles define ------------------------------------------------------------------------------

    @abstractmethod
    def _start(self, sequence: Sequence[L]) -> bool:
        """Admits a waiting sequence; False, with nothing changed, when there are too few free blocks."""

    @abstractmethod
    def _accept(self, sequence: Sequence[L], sampled: Sampled) -> None:
        """Takes a sampled token, emits it, and moves the sequence's leg."""

    def _progressed(self, sequence: Sequence[L]) -> None:
        """A chunk of its prompt was computed, and more is to come."""

    def _live(self) -> Iterator[Sequence[L]]:
        yield from list(self._running)
        yield from list(self._waiting)

    @property
    def _admitted(self) -> int:
        return len(self._running)

    # -- one step's parts -------------------------------------------------------------------------------

    def _expire(self) -> None:
        now = time.monotonic()
        for sequence in self._live():
            if sequence.deadline is not None and now >= sequence.deadline:
                message = f"the deadline of {sequence.request.deadline_s:.3f} s passed"
                self._end(sequence, self._legs["FAILED"], DeadlineExceededError(message, field="deadline"))

    def _admit(self) -> None:
        while self._waiting and self._admitted < self._settings.max_batch:
            # Opening a cache is not free: try again only when more blocks are free than when it last failed.
            if self._blocked_at_free is not None and self._free_nbytes() <= self._blocked_at_free:
                return
            self._blocked_at_free = None
            if self._admitted and not self._read_ahead(self._waiting[0]):
                return
            self._reading = None
            sequence = self._waiting.popleft()
            try:
                admitted = self._start(sequence)
            except KVFerryError as error:
                self._end(sequence, self._legs["FAILED"], error)
                continue
            if not admitted:
                self._waiting.appendleft(sequence)
                self._blocked_at_free = self._free_nbytes()
                return

    def _free_nbytes(self) -> int:
        """Not blocks: where layer groups share memory, how many blocks there are changes with who has it."""
        groups = zip(self.manager.group_counts(), self.manager.pools, strict=True)
        return sum(counts.free * pool.layout.slot_nbytes for counts, pool in groups)

    def _read_ahead(self, sequence: Sequence[L]) -> bool:
        """Whether what a waiting sequence needs from tiers below is there: moving it must not hold others up."""
        if sequence.cache is not None:
            # Nothing is moved before there is room for it: it would wait in memory for longer than it takes to move.
            return not self._room_to_resume(sequence) or sequence.cache.prepare_resume(sequence.tokens)
        now = time.monotonic()
        if self._reading is None or self._reading[0] != sequence.key:
            self._reading = (sequence.key, now)
        if now - self._reading[1] > READ_AHEAD_S:
            return True  # others keep pushing it out again
        # The last token is computed in any case, and where a window must begin depends on where the prefix ends.
        return self.manager.prefetch(sequence.request.scope, sequence.tokens[:-1])

    def _room_to_resume(self, sequence: Sequence[L]) -> bool:
        """Whether a suspended sequence has pages, or could have them and leave each running one a block to grow into,
        or it would be suspended again at once."""
        assert sequence.cache is not None
        room = len(sequence.tokens) + self._admitted * self._settings.tokens_per_block
        return (
            sequence.cache.resuming
            or not self._admitted
            or self.manager.can_reserve(room, ahead=self._settings.step_token_budget)
        )

    def _open_cache(
        self,
        sequence: Sequence[L],
        min_partial: int,
        uncomputed: int = 1,
        *,
        loads: bool = False,
        in_parts: bool = False,
    ) -> KVCache | None:
        """A cache with room for every token so far; None when there are too few free blocks. min_partial: see
        `KVCacheManager.open`. uncomputed: how many tokens are not to be found in it, whatever is cached. loads: whether
        the others come from elsewhere at once, so that a window needs room for what the last token looks at only.
        in_parts: whether they come bit by bit, each with what a window held then, so that it needs room for all."""
        tokens, scope = sequence.tokens, sequence.request.scope
        loaded = len(tokens) - uncomputed if loads else 0
        cache = self.manager.open(
            scope, tokens, max_reuse=len(tokens) - uncomputed, min_partial=min_partial, loads=loads
        )
        try:
            cache.reserve(len(tokens), loaded=loaded, ahead=None if in_parts else self._settings.step_token_budget)
        except OutOfBlocksError:
            cache.close()
            return None
        # Leave each running sequence a block to grow into, or the newcomer would be preempted at once.
        if self._admitted and self.manager.counts().free < self._admitted:
            cache.close()
            return None
        return cache

    def _make_chunks(self) -> list[Chunk]:
        chunks = []
        running = list(self._running)
        plan = plan_chunks(running, self._budget.tokens, self._chunk_limits(running))
        for sequence, length in zip(running, plan, strict=True):
            # One further to the front may have preempted it a moment ago.
            if length and sequence.has_pages and self._make_room(sequence, length):
                sequence.mark("started")
                chunks.append(Chunk(sequence, length))
        return chunks

    def _chunk_limits(self, running: list[Sequence[L]]) -> list[int] | None:
        """A chunk ends where a snapshot is due: behind it the state is another one."""
        rule = self._snapshots
        if rule is None:
            return None
        computed = [sequence.cache.history if sequence.cache else 0 for sequence in running]
        return [
            rule.next_due(position, sequence.prompt_len) - position
            for position, sequence in zip(computed, running, strict=True)
        ]

    def _take_snapshot(self, sequence: Sequence[L]) -> None:
        """Of the state that its history ends with, where others can find it: at the end of a block."""
        cache = sequence.cache
        if self._snapshots is not None and cache is not None and cache.committed == cache.history > 0:
            cache.snapshot()

    def _make_room(self, sequence: Sequence[L], length: int) -> bool:
        """Reserves capacity, preempting the latest admitted sequences; False when this one was preempted itself, or
        when pages will soon be free that are still being copied.

        Victims are never scheduled yet: sequences are scheduled in order of admission.
        """
        assert sequence.cache is not None
        wanted = sequence.cache.history + length
        while True:
            try:
                sequence.cache.reserve(wanted)
                return True
            except OutOfBlocksError:
                if self.manager.releasing:
                    return False
                victim = self._running[-1]
                self._preempt(victim)
                if victim is sequence:
                    return False

    def _preempt(self, sequence: Sequence[L]) -> None:
        """Gives its blocks up. With a tier below it goes on later where it was; without, it is computed again, from
        what the prefix cache still holds."""
        self._running.remove(sequence)
        suspended = self._suspend(sequence)
        logger.warning(
            "preempted at %d tokens (%s): the KV pool is full (kv_cache.bytes)",
            len(sequence.tokens),
            "suspended" if suspended else "to be computed again",
            extra={"request_id": sequence.request.request_id},
        )
        if not suspended:
            sequence.drop_cache()
            sequence.leg.to(self._legs["QUEUED"])
        # The first may have got its pages back already, and must not keep them from one that waits before it.
        first = self._waiting[0].cache if self._waiting else None
        self._waiting.insert(1 if first is not None and first.resuming else 0, sequence)

    def _suspend(self, sequence: Sequence[L]) -> bool:
        """Moves a sequence's cache out of the pools; False, with nothing changed, where that cannot be."""
        return False

    def _fail_step(self, chunks: list[Chunk]) -> None:
        """A bug in the forward pass ends the sequences of that step, not the worker."""
        ids = ", ".join(chunk.sequence.request.request_id for chunk in chunks)
        logger.exception("a step failed; its requests end with an error: %s", ids)
        for chunk in chunks:
            self._end(chunk.sequence, self._legs["FAILED"], InternalError("the forward pass failed; see the log"))

    def _end(self, sequence: Sequence[L], leg: L, event: KVFerryError | OutputDelta | object) -> None:
        """The one way out: out of every list, blocks given back, last event emitted."""
        sequence.leg.to(leg)
        self._ended[leg.value] += 1
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        sequence.drop_cache()
        self._blocked_at_free = None  # it may have had what was lacking: a state, while others went on taking blocks
        self._emit(sequence.key, event)
