"""How KV moves between workers: the agent ABI, planning, sessions, and the transceivers built on them."""

from kvferry.transceiver.base import (
    Agent,
    CancelOutcome,
    CopyArray,
    Direction,
    LoadResult,
    Operation,
    OpState,
    Transceiver,
)
from kvferry.transceiver.factory import TRANSCEIVERS, create_transceiver
from kvferry.transceiver.handshake import IncompatiblePeerError
from kvferry.transceiver.service import add_transceiver_service
from kvferry.transceiver.stats import FailureClass, TransferStats

__all__ = [
    "TRANSCEIVERS",
    "Agent",
    "CancelOutcome",
    "CopyArray",
    "Direction",
    "FailureClass",
    "IncompatiblePeerError",
    "LoadResult",
    "OpState",
    "Operation",
    "Transceiver",
    "TransferStats",
    "add_transceiver_service",
    "create_transceiver",
]
