"""The router's calls to workers: dataclasses in, dataclasses out, every failure a LegError."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from kvferry.core import (
    AuxRecord,
    DeadlineExceededError,
    FinishReason,
    HandOffPart,
    InternalError,
    KVFerryError,
    OutputDelta,
    PeerAddress,
    WorkerRequest,
    codec,
)
from kvferry.proto import worker_pb2, worker_pb2_grpc
from kvferry.router.facts import WorkerFacts
from kvferry.router.pool import Lease, WorkerLostError

logger = logging.getLogger(__name__)

MAX_MESSAGE_NBYTES = 16 * 1024 * 1024
# After the last token a worker only has its status left to send.
_TRAILER_TIMEOUT_S = 1.0
_STEP_TIMEOUT_S = 5.0
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_NBYTES),
    # A restarted worker at the same address must not inherit its predecessor's back-off.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class LegError(Exception):
    """One leg failed on one worker. lost: the call failed below the application, so others there will too."""

    def __init__(self, facts: WorkerFacts, error: KVFerryError, *, lost: bool) -> None:
        super().__init__(f"{facts.name}: {error.message}")
        self.facts = facts
        self.error = error
        self.lost = lost


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """handle is empty when the request ended at its first token, and when the KV is pushed."""

    aux: AuxRecord
    finish_reason: FinishReason | None
    handle: bytes
    text: str


class WorkerClients:
    """One channel per worker incarnation. Owned by the router: `close` ends them all."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def prefill(self, lease: Lease, request: WorkerRequest) -> PrefillResult:
        """Computes the prompt on the leased worker. Cancelling this cancels the work."""
        stub = worker_pb2_grpc.PrefillStub(self._channel(lease))
        call = stub.Run(codec.request_to_wire(request), timeout=request.deadline_s)
        lease.cancel_with(call.cancel)
        with _translated(lease):
            return _prefill_result(await call)

    async def prefill_in_parts(
        self, lease: Lease, request: WorkerRequest, grant: bytes = b""
    ) -> AsyncGenerator[HandOffPart | PrefillResult, None]:
        """Computes the prompt on the leased worker; what is there already comes in parts, the result last. With a grant
        it is written there, and no parts come, unless that fails."""
        stub = worker_pb2_grpc.PrefillStub(self._channel(lease))
        wire = codec.request_to_wire(request)
        wire.grant = grant
        call: Any = stub.RunInParts(wire, timeout=request.deadline_s)
        lease.cancel_with(call.cancel)
        try:
            with _translated(lease):
                while (step := await call.read()) is not grpc.aio.EOF:
                    if step.HasField("reply"):
                        yield _prefill_result(step.reply)
                        return
                    yield codec.part_from_wire(step.part)
                raise WorkerLostError("the stream ended before the prompt was computed")
        finally:
            call.cancel()

    def reserve(self, lease: Lease, request: WorkerRequest) -> ReservedCall:
        """Opens a decode leg on the leased worker for a prompt that is still to be computed."""
        stub = worker_pb2_grpc.DecodeStub(self._channel(lease))
        call = stub.RunReserved(timeout=request.deadline_s)
        lease.cancel_with(call.cancel)
        return ReservedCall(lease, call, request.request_id)

    def decode(
        self, lease: Lease, request: WorkerRequest, handle: bytes = b"", aux: AuxRecord | None = None
    ) -> DecodeCall:
        """Starts decoding on the leased worker at once; without a handle it computes the prompt itself."""
        wire = worker_pb2.DecodeRequest(
            request=codec.request_to_wire(request), handle=handle, aux=codec.aux_to_wire(aux) if aux else None
        )
        stub = worker_pb2_grpc.DecodeStub(self._channel(lease))
        call = stub.Run(wire, timeout=request.deadline_s)
        lease.cancel_with(call.cancel)
        return DecodeCall(lease, call, request.request_id)

    async def release(self, lease: Lease, handle: bytes, timeout_s: float) -> bool:
        """Gives up a hand-off nobody will pull; False when the worker knew nothing of it."""
        stub = worker_pb2_grpc.PrefillStub(self._channel(lease))
        with _translated(lease):
            reply = await stub.Release(worker_pb2.ReleaseRequest(handle=handle), timeout=timeout_s)
            return bool(reply.found)

    async def abandon(self, lease: Lease, request_id: str, timeout_s: float) -> None:
        """Ends all there is of a request whose prefill was not answered, as far as we know."""
        stub = worker_pb2_grpc.PrefillStub(self._channel(lease))
        with _translated(lease):
            await stub.Abandon(worker_pb2.AbandonRequest(request_id=request_id), timeout=timeout_s)

    async def drain(self, lease: Lease, timeout_s: float) -> str:
        """Tells the worker to take no more work; its state afterwards."""
        stub = worker_pb2_grpc.WorkerStub(self._channel(lease))
        with _translated(lease):
            status = await stub.Drain(worker_pb2.WorkerDrainRequest(), timeout=timeout_s)
            return str(status.state)

    async def forget(self, live_incarnations: set[str]) -> None:
        """Closes the channels of all other incarnations."""
        for incarnation in self._channels.keys() - live_incarnations:
            await self._channels.pop(incarnation).close()

    async def close(self) -> None:
        await self.forget(set())

    def _channel(self, lease: Lease) -> grpc.aio.Channel:
        facts = lease.facts
        channel = self._channels.get(facts.incarnation)
        if channel is None:
            channel = grpc.aio.insecure_channel(facts.endpoint, options=_CHANNEL_OPTIONS)
            self._channels[facts.incarnation] = channel
        return channel


class DecodeCall:
    """A running decode leg. Iterate `deltas` to the one with a finish reason; `cancel` ends it early."""

    def __init__(self, lease: Lease, call: Any, request_id: str) -> None:
        self._lease = lease
        self._call = call
        self._request_id = request_id
        self._reading: asyncio.Task[Any] | None = None

    async def _read(self) -> Any:
        """The next reply, which somebody may have begun to wait for before."""
        if self._reading is None:
            return await self._call.read()
        reading, self._reading = self._reading, None
        return await reading

    async def deltas(self) -> AsyncGenerator[OutputDelta, None]:
        """Raises LegError when the stream fails, or ends without a finish reason."""
        with _translated(self._lease):
            while (reply := await self._read()) is not grpc.aio.EOF:
                if reply.HasField("grant"):
                    continue  # too late: the KV is pulled
                delta = codec.delta_from_wire(self._request_id, reply)
                yield delta
                if delta.finish_reason is not None:
                    await self._read_trailer()
                    return
            raise WorkerLostError("the stream ended before the request was finished")

    def cancel(self) -> None:
        """Idempotent; does nothing once the call is over."""
        self._call.cancel()
        if self._reading is not None:
            self._reading.add_done_callback(lambda reading: reading.cancelled() or reading.exception())

    async def _read_trailer(self) -> None:
        """Lets the call end by itself, so that the worker does not take a finished request for a cancelled one."""
        try:
            async with asyncio.timeout(_TRAILER_TIMEOUT_S):
                await self._call.code()
        except TimeoutError:
            self._call.cancel()


class ReservedCall(DecodeCall):
    """A decode leg that is told in steps what to do: `reserve`, any parts, `start`; then iterate `deltas`. Each raises
    LegError when the leg has failed."""

    async def reserve(self, request: WorkerRequest, writer: PeerAddress | None = None) -> None:
        """writer: the prefill worker, if it may write the KV there."""
        wire = worker_pb2.DecodeRequest(request=codec.request_to_wire(request))
        if writer is not None:
            wire.writer.CopyFrom(codec.address_to_wire(writer))
        await self._write(worker_pb2.DecodeStep(reserve=wire))

    async def granted(self, wait_s: float) -> bytes:
        """What the writer needs; empty when the worker would rather pull, or had no room within `wait_s`."""
        with _translated(self._lease):
            # Not by a timeout: that would cancel the read, and with it the call.
            self._reading = asyncio.ensure_future(self._call.read())
            if not (await asyncio.wait({self._reading}, timeout=wait_s))[0]:
                return b""
            reply = await self._read()
            if reply is grpc.aio.EOF:
                raise WorkerLostError("the stream ended before the request was finished")
            return bytes(reply.grant)

    async def load(self, part: HandOffPart) -> None:
        await self._write(worker_pb2.DecodeStep(part=codec.part_to_wire(part)))

    async def start(self, request: WorkerRequest, handle: bytes, aux: AuxRecord) -> None:
        wire = worker_pb2.DecodeRequest(
            request=codec.request_to_wire(request), handle=handle, aux=codec.aux_to_wire(aux)
        )
        await self._write(worker_pb2.DecodeStep(start=wire))
        with _translated(self._lease):
            await self._call.done_writing()

    async def _write(self, step: worker_pb2.DecodeStep) -> None:
        """Bounded: a call that breaks while it is being opened may wait for ever for its first word to be sent."""
        with _translated(self._lease):
            try:
                async with asyncio.timeout(_STEP_TIMEOUT_S):
                    await self._sent(step)
            except TimeoutError:
                self._call.cancel()
                raise WorkerLostError(f"it has not taken a step within {_STEP_TIMEOUT_S:g} s") from None

    async def _sent(self, step: worker_pb2.DecodeStep) -> None:
        try:
            await self._call.write(step)
        except asyncio.InvalidStateError:  # the leg ended before: its status says why
            await self._read()
            raise WorkerLostError("the stream ended before the request was finished") from None


def _prefill_result(reply: worker_pb2.PrefillReply) -> PrefillResult:
    return PrefillResult(
        aux=codec.aux_from_wire(reply.aux),
        finish_reason=codec.finish_from_wire(reply.finish_reason),
        handle=reply.handle,
        text=reply.text,
    )


@contextmanager
def _translated(lease: Lease) -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _leg_error(lease, error) from None
    except KVFerryError as error:
        raise LegError(lease.facts, error, lost=isinstance(error, WorkerLostError)) from None
    except asyncio.CancelledError:
        # Cancelling a call because its worker is lost looks like our own task being cancelled.
        task = asyncio.current_task()
        if lease.lost_reason is None or (task is not None and task.cancelling()):
            raise
        lost = WorkerLostError(lease.lost_reason)
        raise LegError(lease.facts, lost, lost=True) from None


def _leg_error(lease: Lease, error: grpc.aio.AioRpcError) -> LegError:
    """The worker's own error where it sent one, else what the status means here."""
    for key, value in error.trailing_metadata() or ():
        if key == codec.ERROR_METADATA_KEY:
            return LegError(
                lease.facts, codec.error_from_wire(value if isinstance(value, bytes) else value.encode()), lost=False
            )
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return LegError(lease.facts, DeadlineExceededError("the request's deadline passed"), lost=False)
    # INTERNAL is gRPC's own word for a connection that broke under an operation: a worker's comes with its detail.
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL):
        return LegError(lease.facts, WorkerLostError(f"no connection: {details}"), lost=True)
    logger.error("worker %s answered %s: %s", lease.worker, code.name, details)
    return LegError(lease.facts, InternalError(f"{lease.worker} failed; its log says why"), lost=False)
