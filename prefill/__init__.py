"""The prefill role: its scheduler and gRPC service."""

from kvferry.prefill.scheduler import PrefillResult, PrefillScheduler
from kvferry.prefill.service import PrefillWorker

__all__ = ["PrefillResult", "PrefillScheduler", "PrefillWorker"]
