"""The prefill role: compute a prompt and its first token, then hold the KV until decode has pulled it.

In parts, what a step has computed is advertised at once, so that decode pulls it while the next one is computed; or,
where decode has granted room, written there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvferry.core import AuxRecord, FinishReason, HandOffPart, KVFerryError, PrefillLeg, TokenRange, TransferError
from kvferry.engine import BatchScheduler, Emit, ModelRunner, Sampled, Sequence
from kvferry.kvcache import BlockHold, KVCacheManager

logger = logging.getLogger(__name__)

PrefillSequence = Sequence[PrefillLeg]


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """handle is empty when the request ended at its first token, and when the KV is pushed."""

    aux: AuxRecord
    text: str
    finish_reason: FinishReason | None
    handle: bytes
    pushed: bool = False


class Advertiser(Protocol):
    """The source side of a transceiver. `released` is called exactly once, on the engine thread, after this step."""

    def advertise(
        self, hold: BlockHold, tokens: TokenRange, tokens_digest: bytes, released: Callable[[], None]
    ) -> bytes: ...

    def withdraw(self, handle: bytes) -> object:
        """Gives an advertised hand-off up; `released` follows unless it has been called before."""

    def open_push(
        self, grant: bytes, tokens_digest: bytes, failed: Callable[[str], None]
    ) -> tuple[int, TokenRange] | None:
        """A push to where decode granted room, and the positions it takes; None when it must pull. `failed`, as
        `released`, is called on the engine thread, and says that not all will be written."""

    def push(self, push_id: int, hold: BlockHold, tokens: TokenRange, released: Callable[[], None]) -> None:
        """The next part. Of one that has failed or was given up it is released."""

    def give_up_push(self, push_id: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _HandOff:
    sequence: PrefillSequence
    give_up: Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Push:
    push_id: int
    tokens: TokenRange


class PrefillScheduler(BatchScheduler[PrefillLeg]):
    """Held sequences have been answered: they end by release, with their lease, or when their answer got lost; not
    by cancel or deadline."""

    def __init__(self, runner: ModelRunner, manager: KVCacheManager, emit: Emit, advertiser: Advertiser) -> None:
        super().__init__(runner, manager, emit, PrefillLeg)
        self._advertiser = advertiser
        self._held: dict[int, _HandOff] = {}
        self._part_stops: dict[int, int] = {}
        self._open_parts: dict[bytes, PrefillSequence] = {}
        self._pushes: dict[int, _Push] = {}
        layouts = [pool.layout for pool in manager.pools]
        # A part ends with a block, so that it is few copies. Behind the end of a step a window may have been dropped
        # that a reader of the position before it looks back to: such models' parts end where the step did.
        windowed = any(layout.window is not None for layout in layouts)
        self._part_tokens = 1 if windowed else max(layout.tokens_per_block for layout in layouts)
        # A state is overwritten by the next step.
        self._has_parts = not any(layout.kind.is_state for layout in layouts)

    def add_in_parts(self, sequence: PrefillSequence, grant: bytes = b"") -> None:
        """As `add`; emits a HandOffPart for each stretch of the prompt that is computed before the last step, or writes
        it to where `grant` says. Models with states have no parts: their prompt is handed off whole."""
        self.add(sequence)
        self._part_stops[sequence.key] = 0
        if grant:
            self._open_push(sequence, grant)

    def _open_push(self, sequence: PrefillSequence, grant: bytes) -> None:
        def failed(reason: str) -> None:
            logger.warning("KV is not pushed: %s", reason, extra={"request_id": sequence.request.request_id})
            if self._pushes.pop(sequence.key, None) is not None and sequence.key in self._part_stops:
                self._part_stops[sequence.key] = 0  # decode pulls, or computes, what it lacks

        try:
            opened = self._advertiser.open_push(grant, sequence.digest(len(sequence.tokens)), failed)
        except TransferError as error:
            failed(error.message)
            return
        if opened is not None:
            self._pushes[sequence.key] = _Push(*opened)

    def counts(self) -> dict[str, int]:
        counts = super().counts()
        counts["held"] = len(self._held)
        return counts

    def abandon(self, request_id: str) -> None:
        """Ends what there is of a request whose answer nobody has got: cancelled if live, withdrawn if held."""
        for sequence in self._live():
            if sequence.request.request_id == request_id:
                self.cancel(sequence.key)
        for held in list(self._held.values()):
            if held.sequence.request.request_id == request_id:
                held.give_up()
        for handle, sequence in list(self._open_parts.items()):
            if sequence.request.request_id == request_id:
                self._advertiser.withdraw(handle)

    def _start(self, sequence: PrefillSequence) -> bool:
        cache = self._open_cache(sequence, self._settings.min_partial_tokens)
        if cache is None:
            return False
        sequence.attach(cache)
        sequence.leg.to(PrefillLeg.RUNNING)
        self._running.append(sequence)
        return True

    def _progressed(self, sequence: PrefillSequence) -> None:
        start = self._part_stops.get(sequence.key)
        if start is None or not self._has_parts:
            return
        assert sequence.cache is not None
        stop = sequence.cache.history // self._part_tokens * self._part_tokens
        if stop <= start:
            return
        push = self._pushes.get(sequence.key)
        if push is not None:
            self._push_part(sequence, push, TokenRange(start, stop))
            self._part_stops[sequence.key] = stop
            return
        try:
            handle = self._advertise_part(sequence, TokenRange(start, stop))
        except KVFerryError as error:
            self._end(sequence, PrefillLeg.FAILED, error)
            return
        self._part_stops[sequence.key] = stop
        self._emit(sequence.key, HandOffPart(handle, stop))

    def _push_part(self, sequence: PrefillSequence, push: _Push, tokens: TokenRange) -> None:
        """Writes what decode wants of `tokens`."""
        assert sequence.cache is not None
        if tokens.stop <= push.tokens.start:
            return
        wanted = TokenRange(max(tokens.start, push.tokens.start), tokens.stop)
        hold = sequence.cache.pin()

        def released() -> None:
            hold.release()
            self._blocked_at_free = None

        self._advertiser.push(push.push_id, hold, wanted, released)

    def _advertise_part(self, sequence: PrefillSequence, tokens: TokenRange) -> bytes:
        assert sequence.cache is not None
        hold = sequence.cache.pin()

        def released() -> None:
            hold.release()
            self._blocked_at_free = None
            del self._open_parts[handle]

        try:
            handle = self._advertiser.advertise(hold, tokens, sequence.digest(tokens.stop), released)
        except KVFerryError:
            hold.release()
            raise
        self._open_parts[handle] = sequence
        return handle

    def _end(self, sequence: PrefillSequence, leg: PrefillLeg, event: object) -> None:
        self._part_stops.pop(sequence.key, None)
        push = self._pushes.pop(sequence.key, None)
        if push is not None:
            self._advertiser.give_up_push(push.push_id)
        for handle, owner in list(self._open_parts.items()):
            if owner is sequence:
                self._advertiser.withdraw(handle)
        super()._end(sequence, leg, event)

    def _accept(self, sequence: PrefillSequence, sampled: Sampled) -> None:
        sequence.mark("prefilled")
        computed = len(sequence.tokens)
        delta = sequence.accept(sampled)
        aux = AuxRecord(sampled.token_id, sampled.logprob, sequence.usage(), sequence.timings())
        if delta.finish_reason is not None:
            result = PrefillResult(aux, delta.text, delta.finish_reason, b"")
            self._end(sequence, PrefillLeg.RELEASED, result)
            return
        pushed = sequence.key in self._pushes
        try:
            handle = self._hold(sequence, computed)
        except KVFerryError as error:
            self._end(sequence, PrefillLeg.FAILED, error)
            return
        self._emit(sequence.key, PrefillResult(aux, delta.text, None, handle, pushed))

    def _hold(self, sequence: PrefillSequence, computed: int) -> bytes:
        """Pins the KV of the first `computed` tokens and advertises what no part covers, or writes it (no handle then);
        the cache itself is closed.

        Raises what the transceiver raises, with nothing pinned.
        """
        assert sequence.cache is not None
        hold = sequence.cache.pin()

        def released() -> None:
            hold.release()
            self._blocked_at_free = None
            del self._held[sequence.key]
            sequence.leg.to(PrefillLeg.RELEASED)
            self._ended[PrefillLeg.RELEASED.value] += 1

        tokens = TokenRange(self._part_stops.pop(sequence.key, 0), computed)
        push = self._pushes.pop(sequence.key, None)
        handle = b""
        if push is None:
            try:
                handle = self._advertiser.advertise(hold, tokens, sequence.digest(computed), released)
            except KVFerryError:
                hold.release()
                raise
        self._running.remove(sequence)
        sequence.drop_cache()
        sequence.leg.to(PrefillLeg.HELD)
        if push is None:
            self._held[sequence.key] = _HandOff(sequence, partial(self._advertiser.withdraw, handle))
        else:
            self._held[sequence.key] = _HandOff(sequence, partial(self._advertiser.give_up_push, push.push_id))
            wanted = TokenRange(max(tokens.start, push.tokens.start), computed)
            self._advertiser.push(push.push_id, hold, wanted, released)
        return handle
