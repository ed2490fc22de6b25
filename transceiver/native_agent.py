"""The agent ABI over the C++ engine. Its calls wait for the engine's thread, `load` does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from kvferry.core import MemRegion, TransferError
from kvferry.transceiver.base import Agent, CopyArray, Direction, Operation, OpState
from kvferry.transceiver.native.engine import Backend, BackendError, Engine, Task
from kvferry.transceiver.planner import GenerationReads
from kvferry.transceiver.scratch import ScratchBlock

T = TypeVar("T")

CALL_TIMEOUT_S = 10.0
_FENCE_TIMEOUT_S = 2.0
_CLOSE_TIMEOUT_S = 5.0


class NativeOperation(Operation):
    """A task of the engine. The engine lets go of it by itself. sentenced: a verdict was passed while it ran."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.sentenced = False

    def poll(self) -> OpState:
        return OpState[self.task.state.name]

    @property
    def error(self) -> str:
        return self.task.error

    def release(self) -> None:
        pass


class NativeAgent(Agent):
    """Owns an engine over `backend`. `drain_notifications` returns what the engine has received: it looks only
    when told to (`engine.expect`), or while operations are in flight."""

    def __init__(self, backend: Backend) -> None:
        self.engine = Engine(backend)

    @property
    def writes_land(self) -> bool:
        return True

    def register(self, region: MemRegion) -> None:
        if region.device != "cpu":
            message = f"the C++ engine moves host memory, not {region.device}"
            raise TransferError(message, field="transceiver.backend")
        guard(lambda: self.engine.register_memory(region.addr, region.nbytes, CALL_TIMEOUT_S))

    def deregister(self, region: MemRegion) -> None:
        guard(lambda: self.engine.deregister_memory(region.addr, region.nbytes, CALL_TIMEOUT_S))

    def metadata(self) -> bytes:
        return guard(lambda: self.engine.metadata(CALL_TIMEOUT_S))

    def load_peer(self, incarnation: str, metadata: bytes) -> None:
        guard(lambda: self.engine.load_peer(incarnation, metadata, CALL_TIMEOUT_S))

    def forget_peer(self, incarnation: str) -> None:
        guard(lambda: self.engine.forget_peer(incarnation, CALL_TIMEOUT_S))

    def submit(self, direction: Direction, peer: str, copies: CopyArray) -> Operation:
        write = direction is Direction.WRITE
        return NativeOperation(guard(lambda: self.engine.submit(write, peer, copies, CALL_TIMEOUT_S)))

    def load(
        self,
        peer: str,
        data: CopyArray,
        reads: GenerationReads,
        scratch: ScratchBlock,
        begin: bytes,
        done: bytes,
        failed: bytes,
    ) -> NativeOperation:
        """BEGIN (unless empty), the data, the generation check, DONE or FAILED: all on the engine's thread. The
        operation is DONE when the check has been made; `task.stale` says with what result."""
        generations = reads.copies(scratch.region.addr)
        expected = np.ascontiguousarray(reads.expected)
        return NativeOperation(
            self.engine.load(peer, data, generations, scratch.region.addr, expected, begin, done, failed)
        )

    def notify(self, peer: str, message: bytes) -> None:
        guard(lambda: self.engine.notify(peer, message, CALL_TIMEOUT_S))

    def drain_notifications(self) -> list[tuple[str, bytes]]:
        return guard(self.engine.take_notifications)

    def fence(self, peer: str) -> None:
        guard(lambda: self.engine.fence(peer, _FENCE_TIMEOUT_S))

    def close(self) -> None:
        if not self.engine.close(_CLOSE_TIMEOUT_S):
            raise TransferError("the transfer thread does not end: it hangs in a call of its library")


def guard(call: Callable[[], T]) -> T:
    try:
        return call()
    except BackendError as error:
        raise TransferError(str(error)) from None
