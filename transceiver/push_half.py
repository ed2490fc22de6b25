"""Both ends of pushes, as one worker has them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from kvferry.core import BlockTable, PeerAddress, TokenRange
from kvferry.kvcache import BlockHold, KVPool
from kvferry.transceiver.base import LoadResult, PushSide
from kvferry.transceiver.grants import Grants
from kvferry.transceiver.loads import LoadTable
from kvferry.transceiver.protocol import new_nonce, new_transfer_id
from kvferry.transceiver.pushes import Pushes
from kvferry.transceiver.sessions import GrantSession, PushPart


class PushHalf(PushSide):
    """`woken`: the clock has something new to watch, the agent thread something to listen for."""

    def __init__(
        self,
        grants: Grants,
        pushes: Pushes,
        loads: LoadTable,
        pools: Sequence[KVPool],
        woken: Callable[[], None],
        transfer_timeout_s: float,
    ) -> None:
        self.grants = grants
        self.pushes = pushes
        self._loads = loads
        self._pools = tuple(pools)
        self._woken = woken
        self._transfer_timeout_s = transfer_timeout_s

    def grant(
        self,
        writer: PeerAddress,
        tokens_digest: bytes,
        tables: Sequence[BlockTable],
        tokens: TokenRange,
        on_done: Callable[[LoadResult], None],
    ) -> tuple[int, bytes]:
        session = GrantSession(
            load_id=self._loads.next_id(),
            on_done=on_done,
            deadline_s=math.inf,
            transfer_id=new_transfer_id(),
            nonce=new_nonce(),
            writer=writer,
            tables=tuple(
                BlockTable(table.block_ids, pool.generations_of(table.block_ids), table.first_block)
                for pool, table in zip(self._pools, tables, strict=True)
            ),
            tokens=tokens,
            granted_s=time.monotonic(),
        )
        data = self.grants.grant(session, tokens_digest)
        self._woken()
        return session.load_id, data

    def due(self, load_id: int) -> None:
        for session in self._loads.open_by(load_id):
            if isinstance(session, GrantSession) and session.due_s is None:
                session.due_s = time.monotonic()
                session.deadline_s = min(session.deadline_s, session.due_s + self._transfer_timeout_s)
                self._woken()

    def open_push(self, grant: bytes, tokens_digest: bytes, on_failed: Callable[[str], None]) -> tuple[int, TokenRange]:
        return self.pushes.open(grant, tokens_digest, on_failed)

    def push(self, push_id: int, hold: BlockHold, tokens: TokenRange, on_release: Callable[[], None]) -> None:
        self.pushes.push(push_id, PushPart(hold, tokens, on_release))

    def give_up_push(self, push_id: int) -> None:
        self.pushes.give_up(push_id)
