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
    PushSide,
    Transceiver,
)
from kvferry.transceiver.builtin import python_transceiver
from kvferry.transceiver.factory import RANKS_NEED_PYTHON, create_transceiver, pool_memory, serve_ranks
from kvferry.transceiver.handshake import IncompatiblePeerError
from kvferry.transceiver.implementation import (
    Implementation,
    RankPlace,
    RuntimeTimes,
    TransceiverParts,
    WorkerIdentity,
)
from kvferry.transceiver.memory import PoolMemory
from kvferry.transceiver.python_runtime import PythonTransceiver
from kvferry.transceiver.ranked import OtherRank, PartRequest, RankedTransceiver
from kvferry.transceiver.service import add_transceiver_service
from kvferry.transceiver.stats import FailureClass, TransferStats
from kvferry.transceiver.wire_format import WireFormat

__all__ = [
    "RANKS_NEED_PYTHON",
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
    "OtherRank",
    "PartRequest",
    "PoolMemory",
    "PushSide",
    "PythonTransceiver",
    "RankPlace",
    "RankedTransceiver",
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
    "serve_ranks",
]
