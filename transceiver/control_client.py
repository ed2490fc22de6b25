"""The control channel's client over gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc

from kvferry.core import (
    ErrorCode,
    InvalidRequestError,
    KVFerryError,
    ProcessIdentity,
    RankInfo,
    TransferError,
    error_for_code,
)
from kvferry.core.codec import ERROR_METADATA_KEY, error_from_wire, process_to_wire, rank_from_wire, rank_to_wire
from kvferry.proto import worker_pb2, worker_pb2_grpc
from kvferry.transceiver.base import CancelOutcome
from kvferry.transceiver.control import ControlClient, PushReport, WriterState
from kvferry.transceiver.handshake import IncompatiblePeerError

T = TypeVar("T")

# A restarted worker must be found within a second, not when gRPC's default back-off of up to two minutes ends.
_RECONNECT = (
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


def dial_insecure(endpoint: str) -> grpc.Channel:
    return grpc.insecure_channel(endpoint, options=_RECONNECT)


class GrpcControlClient(ControlClient):
    """One channel per endpoint, opened on first use. gRPC reconnects by itself when a worker returns."""

    def __init__(self, dial: Callable[[str], grpc.Channel] = dial_insecure) -> None:
        self._dial = dial
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}

    def handshake(self, endpoint: str, initiator: RankInfo, timeout_s: float) -> Future[RankInfo]:
        request = worker_pb2.HandshakeRequest(initiator=rank_to_wire(initiator))
        call = self._stub(endpoint).Handshake.future(request, timeout=timeout_s)
        return _convert(call, endpoint, lambda reply: rank_from_wire(reply.target))

    def heartbeat(
        self, endpoint: str, incarnation: str, transfer_ids: Sequence[int], timeout_s: float
    ) -> Future[tuple[int, ...]]:
        request = worker_pb2.LeaseHeartbeat(incarnation=incarnation, transfer_ids=transfer_ids)
        call = self._stub(endpoint).Heartbeat.future(request, timeout=timeout_s)
        return _convert(call, endpoint, lambda reply: tuple(reply.unknown))

    def cancel(
        self, endpoint: str, incarnation: str, transfer_id: int, nonce: bytes, timeout_s: float
    ) -> Future[CancelOutcome]:
        request = worker_pb2.TransferCancel(incarnation=incarnation, transfer_id=transfer_id, nonce=nonce)
        call = self._stub(endpoint).Cancel.future(request, timeout=timeout_s)
        return _convert(call, endpoint, lambda reply: CancelOutcome(reply.outcome))

    def open_push(
        self, endpoint: str, incarnation: str, grant: bytes, process: ProcessIdentity, timeout_s: float
    ) -> Future[bytes]:
        request = worker_pb2.PushOpen(incarnation=incarnation, grant=grant, process=process_to_wire(process))
        call = self._stub(endpoint).OpenPush.future(request, timeout=timeout_s)
        return _convert(call, endpoint, lambda reply: bytes(reply.agent_digest))

    def check_push(
        self, endpoint: str, transfer_id: int, nonce: bytes, timeout_s: float, *, stop: bool
    ) -> Future[PushReport]:
        request = worker_pb2.PushCheck(transfer_id=transfer_id, nonce=nonce, stop=stop)
        call = self._stub(endpoint).CheckPush.future(request, timeout=timeout_s)
        return _convert(call, endpoint, _push_report)

    def close(self) -> None:
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()

    def _stub(self, endpoint: str) -> worker_pb2_grpc.TransceiverStub:
        with self._lock:
            channel = self._channels.get(endpoint)
            if channel is None:
                channel = self._channels[endpoint] = self._dial(endpoint)
        return worker_pb2_grpc.TransceiverStub(channel)


def _push_report(reply: worker_pb2.PushChecked) -> PushReport:
    return PushReport(reply.incarnation, WriterState(reply.state), reply.nbytes, reply.cut)


def _convert(call: Any, endpoint: str, decode: Callable[[Any], T]) -> Future[T]:
    """A gRPC call as a plain future whose only error is TransferError."""
    result: Future[T] = Future()

    def done(ended: Any) -> None:
        try:
            result.set_result(decode(ended.result()))
        except grpc.FutureCancelledError:
            result.set_exception(TransferError(f"the call to {endpoint} was cancelled: its channel was closed"))
        except grpc.RpcError as error:
            result.set_exception(_transfer_error(error, endpoint))
        except (InvalidRequestError, ValueError) as error:
            result.set_exception(TransferError(f"{endpoint} answered nonsense: {error}"))

    call.add_done_callback(done)
    return result


def _transfer_error(error: grpc.RpcError, endpoint: str) -> TransferError:
    cause = _remote_error(error)
    kind = IncompatiblePeerError if cause.code is ErrorCode.INVALID_ARGUMENT else TransferError
    return kind(f"{endpoint}: {cause.message}", field=cause.field)


def _remote_error(error: Any) -> KVFerryError:
    """What the peer said, or what gRPC says about it. Every error of a finished call is a `grpc.Call` too."""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY and isinstance(value, bytes):
            return error_from_wire(value)
    status = error.code().name
    code = ErrorCode[status] if status in ErrorCode.__members__ else ErrorCode.UNAVAILABLE
    return error_for_code(code, f"{status}: {error.details()}")
