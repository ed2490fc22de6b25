"""How KV moves between workers: the agent ABI, planning, sessions, and the transceivers built on them."""

from kvferry.transceiver.base import (
    Agent,
    CancelOutcome,
    CompletedOperation,
    CopyArray,
    Direction,
    LoadResult,
    Operation,
    OpState,
    Transceiver,
)
from kvferry.transceiver.builtin import python_transceiver
from kvferry.transceiver.factory import create_transceiver, pool_memory
from kvferry.transceiver.handshake import IncompatiblePeerError
from kvferry.transceiver.implementation import Implementation, RuntimeTimes, TransceiverParts, WorkerIdentity
from kvferry.transceiver.memory import PoolMemory
from kvferry.transceiver.service import add_transceiver_service
from kvferry.transceiver.stats import FailureClass, TransferStats
from kvferry.transceiver.wire_format import WireFormat

__all__ = [
    "Agent",
    "CancelOutcome",
    "CompletedOperation",
    "CopyArray",
    "Direction",
    "FailureClass",
    "Implementation",
    "IncompatiblePeerError",
    "LoadResult",
    "OpState",
    "Operation",
    "PoolMemory",
    "RuntimeTimes",
    "Transceiver",
    "TransceiverParts",
    "TransferStats",
    "WireFormat",
    "WorkerIdentity",
    "add_transceiver_service",
    "create_transceiver",
    "pool_memory",
    "python_transceiver",
]
