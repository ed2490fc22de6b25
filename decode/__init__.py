"""The decode role: its loader and gRPC service."""

from kvferry.decode.loader import TransceiverLoader
from kvferry.decode.service import DecodeWorker

__all__ = ["DecodeWorker", "TransceiverLoader"]
