"""A worker's KV events as the router hears them: a copy of what the worker's cache holds, kept up to date."""

from __future__ import annotations

import logging
from collections.abc import Callable

import grpc

from kvferry.core import KVEventReader, cache_codec
from kvferry.proto import worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)


class KVEventFeed:
    """Follows one worker. `reader` is what it holds as far as it was told; a gap in the numbers is mended by asking
    again for what comes after the last event that was understood."""

    def __init__(self, channel: grpc.aio.Channel, changed: Callable[[], None] = lambda: None) -> None:
        """changed: called after every batch that was applied."""
        self.reader = KVEventReader()
        self.gaps = 0
        self._stub = worker_pb2_grpc.WorkerStub(channel)
        self._changed = changed

    async def run(self) -> None:
        """Until cancelled. Raises grpc.aio.AioRpcError when the worker cannot be reached or keeps no events."""
        while True:
            request = worker_pb2.KVEventsRequest(stream=self.reader.stream, after=self.reader.last)
            call = self._stub.KVEvents(request)
            try:
                await self._read(call)
            finally:
                call.cancel()

    async def _read(self, call: grpc.aio.UnaryStreamCall[worker_pb2.KVEventsRequest, worker_pb2.KVEventBatch]) -> None:
        """Returns when events were missed or the worker ended the stream."""
        messages: list[worker_pb2.KVEventBatch] = []
        async for message in call:
            messages.append(message)
            if message.more:
                continue
            batch = cache_codec.events_from_wire(messages)
            messages.clear()
            if not self.reader.apply(batch):
                self.gaps += 1
                logger.warning("KV events %d to %d were missed: asking again", self.reader.last, batch.after)
                return
            self._changed()
