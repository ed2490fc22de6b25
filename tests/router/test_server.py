from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvferry.core import CheckpointError, ConfigError, ModelLimits
from kvferry.router import RouterAddresses, RouterSettings, serve_router

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("setting", ["grpc_port", "http_port"])
async def test_taken_port_is_named_at_once(make_cluster: Any, setting: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)) as caught:
            async with asyncio.timeout(5):
                await make_cluster(**{setting: port})
    assert caught.value.field == f"router.{setting}"


async def test_second_router_does_not_share_a_port(make_cluster: Any) -> None:
    cluster = await make_cluster()
    port = int(cluster.addresses.grpc.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=str(port)):
        await make_cluster(grpc_port=port)


async def test_ports_are_free_again_after_the_end(model_dir: Path) -> None:
    settings = RouterSettings(model_name="m", model_dir=model_dir, limits=ModelLimits(300, 100))
    for _ in range(2):
        ready: asyncio.Future[RouterAddresses] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve_router(settings, ready.set_result))
        addresses = await asyncio.wait_for(ready, 5)
        ports = [int(address.rsplit(":", 1)[1]) for address in (addresses.grpc, addresses.http)]
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        for port in ports:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        settings = RouterSettings(
            model_name="m", model_dir=model_dir, limits=ModelLimits(300, 100), grpc_port=ports[0], http_port=ports[1]
        )


async def test_missing_tokenizer_and_unknown_policy_are_named(tmp_path: Path, make_cluster: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        await make_cluster(model_dir=tmp_path)
    with pytest.raises(ConfigError, match="unknown routing policy"):
        await make_cluster(decode_policy="best")


async def test_health_service_follows_the_workers(cluster: Any) -> None:
    stub = health_pb2_grpc.HealthStub(cluster.channel)

    async def check(service: str) -> Any:
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

    assert [await check(name) for name in ("", "kvferry.v1.Generation")] == [NOT_SERVING] * 2
    assert await check("kvferry.v1.Admin") == SERVING
    await cluster.add("aggregated-0")
    await asyncio.sleep(0.05)
    assert [await check(name) for name in ("", "kvferry.v1.Generation")] == [SERVING] * 2


async def test_reflection_lists_the_public_services(cluster: Any) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(cluster.channel)
    ask = reflection_pb2.ServerReflectionRequest
    requests = [ask(list_services=""), ask(file_containing_symbol="kvferry.v1.Generation")]
    answers = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {"kvferry.v1.Generation", "kvferry.v1.Admin", "grpc.health.v1.Health"} <= names
    assert "kvferry.v1.Pool" not in names
    assert answers[1].file_descriptor_response.file_descriptor_proto


@pytest.mark.parametrize("port", ["grpc", "http"])
async def test_any_bytes_at_a_port_do_no_harm(cluster: Any, port: str, caplog: pytest.LogCaptureFixture) -> None:
    await cluster.add("aggregated-0")
    host, number = getattr(cluster.addresses, port).rsplit(":", 1)
    for data in (b"\x80\x04\x95cposix\nsystem\n", b"GET / HTTP/9.9\r\n\r\n", bytes(range(256)) * 8):
        reader, writer = await asyncio.open_connection(host, int(number))
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(5):
            await reader.read()
        writer.close()
    assert (await cluster.status()).workers[0].state == "ready"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_unknown_method_is_unimplemented(cluster: Any) -> None:
    call = cluster.channel.unary_unary("/kvferry.v1.Generation/Nothing")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_router_needs_neither_torch_nor_ray() -> None:
    code = "import sys, kvferry.router; print({'torch', 'ray', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
