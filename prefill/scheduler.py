"""The prefill role: compute a prompt and its first token, then hold the KV until decode has pulled it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvferry.core import AuxRecord, FinishReason, KVFerryError, PrefillLeg, TokenRange
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

    def _start(self, sequence: PrefillSequence) -> bool:
        cache = self._open_cache(sequence, self._settings.min_partial_tokens)
        if cache is None:
            return False
        sequence.attach(cache)
        sequence.leg.to(PrefillLeg.RUNNING)
        self._running.append(sequence)
        return True

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
        """Pins the KV of the first `computed` tokens and advertises it; the cache itself is closed.

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

        try:
            handle = self._advertiser.advertise(hold, TokenRange(0, computed), sequence.digest(computed), released)
        except KVFerryError:
            hold.release()
            raise
        self._running.remove(sequence)
        sequence.drop_cache()
        sequence.leg.to(PrefillLeg.HELD)
        self._held[sequence.key] = _HandOff(sequence, handle)
        return handle
