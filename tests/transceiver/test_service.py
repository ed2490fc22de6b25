"""The control channel over real gRPC: what crosses it, and what a refusal looks like on the other side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from kvferry.core import ErrorCode, Role, TokenRange, TransferError
from kvferry.core.codec import ERROR_METADATA_KEY, error_from_wire
from kvferry.proto import worker_pb2, worker_pb2_grpc
from kvferry.transceiver import IncompatiblePeerError, add_transceiver_service
from kvferry.transceiver.base import CancelOutcome
from kvferry.transceiver.control import PushReport, WriterState
from kvferry.transceiver.control_client import GrpcControlClient
from kvferry.transceiver.process_identity import this_process
from kvferry.transceiver.protocol import agent_digest, open_handle

TIMEOUT_S = 5.0


@asynccontextmanager
async def serving(worker: Any) -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_transceiver_service(server, worker.transceiver)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
def prefill(world: Any) -> Any:
    return world.worker(Role.PREFILL, "p:1")


@pytest.fixture
async def endpoint(prefill: Any) -> AsyncIterator[str]:
    async with serving(prefill) as endpoint:
        yield endpoint


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


async def test_open_and_check_of_a_push(push_world: Any) -> None:
    """Whoever granted answers the one, the writer the other."""
    writer, decode = push_world.worker(Role.PREFILL, "p:1"), push_world.worker(Role.DECODE, "d:1")
    writer.transceiver.connect("d:1")
    grant, load = decode.grant(writer, [3], TokenRange(0, 4))
    handle, process = open_handle(grant).handle, this_process()
    async with serving(decode) as granting, serving(writer) as writing:
        client, name = GrpcControlClient(), writer.transceiver.local.incarnation
        other = replace(writer.transceiver.local, incarnation="other", handle_key=b"")
        decode.transceiver.answer_handshake(other)
        with pytest.raises(TransferError, match="made for another worker"):
            await outcome(client.open_push(granting, "other", grant, process, TIMEOUT_S))
        digest = await outcome(client.open_push(granting, name, grant, process, TIMEOUT_S))
        assert digest == agent_digest(decode.transceiver.local.agent_metadata)
        with pytest.raises(TransferError, match="used already"):
            await outcome(client.open_push(granting, name, grant, process, TIMEOUT_S))
        check = client.check_push(writing, handle.transfer_id, handle.nonce, TIMEOUT_S, stop=True)
        assert await outcome(check) == PushReport(name, WriterState.UNKNOWN)
        client.close()
    decode.transceiver.cancel_load(load.load_id)
    assert load.wait().in_doubt is False


async def test_nobody_there_is_a_transfer_error_in_time(world: Any) -> None:
    decode, client = world.worker(Role.DECODE, "d:1"), GrpcControlClient()
    with pytest.raises(TransferError, match="UNAVAILABLE"):
        await outcome(client.handshake("127.0.0.1:1", decode.transceiver.local, TIMEOUT_S))
    client.close()
