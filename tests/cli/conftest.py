"""A scripted router, and the command run against it in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from kvferry.cli.main import build_app
from kvferry.core import KVFerryError, codec
from kvferry.proto import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc


class ScriptedRouter(generation_pb2_grpc.GenerationServicer, admin_pb2_grpc.AdminServicer):
    """Streams `replies`, then raises `error` if there is one. Keeps the requests it got."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.replies: list[generation_pb2.GenerateResponse] = []
        self.error: KVFerryError | None = None
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.workers: list[admin_pb2.WorkerStatus] = []
        self.drained: list[str] = []

    def Generate(  # noqa: N802 - the name of the RPC
        self, request: generation_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> generation_pb2.GenerateResponse:
        self.requests.append(request)
        self._refuse(context)
        return self.replies[-1]

    def GenerateStream(  # noqa: N802 - the name of the RPC
        self, request: generation_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generation_pb2.GenerateResponse]:
        self.requests.append(request)
        yield from self.replies
        self._refuse(context)

    def Status(  # noqa: N802 - the name of the RPC
        self, request: admin_pb2.StatusRequest, context: grpc.ServicerContext
    ) -> admin_pb2.StatusResponse:
        router = admin_pb2.RouterStatus(endpoint=self.endpoint, pid=7, model="tiny", requests={"finished": 3})
        return admin_pb2.StatusResponse(workers=self.workers, router=router)

    def Drain(  # noqa: N802 - the name of the RPC
        self, request: admin_pb2.DrainRequest, context: grpc.ServicerContext
    ) -> admin_pb2.DrainResponse:
        self._refuse(context)
        self.drained.append(request.worker)
        return admin_pb2.DrainResponse(state="draining")

    def _refuse(self, context: grpc.ServicerContext) -> None:
        if self.error is not None:
            context.set_trailing_metadata([(codec.ERROR_METADATA_KEY, codec.error_to_wire(self.error, "req-1"))])
            context.abort(getattr(grpc.StatusCode, self.error.code.name), self.error.message)


@pytest.fixture
def router() -> Iterator[ScriptedRouter]:
    scripted = ScriptedRouter()
    server = grpc.server(ThreadPoolExecutor(2))
    generation_pb2_grpc.add_GenerationServicer_to_server(scripted, server)
    admin_pb2_grpc.add_AdminServicer_to_server(scripted, server)
    scripted.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield scripted
    server.stop(None).wait()


@pytest.fixture
def kvferry() -> Callable[..., Any]:
    """kvferry("generate", "--json") -> typer's Result, stdout and stderr apart."""

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(build_app(arguments[0]), list(arguments))

    return run
