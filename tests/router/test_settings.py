from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.core import ConfigError, ModelLimits
from kvferry.router import RouterSettings


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"max_running": 0}, "at least 1"),
        ({"max_queued": -1}, "at least 0"),
        ({"retry_budget": -1}, "at least 0"),
        ({"grpc_port": 70000}, "between 0 and 65535"),
        ({"http_port": -1}, "between 0 and 65535"),
        ({"worker_wait_s": float("nan")}, "at least 0"),
        ({"request_timeout_s": 0}, "at least 0.01"),
        ({"lost_after_s": 1.0}, "must exceed heartbeat_s"),
    ],
)
def test_bad_values_name_themselves(change: dict[str, Any], needle: str) -> None:
    with pytest.raises(ConfigError, match=needle) as caught:
        RouterSettings(model_name="m", model_dir=Path("x"), limits=ModelLimits(10, 10), **change)
    assert caught.value.field == f"router.{next(iter(change))}"
