from __future__ import annotations

import pytest

from kvferry.core import (
    BlockRemoved,
    BlockStored,
    CacheStatistics,
    InvalidRequestError,
    KVEventBatch,
    Tier,
    TierCounts,
    cache_codec,
)
from kvferry.proto import worker_pb2


def test_kv_events_travel_in_messages_and_make_the_batch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_codec, "EVENTS_PER_MESSAGE", 2)
    events = (
        BlockStored(b"a" * 32, b"r" * 32, (1, 2, 3), Tier.DEVICE),
        BlockStored(b"a" * 32, b"r" * 32, (1, 2, 3), Tier.DISK),
        BlockRemoved(b"a" * 32, Tier.DEVICE),
    )
    batch = KVEventBatch("life", 4, 7, events)
    messages = [worker_pb2.KVEventBatch.FromString(m.SerializeToString()) for m in cache_codec.events_to_wire(batch)]
    assert [message.more for message in messages] == [True, False]
    assert cache_codec.events_from_wire(messages) == batch
    empty = KVEventBatch("life", 0, 7, (), snapshot=True)
    assert cache_codec.events_from_wire(list(cache_codec.events_to_wire(empty))) == empty
    unknown = worker_pb2.KVEvent(removed=worker_pb2.KVBlockRemoved(digest=b"a", tier="tape"))
    with pytest.raises(InvalidRequestError, match="tape"):
        cache_codec.events_from_wire([worker_pb2.KVEventBatch(events=[unknown])])


def test_cache_statistics_and_tiers_come_back_as_they_went() -> None:
    counted = CacheStatistics(opened=1, prompt_tokens=2, reused_tokens=3, restored_tokens=4, evicted_blocks=5)
    counted.copied_ahead, counted.copied_at_once = 10, 11
    counted.refused_reservations, counted.suspensions, counted.resumptions, counted.moved_shares = 6, 7, 8, 9
    assert cache_codec.statistics_from_wire(cache_codec.statistics_to_wire(counted)) == counted
    tier = TierCounts("host", 9, 4, 3, 2)
    assert cache_codec.tier_from_wire(cache_codec.tier_to_wire(tier)) == tier
