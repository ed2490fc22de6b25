"""The prefill role: compute a prompt and its first token, then hold the KV until decode has pulled it.

In parts, what a step has computed is advertised at once, so that decode pulls it while the next one is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvferry.core import AuxRecord, FinishReason, HandOffPart, KVFerryError, PrefillLeg, TokenRange
from kvferry.engine import BatchScheduler, Emit, ModelRunner, Sampled, Sequence
from kvferry.kvcache import BlockHold, KVCacheManager

PrefillSequence = Sequence[PrefillLeg]


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """handle is empty when the request ended at its first token."""

    aux: AuxRecord
    text: str
    finish_reason: FinishReason | None
    handle: bytes


class Advertiser(Protocol):
    """The source side of a transceiver. `released` is called exactly once, on the engine thread, after this step."""

    def advertise(
        self, hold: BlockHold, tokens: TokenRange, tokens_digest: bytes, released: Callable[[], None]
    ) -> bytes: ...

    def withdraw(self, handle: bytes) -> object:
        """Gives an advertised hand-off up; `released` follows unless it has been called before."""


@dataclass(frozen=True, slots=True)
class _HandOff:
    sequence: PrefillSequence
    handle: bytes


class PrefillScheduler(BatchScheduler[PrefillLeg]):
    """Held sequences have been answered: they end by release, with their lease, or when their answer got lost; not
    by cancel or deadline."""

    def __init__(self, runner: ModelRunner, manager: KVCacheManager, emit: Emit, advertiser: Advertiser) -> None:
        super().__init__(runner, manager, emit, PrefillLeg)
        self._advertiser = advertiser
        self._held: dict[int, _HandOff] = {}
        self._part_stops: dict[int, int] = {}
        self._open_parts: dict[bytes, PrefillSequence] = {}
        layouts = [pool.layout for pool in manager.pools]
        # A part ends with a block, so that it is few copies. Behind the end of a step a window may have been dropped
        # that a reader of the position before it looks back to: such models' parts end where the step did.
        windowed = any(layout.window is not None for layout in layouts)
        self._part_tokens = 1 if windowed else max(layout.tokens_per_block for layout in layouts)
        # A state is overwritten by the next step.
        self._has_parts = not any(layout.kind.is_state for layout in layouts)

    def add_in_parts(self, sequence: PrefillSequence) -> None:
        """As `add`; emits a HandOffPart for each stretch of the prompt that is computed before the last step. Models
        with states have none: their prompt is handed off whole."""
        self.add(sequence)
        self._part_stops[sequence.key] = 0

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
                self._advertiser.withdraw(held.handle)
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
        try:
            handle = self._advertise_part(sequence, TokenRange(start, stop))
        except KVFerryError as error:
            self._end(sequence, PrefillLeg.FAILED, error)
            return
        self._part_stops[sequence.key] = stop
        self._emit(sequence.key, HandOffPart(handle, stop))

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
        try:
            handle = self._hold(sequence, computed)
        except KVFerryError as error:
            self._end(sequence, PrefillLeg.FAILED, error)
            return
        self._emit(sequence.key, PrefillResult(aux, delta.text, None, handle))

    def _hold(self, sequence: PrefillSequence, computed: int) -> bytes:
        """Pins the KV of the first `computed` tokens and advertises what no part covers; the cache itself is closed.

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
        try:
            handle = self._advertiser.advertise(hold, tokens, sequence.digest(computed), released)
        except KVFerryError:
            hold.release()
            raise
        self._running.remove(sequence)
        sequence.drop_cache()
        sequence.leg.to(PrefillLeg.HELD)
        self._held[sequence.key] = _HandOff(sequence, handle)
        return handle
