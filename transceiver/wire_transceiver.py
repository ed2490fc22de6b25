"""A transceiver whose KV travels in a wire format: quantised when it is advertised, restored when it has arrived.

It works on any other: that one's pools are the wire pools, so every rule of planning, checking and pinning holds as it
is. No peer and no operation touches the worker's own pages, so none of those is ever in doubt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvferry.core import BlockTable, KVFerryError, OverloadedError, RankInfo, TokenRange
from kvferry.kvcache import BlockHold
from kvferry.transceiver.base import CancelOutcome, LoadResult, Transceiver
from kvferry.transceiver.control import ControlTarget
from kvferry.transceiver.stats import TransferStats
from kvferry.transceiver.wire_pool import WirePools, WireSlots

logger = logging.getLogger(__name__)


class _WireHold(BlockHold):
    """Wire slots as what a transceiver pins. Whoever advertised them gives them back when it lets go."""

    def __init__(self, tables: tuple[BlockTable, ...]) -> None:
        self._tables = tables

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        return self._tables

    def release(self) -> None:
        raise AssertionError("wire slots are given back by the transceiver")


class WireTransceiver(Transceiver, ControlTarget):
    """Owns `inner`, which moves what is in `pools`."""

    def __init__(self, inner: Transceiver, pools: WirePools) -> None:
        assert isinstance(inner, ControlTarget)
        self._inner = inner
        self._target: ControlTarget = inner
        self._pools = pools

    @property
    def local(self) -> RankInfo:
        return self._inner.local

    def connect(self, endpoint: str) -> RankInfo:
        return self._inner.connect(endpoint)

    def advertise(
        self, hold: BlockHold, tokens: TokenRange, tokens_digest: bytes, on_release: Callable[[], None]
    ) -> bytes:
        """OverloadedError when too many hand-offs are open."""
        tables = self._pools.covering(hold.tables, tokens)
        taken = self._pools.take(tables, tokens)

        def released() -> None:
            self._pools.give(taken)
            on_release()

        try:
            self._pools.fill(taken, tables)
            return self._inner.advertise(_WireHold(self._pools.tables(taken)), tokens, tokens_digest, released)
        except KVFerryError:
            self._pools.give(taken)
            raise

    def withdraw(self, handle: bytes) -> CancelOutcome:
        return self._inner.withdraw(handle)

    def load(
        self,
        handle: bytes,
        tokens_digest: bytes,
        tables: Sequence[BlockTable],
        tokens: TokenRange,
        on_done: Callable[[LoadResult], None],
    ) -> int:
        if not len(tokens):
            return self._inner.load(handle, tokens_digest, (), tokens, on_done)
        try:
            taken = self._pools.take(tables, tokens)
        except OverloadedError as error:
            return self._decline(handle, tokens_digest, tokens, on_done, error.message)

        def loaded(result: LoadResult) -> None:
            on_done(self._restored(result, taken, tables, tokens))

        return self._inner.load(handle, tokens_digest, self._pools.tables(taken), tokens, loaded)

    def _restored(
        self, result: LoadResult, taken: WireSlots, tables: Sequence[BlockTable], tokens: TokenRange
    ) -> LoadResult:
        """As the worker sees it: its pages hold the values, or nothing has touched them."""
        if result.in_doubt:
            self._inner.when_quiet(result.transfer_id, lambda: self._pools.give(taken))
            return replace(result, in_doubt=False)
        try:
            if result.error is None:
                self._pools.empty(taken, tables, tokens)
        except Exception as error:
            logger.exception("restoring a loaded cache")
            return replace(result, error=f"restoring the loaded cache failed: {error}")
        finally:
            self._pools.give(taken)
        return result

    def _decline(
        self,
        handle: bytes,
        tokens_digest: bytes,
        tokens: TokenRange,
        on_done: Callable[[LoadResult], None],
        reason: str,
    ) -> int:
        """Moves nothing, lets the source go, and fails the load."""
        nothing = TokenRange(tokens.stop, tokens.stop)

        def told(result: LoadResult) -> None:
            on_done(replace(result, error=result.error or reason))

        return self._inner.load(handle, tokens_digest, (), nothing, told)

    def cancel_load(self, load_id: int) -> CancelOutcome:
        return self._inner.cancel_load(load_id)

    def stats(self) -> TransferStats:
        return self._inner.stats()

    def when_quiet(self, load_id: int, on_quiet: Callable[[], None]) -> None:
        self._inner.when_quiet(load_id, on_quiet)

    def close(self) -> None:
        self._inner.close()

    # -- ControlTarget --------------------------------------------------------------------------------------

    def answer_handshake(self, initiator: RankInfo) -> RankInfo:
        return self._target.answer_handshake(initiator)

    def answer_heartbeat(self, incarnation: str, transfer_ids: Sequence[int]) -> list[int]:
        return self._target.answer_heartbeat(incarnation, transfer_ids)

    def answer_cancel(self, transfer_id: int, nonce: bytes) -> CancelOutcome:
        return self._target.answer_cancel(transfer_id, nonce)
