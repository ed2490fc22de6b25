"""A reader of KV events: it follows, notices gaps, and starts anew from a snapshot."""

from __future__ import annotations

from kvferry.core import BlockRemoved, BlockStored, KVEventBatch, KVEventReader, Tier

A, B = b"a" * 32, b"b" * 32


def stored(digest: bytes, tier: Tier = Tier.DEVICE) -> BlockStored:
    return BlockStored(digest, b"p" * 32, (1, 2), tier)


def test_a_reader_follows_a_stream_from_its_first_snapshot() -> None:
    reader = KVEventReader()
    assert reader.apply(KVEventBatch("life", 0, 3, (stored(A), stored(B)), snapshot=True))
    assert reader.apply(KVEventBatch("life", 3, 5, (stored(A, Tier.HOST), BlockRemoved(A, Tier.DEVICE))))
    assert reader.tiers == {A: {Tier.HOST}, B: {Tier.DEVICE}}
    assert reader.apply(KVEventBatch("life", 5, 6, (BlockRemoved(A, Tier.HOST),)))
    assert reader.tiers == {B: {Tier.DEVICE}}
    assert (reader.stream, reader.last) == ("life", 6)


def test_a_gap_or_another_life_changes_nothing_and_a_snapshot_mends_it() -> None:
    reader = KVEventReader("life", 3, {A: {Tier.DEVICE}})
    for batch in (KVEventBatch("life", 4, 5, (stored(B),)), KVEventBatch("next", 3, 4, (stored(B),))):
        assert not reader.apply(batch)
        assert (reader.stream, reader.last, reader.tiers) == ("life", 3, {A: {Tier.DEVICE}})
    assert reader.apply(KVEventBatch("next", 0, 9, (stored(B),), snapshot=True))
    assert (reader.stream, reader.last, reader.tiers) == ("next", 9, {B: {Tier.DEVICE}})


def test_only_leading_blocks_match() -> None:
    reader = KVEventReader(tiers={A: {Tier.DEVICE}, B: {Tier.HOST}})
    other = b"c" * 32
    assert [reader.matched_blocks(digests) for digests in ([], [A, B], [A, other, B], [other, A])] == [0, 2, 1, 0]
