"""Servers without Ray: what keeps one from starting is said before anything is loaded. `tests/faults` runs them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cluster.standalone import main


@pytest.fixture
def router() -> Iterator[str]:
    """Somebody who accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str, str]:
    assert main(arguments) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    return error["code"], error["field"], error["message"]


def test_a_worker_needs_a_router_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "decode")[:2] == ("INVALID_ARGUMENT", "router")
    code, field, message = refusal(capsys, "decode", "--router", "127.0.0.1:1")
    assert (code, field) == ("UNAVAILABLE", "router")
    assert "127.0.0.1:1" in message


def test_a_taken_port_is_named(capsys: pytest.CaptureFixture[str], router: str) -> None:
    port = router.rpartition(":")[2]
    code, field, message = refusal(capsys, "decode", "--router", router, "--port", port)
    assert (code, field) == ("INVALID_ARGUMENT", "port")
    assert port in message


@pytest.mark.parametrize(("role", "backend"), [("aggregated", "NIXL"), ("decode", "NONE")])
def test_a_role_goes_with_its_backend(capsys: pytest.CaptureFixture[str], router: str, role: str, backend: str) -> None:
    refused = refusal(capsys, role, "--router", router, "--backend", backend)
    assert refused[:2] == ("INVALID_ARGUMENT", "transceiver.backend")


def test_unknown_settings_and_models_are_refused(
    capsys: pytest.CaptureFixture[str], router: str, tmp_path: Path
) -> None:
    code, field, _ = refusal(capsys, "router", "--engine.max_bach", "3")
    assert (code, field) == ("INVALID_ARGUMENT", "engine.max_bach")
    assert refusal(capsys, "router", "--model", str(tmp_path))[1] == "model"
