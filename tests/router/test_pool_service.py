from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from kvferry.core import Resolution, Source, codec
from kvferry.proto import admin_pb2, worker_pb2, worker_pb2_grpc
from kvferry.proto import generation_pb2 as pb

REQUEST = pb.GenerateRequest(prompt="fox", sampling=pb.SamplingParams(max_tokens=4))
RESOLUTION = Resolution("LlamaForCausalLM", "NIXL", "PYTHON", Source.MODEL, "V1", Source.USER, "")


def report(**changes: Any) -> worker_pb2.WorkerReport:
    values = {"name": "decode-9", "role": "decode", "state": "ready", "incarnation": "i", "endpoint": "nowhere:1"}
    status = admin_pb2.WorkerStatus(resolution=codec.resolution_to_wire(RESOLUTION), **{**values, **changes})
    return worker_pb2.WorkerReport(status=status, model_fingerprint="m", kv_dtype="float32")


@pytest.mark.parametrize(
    ("wire", "needle"),
    [
        (report(name=""), "needs its name"),
        (report(endpoint=""), "needs its endpoint"),
        (report(role="router"), "'router'"),
        (report(state="fine"), "'fine'"),
        (report(state="lost"), "cannot call itself lost"),
    ],
)
async def test_bad_reports_are_refused(cluster: Any, wire: worker_pb2.WorkerReport, needle: str) -> None:
    stream = worker_pb2_grpc.PoolStub(cluster.channel).Join(iter([wire]))
    with pytest.raises(grpc.aio.AioRpcError, match=needle) as caught:
        await stream.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len((await cluster.status()).workers) == 0


async def test_silent_stream_is_told_and_may_join_again(cluster: Any) -> None:
    stub = worker_pb2_grpc.PoolStub(cluster.channel)
    stream = stub.Join()
    await stream.write(report())
    assert await stream.read() == worker_pb2.PoolView()
    with pytest.raises(grpc.aio.AioRpcError, match="taken for lost: no report for") as caught:
        await stream.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    again = stub.Join()
    await again.write(report())
    await again.read()
    await cluster.until(lambda status: status == {"decode-9": "ready"})
    again.cancel()


async def test_second_process_under_one_name_is_turned_away(cluster: Any) -> None:
    stub = worker_pb2_grpc.PoolStub(cluster.channel)
    first, second = stub.Join(), stub.Join()
    await first.write(report(incarnation="first"))
    await first.read()
    await second.write(report(incarnation="second"))
    await second.read()
    with pytest.raises(grpc.aio.AioRpcError, match="replaced by incarnation second"):
        await first.read()
    back = stub.Join()
    await back.write(report(incarnation="first"))
    with pytest.raises(grpc.aio.AioRpcError, match="two processes use this name"):
        await back.read()
    second.cancel()


async def test_peers_hear_of_prefill_workers_as_they_come_and_go(cluster: Any) -> None:
    decode = await cluster.add("decode-0")
    assert decode.peers == set()
    prefill = await cluster.add("prefill-0", state="starting")
    await cluster.contact(decode)
    assert decode.peers == {prefill.endpoint}
    await prefill.stop()
    async with asyncio.timeout(5):
        while decode.peers:
            await asyncio.sleep(0.01)


async def test_incompatible_pair_is_refused_naming_both(cluster: Any) -> None:
    await cluster.add("prefill-0")
    decode = await cluster.add("decode-0", resolution=RESOLUTION)
    await cluster.contact(decode)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.stub.Generate(REQUEST, timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "prefill-0 and decode-0 cannot be paired" in str(caught.value.details())
    assert "V1" in str(caught.value.details())


async def test_pair_without_contact_is_not_used(cluster: Any) -> None:
    prefill = await cluster.add("prefill-0")
    decode = await cluster.add("decode-0", refuses="no route to host")
    await cluster.contact(decode)
    with pytest.raises(grpc.aio.AioRpcError, match="has not made contact with prefill-0: no route to host"):
        await cluster.stub.Generate(REQUEST, timeout=10)
    assert prefill.requests == []
    seen = {worker.name: worker for worker in (await cluster.status()).workers}
    assert dict(seen["decode-0"].peer_errors) == {prefill.endpoint: "no route to host"}


async def test_islands_are_routed_within(make_cluster: Any) -> None:
    cluster = await make_cluster(prefill_policy="round_robin", decode_policy="round_robin")
    for name in ("prefill-0", "decode-0"):
        await cluster.add(name)
    for name in ("prefill-1", "decode-1"):
        await cluster.add(name, resolution=RESOLUTION)
    await cluster.contact(cluster.workers["decode-0"], cluster.workers["decode-1"])
    answers = [await cluster.stub.Generate(REQUEST, timeout=10) for _ in range(6)]
    routes = {(answer.route.prefill, answer.route.decode) for answer in answers}
    assert routes == {("prefill-0", "decode-0"), ("prefill-1", "decode-1")}
