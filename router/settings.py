"""What the router is told when it starts, and where it then listens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvferry.core import ConfigError, ModelLimits


class Schedule(Enum):
    """PREFILL_FIRST: a decode worker is asked once the prompt is computed. DECODE_FIRST: one reserves room before, and
    loads what is computed while the rest is."""

    PREFILL_FIRST = "prefill_first"
    DECODE_FIRST = "decode_first"


class Flow(Enum):
    """How the KV of a request moves whose decode worker has reserved room. PULL: decode reads each part once it hears
    of it. PUSH: prefill writes each part when it is computed, where the two workers can do that, else decode pulls."""

    PULL = "pull"
    PUSH = "push"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Raises ConfigError naming the setting and its limit.

    limits: what requests are checked against. max_running: requests in the workers at once, per pool (fewer where
    the workers report smaller batches). max_queued: requests waiting for that; past it RESOURCE_EXHAUSTED.
    flow: how KV moves where decode comes first.
    worker_wait_s: how long a request waits while no worker can take it. retry_budget: how often a request is
    started again after a worker failed. request_timeout_s: the deadline of requests that bring none, and the
    longest any may have. lost_after_s: a worker is lost when it has not reported for so long.
    """

    model_name: str
    model_dir: Path
    limits: ModelLimits
    host: str = "127.0.0.1"
    grpc_port: int = 0
    http_port: int = 0
    prefill_policy: str = "least_loaded"
    decode_policy: str = "least_loaded"
    schedule: Schedule = Schedule.PREFILL_FIRST
    flow: Flow = Flow.PUSH
    max_running: int = 256
    max_queued: int = 1024
    queue_timeout_s: float = 60.0
    worker_wait_s: float = 10.0
    retry_budget: int = 2
    request_timeout_s: float = 600.0
    heartbeat_s: float = 1.0
    lost_after_s: float = 2.5

    def __post_init__(self) -> None:
        _at_least("max_running", self.max_running, 1)
        _at_least("max_queued", self.max_queued, 0)
        _at_least("retry_budget", self.retry_budget, 0)
        for name in ("grpc_port", "http_port"):
            _at_least(name, getattr(self, name), 0, 65535)
        _at_least("worker_wait_s", self.worker_wait_s, 0)
        for name in ("queue_timeout_s", "request_timeout_s", "heartbeat_s", "lost_after_s"):
            _at_least(name, getattr(self, name), 0.01)
        if self.lost_after_s <= self.heartbeat_s:
            raise ConfigError(
                f"lost_after_s is {self.lost_after_s}: it must exceed heartbeat_s ({self.heartbeat_s}), "
                "or healthy workers are taken for lost",
                field="router.lost_after_s",
            )


@dataclass(frozen=True, slots=True)
class RouterAddresses:
    """``host:port`` of each front end. Workers join the pool on the gRPC one."""

    grpc: str
    http: str


def _at_least(name: str, value: float, low: float, high: float = math.inf) -> None:
    if not low <= value <= high or not math.isfinite(value):
        limit = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise ConfigError(f"router.{name} must be {limit}, got {value}", field=f"router.{name}")
