"""Readiness is a question about the router's status; errors cross the wire with field and code."""

from __future__ import annotations

import pytest

from kvferry.cluster.admin_client import AdminClient, not_ready
from kvferry.core import UnavailableError
from kvferry.proto import admin_pb2


def _status(*workers: admin_pb2.WorkerStatus) -> admin_pb2.StatusResponse:
    return admin_pb2.StatusResponse(workers=workers)


def _prefill(state: str = "ready", reason: str = "") -> admin_pb2.WorkerStatus:
    return admin_pb2.WorkerStatus(name="prefill-0", role="prefill", state=state, endpoint="p:1", state_reason=reason)


def _decode(*peers: str, **errors: str) -> admin_pb2.WorkerStatus:
    return admin_pb2.WorkerStatus(name="decode-0", role="decode", state="ready", peers=peers, peer_errors=errors)


def test_ready_when_all_are_there_and_paired() -> None:
    assert not_ready(_status(_prefill(), _decode("p:1")), ["prefill-0", "decode-0"]) is None


def test_aggregated_workers_need_no_peers() -> None:
    worker = admin_pb2.WorkerStatus(name="aggregated-0", role="aggregated", state="ready")
    assert not_ready(_status(worker), ["aggregated-0"]) is None


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (_status(_prefill()), "decode-0 has not joined yet"),
        (_status(_prefill("unhealthy", "no blocks"), _decode("p:1")), "prefill-0 is unhealthy: no blocks"),
        (_status(_prefill(), _decode()), "decode-0 has not reached the prefill worker at p:1"),
        (_status(_prefill(), _decode(**{"p:1": "dtype differs"})), "at p:1: dtype differs"),
    ],
)
def test_what_is_missing_is_named(status: admin_pb2.StatusResponse, message: str) -> None:
    assert message in str(not_ready(status, ["prefill-0", "decode-0"]))


def test_nobody_at_the_endpoint() -> None:
    with (
        AdminClient("127.0.0.1:1") as admin,
        pytest.raises(UnavailableError, match=r"nobody answers at 127\.0\.0\.1:1"),
    ):
        admin.status(timeout_s=5)
