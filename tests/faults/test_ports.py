"""Any bytes at any port, and handles that are forged, damaged or used before: refused, and the worker goes on."""

from __future__ import annotations

import contextlib
import pickle
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from plain_cluster import GREEDY, PlainCluster

from kvferry.cli.client import Completed
from kvferry.core import WorkerRequest, codec
from kvferry.proto import generation_pb2, worker_pb2, worker_pb2_grpc

Prompt = Callable[[int, int], list[int]]

SAMPLING = replace(GREEDY, seed=1)
SERVICES = [
    service
    for module in (generation_pb2, worker_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    if service.name != "Pool"
]
METHODS = [
    f"/{service.full_name}/{method.name}"
    for service in SERVICES
    for method in service.methods
    if method.name != "Drain"  # its message is empty: any caller's order to drain is a good one
]


@pytest.fixture(autouse=True)
def as_before(pair: PlainCluster, golden: Any, prompt: Prompt) -> Iterator[None]:
    """After each test the same processes answer, with all their blocks."""
    pids = {name: server.pid for name, server in pair.servers.items()}
    yield
    assert {name: server.pid for name, server in pair.servers.items() if server.alive} == pids
    pair.assert_baseline(within_s=float(pair.settings["transceiver.lease_s"]) + 1)
    ids = prompt(33, 2)
    golden(ids, pair.complete(ids))


def endpoints(pair: PlainCluster) -> list[str]:
    return [pair.grpc, pair.http, *(pair.servers[name].facts["endpoint"] for name in ("prefill-0", "decode-0"))]


def test_bytes_that_are_no_call(pair: PlainCluster) -> None:
    noise = random.Random(1)
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    messages = [
        noise.randbytes(2000),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise.randbytes(500),
        pickle.dumps({"kv": [1, 2, 3]}),
        hello + noise.randbytes(3000),
        hello + b"\x00" * 9 + b"\xff\xff\xff\x01\x09\x00\x00\x00\x01",
        b"",
    ]
    for endpoint in endpoints(pair):
        host, _, port = endpoint.rpartition(":")
        for message in messages:
            with socket.create_connection((host, int(port)), 5) as connection, contextlib.suppress(OSError):
                connection.sendall(message)
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(0.2)
                connection.recv(4096)


ENDLESS = ("/kvferry.v1.Worker/KVEvents",)
"""Streams that go on until the caller leaves."""


@pytest.mark.parametrize("method", METHODS)
def test_messages_that_are_nonsense(pair: PlainCluster, method: str) -> None:
    """Every answer is a status of ours or a well-formed reply; no stack trace leaves."""
    noise = random.Random(method)
    bodies = [b"", b"\xff" * 50, pickle.dumps([1]), *(noise.randbytes(noise.randrange(1, 80)) for _ in range(12))]
    for endpoint in endpoints(pair)[:1] + endpoints(pair)[2:]:
        with grpc.insecure_channel(endpoint) as channel:
            for body in bodies:
                call = channel.unary_stream(method)(body, timeout=0.5 if method in ENDLESS else 10)
                with contextlib.suppress(grpc.RpcError):
                    for _ in call:
                        pass
                assert method in ENDLESS or call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED, body
                assert "Traceback" not in (call.details() or "")


class Handles:
    """A router's two calls, made by hand."""

    def __init__(self, pair: PlainCluster) -> None:
        self._channels = [
            grpc.insecure_channel(pair.servers[name].facts["endpoint"]) for name in ("prefill-0", "decode-0")
        ]
        self._prefill = worker_pb2_grpc.PrefillStub(self._channels[0])
        self._decode = worker_pb2_grpc.DecodeStub(self._channels[1])

    def prefill(self, ids: list[int]) -> worker_pb2.PrefillReply:
        return self._prefill.Run(codec.request_to_wire(WorkerRequest("by-hand", tuple(ids), SAMPLING)), timeout=30)

    def decode(self, ids: list[int], first: int, handle: bytes) -> Completed | grpc.StatusCode:
        """The whole answer, first token included, or how it was refused."""
        request = WorkerRequest("by-hand", tuple(ids), SAMPLING, (first,))
        wire = worker_pb2.DecodeRequest(request=codec.request_to_wire(request), handle=handle)
        answer = Completed(token_ids=[first])
        try:
            for reply in self._decode.Run(wire, timeout=30):
                answer.token_ids += reply.token_ids
                answer.route = {"transferred_bytes": reply.transferred_bytes}
        except grpc.RpcError as error:
            return error.code()
        return answer

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


@pytest.fixture
def by_hand(pair: PlainCluster) -> Iterator[Handles]:
    handles = Handles(pair)
    yield handles
    handles.close()


def test_a_handle_works_once(by_hand: Handles, golden: Any, prompt: Prompt) -> None:
    ids = prompt(60, 20)
    reply = by_hand.prefill(ids)
    moved = []
    for _ in range(3):
        answer = by_hand.decode(ids, reply.aux.first_token_id, reply.handle)
        assert isinstance(answer, Completed)
        golden(ids, answer)
        moved.append(answer.route["transferred_bytes"])
    assert moved[0] > 0
    assert moved[1:] == [0, 0]


def test_a_handle_fits_its_own_prompt_only(by_hand: Handles, golden: Any, prompt: Prompt) -> None:
    """Another prompt of the same length, and of others, is answered right, from no foreign byte."""
    mine = by_hand.prefill(prompt(60, 21))
    for n, length in enumerate((60, 30, 90)):
        ids = prompt(length, 22 + n)
        first = by_hand.prefill(ids).aux.first_token_id
        answer = by_hand.decode(ids, first, mine.handle)
        assert isinstance(answer, Completed)
        golden(ids, answer)
        assert answer.route["transferred_bytes"] == 0


def test_damaged_handles(by_hand: Handles, golden: Any, prompt: Prompt) -> None:
    """Cut off, with any one byte changed, of another worker's signature, or noise."""
    noise = random.Random(3)
    ids = prompt(60, 30)
    reply = by_hand.prefill(ids)
    handle = reply.handle
    forged = worker_pb2.SignedHandle.FromString(handle)
    other = worker_pb2.SignedHandle.FromString(by_hand.prefill(prompt(60, 31)).handle)
    damaged = [handle[: len(handle) // 2], noise.randbytes(len(handle)), b"\x00"]
    damaged.append(worker_pb2.SignedHandle(handle=forged.handle, mac=other.mac).SerializeToString())
    damaged.append(worker_pb2.SignedHandle(handle=forged.handle).SerializeToString())
    damaged += [
        handle[:at] + bytes([handle[at] ^ (1 << noise.randrange(8))]) + handle[at + 1 :]
        for at in range(0, len(handle), 7)
    ]
    for bad in damaged:
        answer = by_hand.decode(ids, reply.aux.first_token_id, bad)
        assert isinstance(answer, Completed), bad
        golden(ids, answer)
        assert answer.route["transferred_bytes"] == 0


@pytest.mark.parametrize("change", ["blocks", "endpoint", "incarnation", "range"])
def test_a_handle_rewritten_to_name_something_else(by_hand: Handles, golden: Any, prompt: Prompt, change: str) -> None:
    ids = prompt(60, 40)
    reply = by_hand.prefill(ids)
    signed = worker_pb2.SignedHandle.FromString(reply.handle)
    inner = worker_pb2.TransferHandle.FromString(signed.handle)
    if change == "blocks":
        inner.blocks[0].ids[0] = 10**6
    elif change == "endpoint":
        inner.endpoint = "127.0.0.1:1"
    elif change == "incarnation":
        inner.incarnation = "a former life"
    else:
        inner.stop += 16
    handle = worker_pb2.SignedHandle(handle=inner.SerializeToString(), mac=signed.mac).SerializeToString()
    answer = by_hand.decode(ids, reply.aux.first_token_id, handle)
    assert isinstance(answer, Completed)
    golden(ids, answer)
    assert answer.route["transferred_bytes"] == 0


def test_a_taken_port_is_named_at_once(pair: PlainCluster) -> None:
    """For a worker and for both ports of the router."""
    module = [sys.executable, "-m", "kvferry.cluster.standalone"]
    model = ["--model", str(pair.model_dir), "--state_dir", str(pair.work_dir)]
    grpc_port, http_port = (address.rpartition(":")[2] for address in (pair.grpc, pair.http))
    taken = pair.servers["decode-0"].facts["endpoint"].rpartition(":")[2]
    attempts = [
        (["router", "--grpc-port", grpc_port], grpc_port),
        (["router", "--http-port", http_port], http_port),
        (["decode", "decode-9", "--router", pair.grpc, "--port", taken], taken),
    ]
    for arguments, port in attempts:
        done = subprocess.run([*module, *arguments, *model], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert port in done.stdout
        assert '"INVALID_ARGUMENT"' in done.stdout
