from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvferry.core import ErrorCode, codec

GARBAGE = b"\xff" * 9


async def garbage() -> AsyncIterator[bytes]:
    yield GARBAGE


async def sent(channel: grpc.aio.Channel, path: str) -> None:
    """One call whose request is garbage, of the kind the method is."""
    if path.endswith("Join"):
        await drained(channel.stream_stream(path)(garbage(), timeout=5))
    elif path.endswith("Stream"):
        await drained(channel.unary_stream(path)(GARBAGE, timeout=5))
    else:
        await channel.unary_unary(path)(GARBAGE, timeout=5)


async def drained(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize(
    "method",
    ["Generation/Generate", "Generation/GenerateStream", "Generation/Tokenize", "Admin/Status", "Pool/Join"],
)
async def test_a_request_that_is_no_message_is_the_clients_fault_with_a_detail(cluster: Any, method: str) -> None:
    path = f"/kvferry.v1.{method}"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await sent(cluster.channel, path)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = codec.error_from_wire(dict(caught.value.trailing_metadata())[codec.ERROR_METADATA_KEY])
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, "request")
    assert path in error.message
    await cluster.add("aggregated-0")  # the router goes on


async def test_a_worker_that_turns_to_garbage_is_told_so_and_lost(cluster: Any) -> None:
    worker = await cluster.add("aggregated-0")
    await worker.stop()
    await cluster.until(lambda status: status["aggregated-0"] == "lost")

    async def reports() -> AsyncIterator[bytes]:
        yield worker.report().SerializeToString()
        yield GARBAGE

    call = cluster.channel.stream_stream("/kvferry.v1.Pool/Join")(reports(), timeout=5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drained(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await cluster.until(lambda status: status["aggregated-0"] == "lost")
