"""The MOONCAKE agent: host memory over the TCP transport of Mooncake's transfer engine, notifications over our own.

What the engine does not do is done here: local addresses are checked (the engine would write anywhere), copies are
submitted one by one and a few at a time (only such can be polled, and long queues poison the engine), and a fence
destroys the engine, which ends its connections: no byte of an abandoned read lands after that.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

from kvferry.core import ConfigError, MemRegion, TransferError
from kvferry.transceiver.base import Agent, CopyArray, Direction, Operation, OpState
from kvferry.transceiver.mailbox import Mailbox, MailLine, join_address, split_address
from kvferry.transceiver.shm import RegionTable

logger = logging.getLogger(__name__)

INSTALL_LINE = "pip install mooncake-transfer-engine-non-cuda && apt-get install --no-install-recommends libibverbs1"
_MAGIC = b"kvferry mooncake 1\n"
_IN_FLIGHT = 128
_MOVING, _MOVED = 0, 1
"""What the engine says of a transfer; anything else is a failure."""


@dataclass(slots=True, eq=False)
class _Life:
    """Holds the only reference to an engine, so that dropping it destroys the engine."""

    engine: Any


class MooncakeOperation(Operation):
    """Copies `rows`, a few at a time. Once its engine's life has ended it is NOT_SUBMITTED unless DONE."""

    def __init__(self, life: _Life, direction: Direction, segment: str, rows: list[list[int]]) -> None:
        self._life = life
        self._direction = direction
        self._segment = segment
        self._waiting = deque(rows)
        self._moving: deque[int] = deque()
        self._state = OpState.SUBMITTED
        self._error = ""

    def poll(self) -> OpState:
        if self._state is not OpState.DONE and self._life.engine is None:
            self._state = OpState.NOT_SUBMITTED
        if self._state is OpState.SUBMITTED:
            self._advance()
        return self._state

    @property
    def error(self) -> str:
        return self._error

    def release(self) -> None:
        """What is under way goes on, until a fence; the engine keeps its few bytes of book-keeping for it."""
        self._waiting.clear()

    def _advance(self) -> None:
        engine = self._life.engine
        read = self._direction is Direction.READ
        submit = engine.batch_transfer_async_read if read else engine.batch_transfer_async_write
        for _ in range(len(self._moving)):
            transfer = self._moving.popleft()
            status = engine.transfer_check_status(transfer)
            if status == _MOVING:
                self._moving.append(transfer)
            elif status != _MOVED:
                self._fail(f"Mooncake reports status {status} (the peer is gone, or its memory)")
        while self._waiting and len(self._moving) < _IN_FLIGHT:
            local, remote, nbytes = self._waiting.popleft()
            transfer = submit(self._segment, [local], [remote], [nbytes])
            if transfer in (0, -1):
                self._fail("Mooncake does not take a transfer")
            else:
                self._moving.append(transfer)
        if self._state is OpState.SUBMITTED and not self._moving:
            self._state = OpState.DONE

    def _fail(self, reason: str) -> None:
        self._state, self._error = OpState.IN_DOUBT, reason
        self._waiting.clear()


@dataclass(slots=True)
class _Peer:
    """segment: its engine's address."""

    segment: str
    regions: RegionTable
    line: MailLine


class MooncakeAgent(Agent):
    """host: the address peers reach this machine at, and where the mailbox listens. The engine listens on every one."""

    def __init__(self, incarnation: str, host: str = "127.0.0.1") -> None:
        self._incarnation = incarnation
        self._host = host
        self._regions: dict[MemRegion, None] = {}
        self._local = RegionTable()
        self._peers: dict[str, _Peer] = {}
        self._life = _Life(None)
        self._create()
        self._mailbox = Mailbox(host)

    def register(self, region: MemRegion) -> None:
        if region.device != "cpu":
            raise TransferError(f"the Mooncake agent moves host memory, not {region.device}")
        self._register(region)
        self._regions[region] = None
        self._local.add(region.addr, region.nbytes, region.addr)

    def deregister(self, region: MemRegion) -> None:
        if region not in self._regions:
            raise TransferError(f"{region} is not registered")
        del self._regions[region]
        self._local.remove(region.addr, region.nbytes)
        if self.engine.unregister_memory(region.addr) != 0:
            raise TransferError("Mooncake could not deregister memory")

    def metadata(self) -> bytes:
        described = {
            "incarnation": self._incarnation,
            "segment": join_address(self._host, self.engine.get_rpc_port()),
            "mailbox": self._mailbox.address,
            "regions": [[region.addr, region.nbytes] for region in self._regions],
        }
        return _MAGIC + json.dumps(described).encode()

    def load_peer(self, incarnation: str, metadata: bytes) -> None:
        """Bounded: the mailbox answers before the engine is asked to make contact, which may wait for ever."""
        self.forget_peer(incarnation)
        described = _decode(metadata)
        if described["incarnation"] != incarnation:
            raise TransferError(f"the agent metadata of {incarnation} describes {described['incarnation']!r}")
        regions = RegionTable()
        for addr, nbytes in described["regions"]:
            regions.add(addr, nbytes, addr)
        self._peers[incarnation] = _Peer(
            described["segment"], regions, MailLine(described["mailbox"], self._incarnation)
        )

    def forget_peer(self, incarnation: str) -> None:
        known = self._peers.pop(incarnation, None)
        if known is not None:
            known.line.close()

    def submit(self, direction: Direction, peer: str, copies: CopyArray) -> Operation:
        reached = self._reach(peer)
        self._local.translate(copies[:, 0], copies[:, 2], "here")
        reached.regions.translate(copies[:, 1], copies[:, 2], f"with {peer}")
        operation = MooncakeOperation(self._running, direction, reached.segment, copies.tolist())
        operation.poll()
        return operation

    def notify(self, peer: str, message: bytes) -> None:
        self._reach(peer).line.send(message)

    def drain_notifications(self) -> list[tuple[str, bytes]]:
        for peer in list(self._peers):
            try:
                self._peers[peer].line.flush()
            except TransferError as error:
                logger.debug("%s: %s", peer, error.message)
        return self._mailbox.drain()

    def fence(self, peer: str) -> None:
        self.forget_peer(peer)
        self._life.engine = None  # the destructor runs now: it ends all connections and threads
        self._create()
        for region in self._regions:
            self._register(region)

    def close(self) -> None:
        for incarnation in list(self._peers):
            self.forget_peer(incarnation)
        self._mailbox.close()
        self._life.engine = None
        self._regions.clear()

    def segment_of(self, peer: str) -> str:
        """What the engine knows `peer` as."""
        return self._reach(peer).segment

    @property
    def _running(self) -> _Life:
        if self._life.engine is None:
            raise TransferError("the Mooncake engine is not running")
        return self._life

    @property
    def engine(self) -> Any:
        """Mooncake's own, while it runs. Keep no reference: a fence must be able to destroy it."""
        return self._running.engine

    def _create(self) -> None:
        engine = _load_mooncake()()
        if engine.initialize(self._host, "P2PHANDSHAKE", "tcp", "") != 0:
            raise TransferError(f"Mooncake's engine does not start on {self._host}")
        self._life = _Life(engine)

    def _register(self, region: MemRegion) -> None:
        if self.engine.register_memory(region.addr, region.nbytes) != 0:
            raise TransferError(f"Mooncake could not register {region}")

    def _reach(self, peer: str) -> _Peer:
        known = self._peers.get(peer)
        if known is None:
            raise TransferError(f"peer {peer} is not known to the Mooncake agent")
        if not known.line.alive:
            self.forget_peer(peer)
            raise TransferError(f"peer {peer} is gone")
        return known


def _load_mooncake() -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise ConfigError(f"Mooncake cannot be loaded ({error}): {INSTALL_LINE}", field="transceiver.backend") from None
    return TransferEngine


def _decode(metadata: bytes) -> dict[str, Any]:
    """TransferError for anything `metadata` has not made."""
    if not metadata.startswith(_MAGIC):
        raise TransferError("agent metadata that is no Mooncake agent's")
    try:
        described = json.loads(metadata.removeprefix(_MAGIC))
        split_address(described["segment"])
        split_address(described["mailbox"])
        whole = isinstance(described["incarnation"], str) and all(
            isinstance(number, int) and 0 <= number < 1 << 64 for row in described["regions"] for number in row
        )
        whole = whole and all(len(row) == 2 for row in described["regions"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TransferError(f"agent metadata of a Mooncake agent that is damaged: {error}") from None
    if not whole:
        raise TransferError("agent metadata of a Mooncake agent that is damaged")
    return dict(described)
