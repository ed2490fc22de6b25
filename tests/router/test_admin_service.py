from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest

from kvferry.core import WorkerRequest, codec
from kvferry.proto import admin_pb2, admin_pb2_grpc
from kvferry.proto import generation_pb2 as pb

REQUEST = pb.GenerateRequest(
    prompt_token_ids=pb.TokenIds(ids=[1, 2, 3, 4, 5]), sampling=pb.SamplingParams(max_tokens=8)
)


def admin(cluster: Any) -> Any:
    return admin_pb2_grpc.AdminStub(cluster.channel)


async def test_status_shows_what_every_worker_runs_with(cluster: Any) -> None:
    prefill, _ = await cluster.pair()
    await cluster.stub.Generate(REQUEST, timeout=10)
    status = await admin(cluster).Status(admin_pb2.StatusRequest())
    decode, other = status.workers
    assert (decode.name, decode.role, decode.state, decode.pid) == ("decode-0", "decode", "ready", 4711)
    assert (decode.resolution.backend, decode.resolution.runtime, decode.resolution.manager) == ("NIXL", "PYTHON", "V2")
    assert (decode.blocks.total, decode.blocks.free) == (100, 90)
    assert list(decode.peers) == [prefill.endpoint]
    assert [(rank.rank, rank.tp_rank, rank.pp_rank, rank.pid) for rank in decode.ranks] == [
        (0, 0, 0, 4711),
        (1, 1, 0, 4712),
    ]
    assert other.incarnation == "prefill-0-1"
    assert status.router.endpoint == cluster.addresses.grpc
    assert status.router.model == "fake"
    assert status.router.requests["finished"] == 1
    assert status.router.requests["decoding"] == 0


async def test_drained_worker_finishes_what_it_has_and_gets_no_more(cluster: Any) -> None:
    first, second = await cluster.add("aggregated-0"), await cluster.add("aggregated-1")
    go_on = asyncio.Event()

    async def wait(_: WorkerRequest, __: int) -> None:
        await go_on.wait()

    first.on_decode = second.on_decode = wait
    running = [asyncio.ensure_future(cluster.stub.Generate(REQUEST, timeout=10)) for _ in range(2)]
    async with asyncio.timeout(5):
        while not (first.requests and second.requests):
            await asyncio.sleep(0.01)
    assert (await admin(cluster).Drain(admin_pb2.DrainRequest(worker="aggregated-0"))).state == "draining"
    assert first.state == "draining"  # it was told
    go_on.set()
    for call in running:
        assert len((await call).token_ids) == 8
    for _ in range(3):
        await cluster.stub.Generate(REQUEST, timeout=10)
    assert (len(first.requests), len(second.requests)) == (1, 4)


async def test_drain_of_an_unknown_worker_lists_the_known(cluster: Any) -> None:
    await cluster.add("aggregated-0")
    with pytest.raises(grpc.aio.AioRpcError, match="aggregated-0") as caught:
        await admin(cluster).Drain(admin_pb2.DrainRequest(worker="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("wire", "runtime", "manager"),
    [
        (admin_pb2.ResolveRequest(architecture="LlamaForCausalLM"), "PYTHON", "V2"),
        (admin_pb2.ResolveRequest(architecture="LlamaForCausalLM", no_transfer_timeout=True), "CPP", "V1"),
        (admin_pb2.ResolveRequest(config_json=json.dumps({"architectures": ["MistralForCausalLM"]})), "PYTHON", "V1"),
        (admin_pb2.ResolveRequest(architecture="LlamaForCausalLM", backend="NONE"), "", "V2"),
    ],
)
async def test_resolve_is_a_dry_run(cluster: Any, wire: admin_pb2.ResolveRequest, runtime: str, manager: str) -> None:
    answer = await admin(cluster).Resolve(wire)
    assert answer.error == ""
    resolution = codec.resolution_from_wire(answer.resolution)
    assert (resolution.runtime or "", resolution.manager) == (runtime, manager)


@pytest.mark.parametrize(
    ("wire", "needle"),
    [
        (admin_pb2.ResolveRequest(architecture="LlamaForCausalLM", backend="UCX", runtime="PYTHON"), "UCX"),
        (admin_pb2.ResolveRequest(architecture="LamaForCausalLM"), "LlamaForCausalLM"),
        (admin_pb2.ResolveRequest(config_json="{"), "config_json is not JSON"),
        (admin_pb2.ResolveRequest(architecture="LlamaForCausalLM", prefix_reuse="maybe"), "prefix_reuse"),
    ],
)
async def test_resolve_answers_refusals(cluster: Any, wire: admin_pb2.ResolveRequest, needle: str) -> None:
    answer = await admin(cluster).Resolve(wire)
    assert needle in answer.error
    assert not answer.HasField("resolution")
