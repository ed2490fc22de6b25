"""Wire <-> dataclass for what a worker's KV cache tells: counts, statistics, events. Beside `codec`, and like it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from kvferry.core.cache_statistics import CacheStatistics, TierCounts
from kvferry.core.errors import InvalidRequestError
from kvferry.core.kv_events import BlockRemoved, BlockStored, KVEvent, KVEventBatch, Tier
from kvferry.proto import admin_pb2, worker_pb2


def statistics_to_wire(counted: CacheStatistics) -> admin_pb2.CacheStatistics:
    return admin_pb2.CacheStatistics(**dataclasses.asdict(counted))


def statistics_from_wire(wire: admin_pb2.CacheStatistics) -> CacheStatistics:
    return CacheStatistics(**{field.name: getattr(wire, field.name) for field in dataclasses.fields(CacheStatistics)})


def tier_to_wire(counts: TierCounts) -> admin_pb2.TierCounts:
    return admin_pb2.TierCounts(**dataclasses.asdict(counts))


def tier_from_wire(wire: admin_pb2.TierCounts) -> TierCounts:
    return TierCounts(wire.tier, wire.total, wire.free, wire.kept, wire.parked)


# -- KV events ------------------------------------------------------------------------------------------

EVENTS_PER_MESSAGE = 1024


def events_to_wire(batch: KVEventBatch) -> Iterator[worker_pb2.KVEventBatch]:
    """The messages of a batch; one at least, none larger than a receiver takes by default."""
    starts = range(0, max(1, len(batch.events)), EVENTS_PER_MESSAGE)
    for start in starts:
        yield worker_pb2.KVEventBatch(
            stream=batch.stream,
            after=batch.after,
            last=batch.last,
            events=[_event_to_wire(event) for event in batch.events[start : start + EVENTS_PER_MESSAGE]],
            snapshot=batch.snapshot,
            more=start != starts[-1],
        )


def _event_to_wire(event: KVEvent) -> worker_pb2.KVEvent:
    if isinstance(event, BlockStored):
        stored = worker_pb2.KVBlockStored(
            digest=event.digest, parent=event.parent, token_ids=event.token_ids, tier=event.tier.value
        )
        return worker_pb2.KVEvent(stored=stored)
    return worker_pb2.KVEvent(removed=worker_pb2.KVBlockRemoved(digest=event.digest, tier=event.tier.value))


def events_from_wire(messages: Sequence[worker_pb2.KVEventBatch]) -> KVEventBatch:
    """The batch that these messages, the last of them without `more`, are. Raises InvalidRequestError."""
    first = messages[0]
    events = tuple(_event_from_wire(event) for message in messages for event in message.events)
    return KVEventBatch(first.stream, first.after, first.last, events, first.snapshot)


def _event_from_wire(wire: worker_pb2.KVEvent) -> KVEvent:
    try:
        if wire.HasField("stored"):
            stored = wire.stored
            return BlockStored(stored.digest, stored.parent, tuple(stored.token_ids), Tier(stored.tier))
        return BlockRemoved(wire.removed.digest, Tier(wire.removed.tier))
    except ValueError as error:
        raise InvalidRequestError(f"a KV event: {error}", field="tier") from None
