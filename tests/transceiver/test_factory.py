from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvferry.core import ConfigError, Resolution, Role
from kvferry.transceiver import TRANSCEIVERS, create_transceiver


def arguments(resolution: Resolution, **changes: Any) -> dict[str, Any]:
    return {
        "resolution": resolution,
        "worker": "decode-0",
        "role": Role.DECODE,
        "incarnation": "life",
        "model_fingerprint": "model",
        "pools": [],
        "endpoint": "here:1",
        "transfer_timeout_ms": 1000,
        **changes,
    }


def test_nixl_python_is_built() -> None:
    assert "NIXL/PYTHON" in TRANSCEIVERS


@pytest.mark.parametrize(
    ("backend", "runtime", "field"),
    [
        ("NIXL", "CPP", "transceiver.runtime"),
        ("UCX", "CPP", "transceiver.backend"),
        ("SHM", "PYTHON", "transceiver.backend"),
        ("MOONCAKE", "PYTHON", "transceiver.backend"),
    ],
)
def test_what_is_not_built_is_refused_by_name(resolved: Resolution, backend: str, runtime: str, field: str) -> None:
    wanted = replace(resolved, backend=backend, runtime=runtime)
    with pytest.raises(ConfigError, match=f"transceiver {backend}/{runtime} is not built in this version") as caught:
        create_transceiver(**arguments(wanted))
    assert caught.value.field == field
    assert "available: NIXL/PYTHON" in caught.value.message


@pytest.mark.parametrize(("name", "value"), [("transfer_timeout_ms", 0), ("transfer_timeout_ms", -5), ("lease_s", 0.0)])
def test_times_that_make_no_sense(resolved: Resolution, name: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        create_transceiver(**arguments(resolved, **{name: value}))
    assert caught.value.field == f"transceiver.{name}"
    assert str(value) in caught.value.message
