"""Prometheus metrics of one router, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvferry.resolution import worker_info_labels
from kvferry.router.facts import WorkerState
from kvferry.router.pool import WorkerPool

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_BLOCK_KINDS = ("total", "free", "cached", "pinned", "quarantined")


class RouterMetrics:
    """The instruments; `render` is what /metrics answers."""

    def __init__(self, pool: WorkerPool) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("kvferry_requests", "Requests by how they ended", ["state"], registry=registry)
        self.live = Gauge("kvferry_requests_live", "Requests now, by state", ["state"], registry=registry)
        self.queue_depth = Gauge("kvferry_queue_depth", "Requests waiting for a place", registry=registry)
        self.errors = Counter("kvferry_errors", "Failed requests by error code", ["code"], registry=registry)
        self.retries = Counter("kvferry_retries", "Attempts started again after a worker failed", registry=registry)
        self.decisions = Counter("kvferry_routed", "Finished requests by kind of route", ["route"], registry=registry)
        self.prompt_tokens = Counter("kvferry_prompt_tokens", "Prompt tokens of finished requests", registry=registry)
        self.cached_tokens = Counter("kvferry_cached_tokens", "Of these, found in a cache", registry=registry)
        self.output_tokens = Counter("kvferry_output_tokens", "Tokens sent to clients", registry=registry)
        self.transferred = Counter("kvferry_transferred_bytes", "KV bytes moved between workers", registry=registry)
        self.ttft = self._histogram("kvferry_ttft_seconds", "Request received until first token sent", _LATENCY_S)
        self.inter_token = self._histogram("kvferry_inter_token_seconds", "Between a stream's tokens", _INTER_TOKEN_S)
        self.queue_wait = self._histogram("kvferry_queue_wait_seconds", "Wait for a place", _LATENCY_S)
        self.duration = self._histogram("kvferry_request_seconds", "Request received until last token", _LATENCY_S)
        registry.register(_WorkerCollector(pool))

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)


class _WorkerCollector(Collector):
    """Reads the pool when scraped, so that a worker's metrics end with the worker."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[GaugeMetricFamily]:
        label_names = (
            "worker",
            "role",
            "model",
            "transceiver",
            "transceiver_source",
            "kv_manager",
            "kv_manager_source",
        )
        info = GaugeMetricFamily("kvferry_worker_info", "The pair each worker resolved to", labels=label_names)
        up = GaugeMetricFamily("kvferry_worker_up", "1: takes requests", labels=("worker", "role", "state"))
        blocks = GaugeMetricFamily("kvferry_worker_blocks", "KV blocks of each worker", labels=("worker", "kind"))
        legs = GaugeMetricFamily("kvferry_worker_requests", "Legs in each worker", labels=("worker", "state"))
        for member in self._pool.members():
            facts = member.facts
            role = facts.role.value
            up.add_metric((facts.name, role, member.state.value), float(member.state is WorkerState.READY))
            if member.state is WorkerState.LOST:
                continue
            labels = worker_info_labels(facts.name, role, facts.resolution)
            info.add_metric([labels[name] for name in label_names], 1.0)
            for kind in _BLOCK_KINDS:
                blocks.add_metric((facts.name, kind), getattr(facts.blocks, kind))
            for state, number in facts.requests.items():
                legs.add_metric((facts.name, state), number)
        yield from (info, up, blocks, legs)
