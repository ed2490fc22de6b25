"""A small blocking client of ``kvferry.v1.Admin``."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import cast

import grpc

from kvferry.core import ErrorCode, KVFerryError, Role, UnavailableError, codec, error_for_code
from kvferry.proto import admin_pb2, admin_pb2_grpc

StatusResponse = admin_pb2.StatusResponse
WorkerStatus = admin_pb2.WorkerStatus

CALL_TIMEOUT_S = 5.0


class AdminClient:
    """Owns its channel. Every call is bounded and raises KVFerryError."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._channel = grpc.insecure_channel(endpoint)
        self._stub = admin_pb2_grpc.AdminStub(self._channel)

    def status(self, timeout_s: float = CALL_TIMEOUT_S) -> admin_pb2.StatusResponse:
        try:
            return self._stub.Status(admin_pb2.StatusRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise rpc_error(error, self.endpoint) from None

    def drain(self, worker: str, timeout_s: float = CALL_TIMEOUT_S) -> str:
        """Returns the worker's state after it."""
        try:
            return self._stub.Drain(admin_pb2.DrainRequest(worker=worker), timeout=timeout_s).state
        except grpc.RpcError as error:
            raise rpc_error(error, self.endpoint) from None

    def not_ready(self, expected: Iterable[str]) -> str | None:
        return not_ready(self.status(), expected)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def not_ready(status: admin_pb2.StatusResponse, expected: Iterable[str]) -> str | None:
    """What is still missing before requests can be served by every expected worker; None when nothing is."""
    workers = {worker.name: worker for worker in status.workers}
    prefill = [worker.endpoint for worker in workers.values() if worker.role == Role.PREFILL.value]
    for name in expected:
        worker = workers.get(name)
        if worker is None:
            return f"{name} has not joined yet"
        if worker.state != "ready":
            reason = f": {worker.state_reason}" if worker.state_reason else ""
            return f"{name} is {worker.state}{reason}"
        if worker.role == Role.DECODE.value:
            for endpoint in prefill:
                if endpoint not in worker.peers:
                    error = worker.peer_errors.get(endpoint)
                    return f"{name} has not reached the prefill worker at {endpoint}" + (f": {error}" if error else "")
    return None


def rpc_error(error: grpc.RpcError, endpoint: str) -> KVFerryError:
    """The error the server raised, or what the connection says, to be raised again here."""
    if not hasattr(error, "trailing_metadata"):
        return UnavailableError(f"{endpoint}: {error}", field="endpoint")
    call = cast(grpc.Call, error)
    for key, value in call.trailing_metadata() or ():
        if key == codec.ERROR_METADATA_KEY and isinstance(value, bytes):
            return codec.error_from_wire(value)
    code, details = call.code(), call.details()
    if code is grpc.StatusCode.UNAVAILABLE:
        return UnavailableError(f"nobody answers at {endpoint}: {details}", field="endpoint")
    name = code.name if code.name in ErrorCode.__members__ else ErrorCode.INTERNAL.name
    return error_for_code(ErrorCode[name], f"{endpoint}: {code.name}: {details}", "endpoint")
