"""A worker's KV events as they leave it: batches in order, as often as a reader can take them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from kvferry.core import KVEventBatch
from kvferry.kvcache import KVEventLog

BATCH_WAIT_S = 0.02
"""How long events are collected before they are sent."""


async def event_batches(log: KVEventLog, stream: str, after: int) -> AsyncGenerator[KVEventBatch, None]:
    """What a reader lacks who has read `stream` up to `after`, then what happens, without end. Nothing is queued for a
    slow reader: it gets what the log still has, or a snapshot. Runs on the loop."""
    loop = asyncio.get_running_loop()
    happened = asyncio.Event()
    woken = False

    def wake() -> None:
        nonlocal woken
        woken = False
        happened.set()

    def notify() -> None:
        nonlocal woken
        if not woken:  # one wake-up for however many events until it is heard
            woken = True
            loop.call_soon_threadsafe(wake)

    end = log.watch(notify)
    try:
        while True:
            happened.clear()
            batch = log.read(stream, after)
            if batch.snapshot or batch.events:
                stream, after = batch.stream, batch.last
                yield batch
            else:
                await happened.wait()
            await asyncio.sleep(BATCH_WAIT_S)
    finally:
        end()
