"""A worker's KV events over real gRPC: to readers that follow, are too far behind, or missed some."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from kvferry.cluster.worker_service import WorkerService
from kvferry.core import GroupKind, KVEventReader, KVLayout, Tier, block_digests, cache_codec
from kvferry.kvcache import KVCacheManager, create_manager
from kvferry.proto import worker_pb2, worker_pb2_grpc
from kvferry.router.kv_event_client import KVEventFeed

LAYOUT = KVLayout(GroupKind.FULL, (0,), 1, 1, tokens_per_block=4)


def make_manager(capacity: int = 64, blocks: int = 8, host_blocks: int = 4) -> KVCacheManager:
    host = host_blocks * LAYOUT.slot_nbytes
    return create_manager("V2", [LAYOUT], blocks * LAYOUT.slot_nbytes, host_bytes=host, event_capacity=capacity)


def publish(manager: KVCacheManager, *tokens: int) -> None:
    """Publishes a block of four for each of `tokens`, each under a scope of its own."""
    for token in tokens:
        cache = manager.open(str(token), [token] * 4, max_reuse=0)
        cache.reserve(4)
        cache.advance(4)
        cache.commit([token] * 4)
        cache.close()


class LossyService(WorkerService):
    """Loses the message with this number, counted over all its streams, and says who asked for what."""

    def __init__(self, manager: KVCacheManager, lost: int | None = None) -> None:
        super().__init__(None, manager.events)  # type: ignore[arg-type]  # no status is asked for
        self.requests: list[worker_pb2.KVEventsRequest] = []
        self._lost = lost
        self._sent = 0

    async def KVEvents(  # type: ignore[override]  # noqa: N802 - the name of the RPC
        self, request: worker_pb2.KVEventsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.KVEventBatch]:
        self.requests.append(request)
        async for message in super().KVEvents(request, context):
            self._sent += 1
            if self._sent != self._lost:
                yield message


@asynccontextmanager
async def serving(service: WorkerService) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


@asynccontextmanager
async def following(channel: grpc.aio.Channel) -> AsyncIterator[KVEventFeed]:
    feed = KVEventFeed(channel)
    task = asyncio.create_task(feed.run())
    try:
        yield feed
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


def known(manager: KVCacheManager) -> dict[bytes, set[Tier]]:
    """What a reader must know."""
    assert manager.events is not None
    reader = KVEventReader()
    reader.apply(manager.events.read("", 0))
    return reader.tiers


async def test_a_reader_follows_what_is_stored_moved_and_removed() -> None:
    manager = make_manager()
    publish(manager, 1, 2)
    async with serving(LossyService(manager)) as channel, following(channel) as feed:
        await until(lambda: feed.reader.tiers == known(manager))
        assert len(feed.reader.tiers) == 2
        publish(manager, *range(3, 15))  # eight blocks in the pool, four below it
        await until(lambda: feed.reader.tiers == known(manager))
        assert (
            sorted(min(tiers, key=str).value for tiers in feed.reader.tiers.values()) == ["device"] * 8 + ["host"] * 4
        )
        assert feed.reader.matched_blocks(block_digests("14", [14] * 4, 4)) == 1
        assert feed.reader.matched_blocks(block_digests("1", [1] * 4, 4)) == 0
        assert feed.gaps == 0


async def test_a_reader_that_is_too_far_behind_gets_a_snapshot() -> None:
    manager = make_manager(capacity=4)
    publish(manager, 1)
    service = LossyService(manager)
    async with serving(service) as channel:
        async with following(channel) as feed:
            await until(lambda: feed.reader.last == 1)
        publish(manager, 2, 3)
        stub = worker_pb2_grpc.WorkerStub(channel)
        near = stub.KVEvents(worker_pb2.KVEventsRequest(stream=feed.reader.stream, after=1))
        first = await near.read()
        assert (first.snapshot, first.after, first.last, len(first.events)) == (False, 1, 3, 2)
        near.cancel()
        publish(manager, 4, 5, 6)
        far = stub.KVEvents(worker_pb2.KVEventsRequest(stream=feed.reader.stream, after=1))
        first = await far.read()
        assert (first.snapshot, first.last, len(first.events)) == (True, 6, 6)
        assert feed.reader.apply(cache_codec.events_from_wire([first]))
        assert feed.reader.tiers == known(manager)
        far.cancel()


async def test_a_reader_of_an_earlier_life_gets_a_snapshot() -> None:
    old, new = make_manager(), make_manager()
    publish(old, 1, 2, 3)
    publish(new, 7)
    async with serving(LossyService(old)) as channel, following(channel) as feed:
        await until(lambda: feed.reader.last == 3)
    async with serving(LossyService(new)) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        call = stub.KVEvents(worker_pb2.KVEventsRequest(stream=feed.reader.stream, after=feed.reader.last))
        message = await call.read()
        assert message.snapshot
        assert feed.reader.apply(cache_codec.events_from_wire([message]))
        assert feed.reader.tiers == known(new)
        call.cancel()


async def test_a_lost_message_is_a_gap_and_is_asked_for_again() -> None:
    manager = make_manager()
    service = LossyService(manager, lost=2)
    publish(manager, 1)
    async with serving(service) as channel, following(channel) as feed:
        await until(lambda: feed.reader.last == 1)
        publish(manager, 2)
        await asyncio.sleep(0.2)
        assert feed.reader.last == 1, "lost"
        publish(manager, 3)
        await until(lambda: feed.reader.last == 3)
        assert feed.gaps == 1
        assert feed.reader.tiers == known(manager)
        assert [(request.stream != "", request.after) for request in service.requests] == [(False, 0), (True, 1)]


async def test_a_large_snapshot_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_codec, "EVENTS_PER_MESSAGE", 3)
    manager = make_manager()
    publish(manager, *range(1, 9))
    async with serving(LossyService(manager)) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).KVEvents(worker_pb2.KVEventsRequest())
        messages = [await call.read() for _ in range(3)]
        assert [(len(message.events), message.more) for message in messages] == [(3, True), (3, True), (2, False)]
        call.cancel()
        async with following(channel) as feed:
            await until(lambda: feed.reader.tiers == known(manager))


async def test_where_no_events_are_kept_the_setting_is_named() -> None:
    manager = make_manager(capacity=0)
    async with serving(LossyService(manager)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await KVEventFeed(channel).run()
        assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "kv_cache.event_capacity" in (failed.value.details() or "")


async def test_a_stream_that_ended_no_longer_hears_of_events() -> None:
    manager = make_manager()
    async with serving(LossyService(manager)) as channel:
        async with following(channel) as feed:
            publish(manager, 1)
            await until(lambda: feed.reader.last == 1)
        await until(lambda: not manager.events._watchers)  # type: ignore[union-attr]
