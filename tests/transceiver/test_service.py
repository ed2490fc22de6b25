"""The control channel over real gRPC: what crosses it, and what a refusal looks like on the other side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from kvferry.core import ErrorCode, Role, TransferError
from kvferry.core.codec import ERROR_METADATA_KEY, error_from_wire
from kvferry.proto import worker_pb2, worker_pb2_grpc
from kvferry.transceiver import IncompatiblePeerError, add_transceiver_service
from kvferry.transceiver.base import CancelOutcome
from kvferry.transceiver.control_client import GrpcControlClient
from kvferry.transceiver.protocol import open_handle

TIMEOUT_S = 5.0


@pytest.fixture
def prefill(world: Any) -> Any:
    return world.worker(Role.PREFILL, "p:1")


@pytest.fixture
async def endpoint(prefill: Any) -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_transceiver_service(server, prefill.transceiver)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def outcome(future: Any) -> Any:
    return await asyncio.wrap_future(future)


async def test_handshake_exchanges_ranks(world: Any, prefill: Any, endpoint: str) -> None:
    decode, client = world.worker(Role.DECODE, "d:1"), GrpcControlClient()
    rank = await outcome(client.handshake(endpoint, decode.transceiver.local, TIMEOUT_S))
    assert rank == prefill.transceiver.local
    client.close()


async def test_a_refusal_crosses_with_its_reason(world: Any, endpoint: str) -> None:
    decode, client = world.worker(Role.DECODE, "d:1"), GrpcControlClient()
    other = replace(decode.transceiver.local, model_fingerprint="other")
    with pytest.raises(IncompatiblePeerError, match="model_fingerprint is model here and other there"):
        await outcome(client.handshake(endpoint, other, TIMEOUT_S))
    client.close()


async def test_nonsense_is_an_invalid_argument(endpoint: str) -> None:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        stub = worker_pb2_grpc.TransceiverStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Handshake(worker_pb2.HandshakeRequest(), timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        detail = dict(caught.value.trailing_metadata())[ERROR_METADATA_KEY]
        assert error_from_wire(detail).code is ErrorCode.INVALID_ARGUMENT


async def test_heartbeat_and_cancel(prefill: Any, endpoint: str) -> None:
    client = GrpcControlClient()
    data, hold = prefill.advertise([5], 4)
    handle = open_handle(data).handle
    assert await outcome(client.heartbeat(endpoint, "reader", [handle.transfer_id, 99], TIMEOUT_S)) == (99,)
    call = client.cancel(endpoint, handle.incarnation, handle.transfer_id, handle.nonce, TIMEOUT_S)
    assert await outcome(call) is CancelOutcome.IN_FLIGHT
    assert hold.released.is_set()
    client.close()


async def test_nobody_there_is_a_transfer_error_in_time(world: Any) -> None:
    decode, client = world.worker(Role.DECODE, "d:1"), GrpcControlClient()
    with pytest.raises(TransferError, match="UNAVAILABLE"):
        await outcome(client.handshake("127.0.0.1:1", decode.transceiver.local, TIMEOUT_S))
    client.close()
