"""Prometheus metrics of one router, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvferry.resolution import worker_info_labels
from kvferry.router.facts import WorkerFacts, WorkerState
from kvferry.router.pool import WorkerPool

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_BLOCK_KINDS = ("total", "free", "cached", "pinned", "quarantined")
_CACHE_COUNTERS = {
    "prompt_tokens": ("kvferry_worker_prompt_tokens", "Prompt tokens looked up in each worker's KV cache"),
    "reused_tokens": ("kvferry_worker_prefix_hit_tokens", "Of these, found there"),
    "restored_tokens": ("kvferry_worker_restored_tokens", "Of the found ones, brought up from a tier below"),
    "loaded_tokens": ("kvferry_worker_connector_hit_tokens", "Of the found ones, loaded by an external connector"),
    "connector_failures": ("kvferry_worker_connector_failures", "Calls to the external connector that failed"),
    "evicted_blocks": ("kvferry_worker_evicted_blocks", "Cached KV blocks that made way for others"),
    "copied_ahead": ("kvferry_worker_copied_ahead_blocks", "Of these, held by the tier below already"),
    "copied_at_once": ("kvferry_worker_copied_at_once_blocks", "Of these, copied down while a step waited"),
    "refused_reservations": ("kvferry_worker_refused_reservations", "Reservations that found too few KV blocks"),
    "suspensions": ("kvferry_worker_suspensions", "Requests whose KV cache moved to a tier below"),
    "resumptions": ("kvferry_worker_resumptions", "Suspended requests that went on"),
    "moved_shares": ("kvferry_worker_moved_shares", "Pieces of memory one layer group got from another"),
}


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

    def collect(self) -> Iterator[Metric]:
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
        tiers = GaugeMetricFamily(
            "kvferry_worker_tier_blocks", "KV blocks of each worker by tier", labels=("worker", "tier", "kind")
        )
        counters = {
            field: CounterMetricFamily(name, text, labels=("worker",))
            for field, (name, text) in _CACHE_COUNTERS.items()
        }
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
            for tier, kind, number in _tier_blocks(facts):
                tiers.add_metric((facts.name, tier, kind), number)
            for field, counter in counters.items():
                counter.add_metric((facts.name,), getattr(facts.cache, field))
        yield from (info, up, blocks, legs, tiers, *counters.values())


def _tier_blocks(facts: WorkerFacts) -> Iterator[tuple[str, str, int]]:
    """(tier, kind, blocks); the three kinds of a tier add up to all it has."""
    blocks = facts.blocks
    rows = [("device", blocks.free - blocks.cached, blocks.total - blocks.free, blocks.cached)]
    rows += [(tier.tier, tier.free, tier.parked, tier.kept) for tier in facts.tiers]
    for tier_name, free, used, cached in rows:
        yield from ((tier_name, "free", free), (tier_name, "used", used), (tier_name, "cached", cached))
