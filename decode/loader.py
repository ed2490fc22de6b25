"""Brings advertised KV into this worker's blocks: a transceiver as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.core import BlockTable, PeerAddress, TokenRange
from kvferry.engine import LoadOutcome
from kvferry.kvcache import BlockHold
from kvferry.transceiver import LoadResult, Transceiver


class TransceiverLoader:
    """A KVLoader. `post` runs a call on the engine thread: the transceiver answers on its own. settle: called on the
    engine thread before every load; afterwards nothing that was done before may touch its pages on any rank."""

    def __init__(
        self, transceiver: Transceiver, post: Callable[[Callable[[], None]], None], settle: Callable[[], None]
    ) -> None:
        self._transceiver = transceiver
        self._post = post
        self._settle = settle

    def start(
        self,
        handle: bytes,
        tokens_digest: bytes,
        tables: tuple[BlockTable, ...],
        tokens: TokenRange,
        done: Callable[[LoadOutcome], None],
    ) -> int:
        self._settle()
        return self._transceiver.load(handle, tokens_digest, tables, tokens, self._reporting(done))

    def grant(
        self,
        writer: PeerAddress,
        tokens_digest: bytes,
        tables: tuple[BlockTable, ...],
        tokens: TokenRange,
        done: Callable[[LoadOutcome], None],
    ) -> tuple[int, bytes] | None:
        side = self._transceiver.push_side
        if side is None:
            return None
        self._settle()
        return side.grant(writer, tokens_digest, tables, tokens, self._reporting(done))

    def due(self, load_id: int) -> None:
        if self._transceiver.push_side is not None:
            self._transceiver.push_side.due(load_id)

    def _reporting(self, done: Callable[[LoadOutcome], None]) -> Callable[[LoadResult], None]:
        """`done` on the engine thread, in the scheduler's words."""

        def on_done(result: LoadResult) -> None:
            outcome = LoadOutcome(result.nbytes, result.error, result.in_doubt, result.in_part)
            self._post(lambda: done(outcome))

        return on_done

    def cancel(self, load_id: int) -> None:
        self._transceiver.cancel_load(load_id)

    def quarantine(self, load_id: int, hold: BlockHold) -> None:
        self._transceiver.when_quiet(load_id, lambda: self._post(hold.release))
