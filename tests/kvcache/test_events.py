"""What managers tell about their blocks: enough to know, elsewhere, what a request would find."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvferry.core import (
    BlockRemoved,
    BlockStored,
    GroupKind,
    KVEventReader,
    KVLayout,
    Tier,
    block_digests,
    scope_digest,
)
from kvferry.kvcache import KVCache, KVCacheManager, KVEventLog, OutOfBlocksError, create_manager

SIZE = 4
FULL = KVLayout(GroupKind.FULL, (0,), 1, 1, tokens_per_block=SIZE)
WINDOW = KVLayout(GroupKind.WINDOW, (1,), 1, 1, tokens_per_block=SIZE, window=6)
IMPLEMENTATIONS = (("V1", "python"), ("V2", "cpp"), ("V2", "python"))
Serve = Callable[..., KVCache]


def make(
    version: str, core: str, blocks: int, host: int = 0, layouts: tuple[KVLayout, ...] = (FULL,)
) -> KVCacheManager:
    row_nbytes = sum(layout.slot_nbytes for layout in layouts)
    return create_manager(
        version, layouts, blocks * row_nbytes, core=core, host_bytes=host * row_nbytes, event_capacity=16
    )


def log_of(manager: KVCacheManager) -> KVEventLog:
    assert manager.events is not None
    return manager.events


def follow(reader: KVEventReader, manager: KVCacheManager) -> bool:
    """Catches up; whether that took a snapshot."""
    batch = log_of(manager).read(reader.stream, reader.last)
    assert reader.apply(batch)
    return batch.snapshot


def test_a_block_is_announced_with_parent_tokens_and_tier(version: str, core: str, serve: Serve) -> None:
    manager = make(version, core, 8)
    tokens = [*range(10)]
    first, second = block_digests("salt", tokens, SIZE)
    start = log_of(manager).read("", 0)
    cache = serve(manager, tokens, scope="salt")
    batch = log_of(manager).read(start.stream, start.last)
    assert batch.events == (
        BlockStored(first, scope_digest("salt"), (0, 1, 2, 3), Tier.DEVICE),
        BlockStored(second, first, (4, 5, 6, 7), Tier.DEVICE),
    )
    assert (batch.after, batch.last, batch.snapshot) == (0, 2, False)
    cache.close()
    serve(manager, tokens, scope="salt").close()
    assert log_of(manager).read(start.stream, 2).events == (), "nothing new was stored"
    manager.clear_reuse()
    assert set(log_of(manager).read(start.stream, 2).events) == {
        BlockRemoved(first, Tier.DEVICE),
        BlockRemoved(second, Tier.DEVICE),
    }


def test_only_what_is_new_behind_a_common_prefix_is_announced(version: str, core: str, serve: Serve) -> None:
    manager = make(version, core, 16)
    serve(manager, [1] * 8)
    before = log_of(manager).read("", 0)
    serve(manager, [1] * 8 + [2] * 8, reuse=0)
    new = log_of(manager).read(before.stream, before.last).events
    assert [event.token_ids for event in new if isinstance(event, BlockStored)] == [(2,) * 4, (2,) * 4]


def test_who_is_too_far_behind_or_knows_another_life_gets_a_snapshot(version: str, core: str, serve: Serve) -> None:
    manager = make(version, core, 32)
    stream = log_of(manager).read("", 0).stream
    serve(manager, [*range(16 * SIZE)])
    assert not log_of(manager).read(stream, 0).snapshot, "16 events are kept"
    serve(manager, [7] * SIZE)
    for known, after in ((stream, 0), ("another", 17), (stream, 18), (stream, -1)):
        batch = log_of(manager).read(known, after)
        assert (batch.snapshot, batch.last, len(batch.events)) == (True, 17, 17)
    assert len(log_of(manager).read(stream, 1).events) == 16


def test_blocks_pushed_out_are_announced_below_before_they_are_gone_above(serve: Serve) -> None:
    manager = make("V2", "cpp", 4, host=4)
    serve(manager, [1] * 16).close()
    before = log_of(manager).read("", 0)
    serve(manager, [2] * SIZE).close()
    (deepest,) = block_digests("", [1] * 16, SIZE)[3:]
    (new,) = block_digests("", [2] * SIZE, SIZE)
    assert log_of(manager).read(before.stream, before.last).events == (
        BlockStored(deepest, block_digests("", [1] * 16, SIZE)[2], (1,) * 4, Tier.HOST),
        BlockRemoved(deepest, Tier.DEVICE),
        BlockStored(new, scope_digest(""), (2,) * 4, Tier.DEVICE),
    )


def random_history(rng: random.Random, managers: list[KVCacheManager], check: Callable[[], None]) -> None:
    live: list[list[KVCache]] = []
    for step in range(300):
        if live and (len(live) > 3 or rng.random() < 0.4):
            for cache in live.pop(rng.randrange(len(live))):
                cache.close()
        elif step % 60 == 59:
            for manager in managers:
                manager.clear_reuse()
        else:
            tokens = [rng.randrange(3)] * rng.randrange(0, 30) + [
                rng.randrange(50) for _ in range(rng.randrange(1, 12))
            ]
            caches = [manager.open("", tokens, max_reuse=len(tokens)) for manager in managers]
            served = []
            for cache in caches:
                try:
                    cache.reserve(len(tokens))
                except OutOfBlocksError:
                    cache.close()
                    continue
                cache.advance(len(tokens))
                cache.commit(tokens)
                served.append(cache)
            if served:
                live.append(served)
        check()


@pytest.mark.parametrize("seed", range(3))
def test_a_reader_knows_what_every_manager_would_find(seed: int) -> None:
    """All implementations side by side: a reader who looks in now and then predicts each one's `match` exactly."""
    rng = random.Random(seed)
    managers = [make(version, core, 14, host=6) for version, core in IMPLEMENTATIONS]
    readers = [KVEventReader() for _ in managers]
    prompts = [[n] * 32 for n in range(3)]
    snapshots = 0

    def check() -> None:
        nonlocal snapshots
        if rng.random() < 0.5:
            return
        for manager, reader in zip(managers, readers, strict=True):
            snapshots += follow(reader, manager)
            for prompt in prompts:
                matched = reader.matched_blocks(block_digests("", prompt, SIZE))
                assert matched * SIZE == manager.match("", prompt)
            manager.check_integrity()
        assert readers[1].tiers == readers[2].tiers, "the two cores say the same"

    random_history(rng, managers, check)
    assert 3 < snapshots < 300


def test_both_cores_tell_the_same_events_in_the_same_order() -> None:
    managers = [make("V2", core, 14, host=5, layouts=(FULL, WINDOW)) for core in ("cpp", "python")]
    streams = [log_of(manager).read("", 0).stream for manager in managers]
    read = 0

    def check() -> None:
        nonlocal read
        after = max(0, log_of(managers[0]).read("", 0).last - 16)
        batches = [log_of(m).read(stream, max(read, after)) for m, stream in zip(managers, streams, strict=True)]
        assert batches[0].events == batches[1].events
        read = batches[0].last

    random_history(random.Random(0), managers, check)
    assert read > 200


def test_v1_and_v2_hash_alike(serve: Serve) -> None:
    held = []
    for version, core in IMPLEMENTATIONS:
        manager = make(version, core, 64)
        serve(manager, [*range(30)], scope="adapter")
        serve(manager, [*range(17), 99, 98, 97, 96])
        held.append(log_of(manager).held(Tier.DEVICE))
    assert held[0] == held[1] == held[2]
    assert len(held[0]) == 7 + 5


def test_no_events_are_kept_unless_asked_for(version: str, core: str) -> None:
    assert create_manager(version, [FULL], 8 * FULL.slot_nbytes, core=core).events is None
