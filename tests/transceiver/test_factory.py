from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvferry.core import ConfigError, DType, GroupKind, KVLayout, Resolution, Role
from kvferry.kvcache.pool import build_pool
from kvferry.transceiver import WireFormat, create_transceiver, pool_memory
from kvferry.transceiver.memory import SharedArena


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


@pytest.mark.parametrize(("backend", "memory"), [("NIXL", type(None)), ("SHM", SharedArena)])
def test_where_pools_must_live(resolved: Resolution, backend: str, memory: type) -> None:
    made = pool_memory(replace(resolved, backend=backend))
    assert type(made) is memory


def test_without_a_transceiver_pools_live_anywhere(resolved: Resolution) -> None:
    assert pool_memory(replace(resolved, backend="NONE", runtime=None)) is None


def test_shm_refuses_pools_that_peers_cannot_map(resolved: Resolution) -> None:
    wanted = replace(resolved, backend="SHM")
    with pytest.raises(ConfigError, match="block pools in shared memory") as caught:
        create_transceiver(**arguments(wanted))
    assert caught.value.field == "transceiver.backend"


@pytest.mark.parametrize(
    ("backend", "runtime", "field"),
    [
        ("UCX", "PYTHON", "transceiver.runtime"),
        ("MOONCAKE", "CPP", "transceiver.runtime"),
    ],
)
def test_what_is_not_built_is_refused_by_name(resolved: Resolution, backend: str, runtime: str, field: str) -> None:
    wanted = replace(resolved, backend=backend, runtime=runtime)
    with pytest.raises(ConfigError, match=f"transceiver {backend}/{runtime} is not built in this version") as caught:
        create_transceiver(**arguments(wanted))
    assert caught.value.field == field
    assert "built: NIXL/PYTHON" in caught.value.message


@pytest.mark.parametrize(("name", "value"), [("transfer_timeout_ms", 0), ("transfer_timeout_ms", -5), ("lease_s", 0.0)])
def test_times_that_make_no_sense(resolved: Resolution, name: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        create_transceiver(**arguments(resolved, **{name: value}))
    assert caught.value.field == f"transceiver.{name}"
    assert str(value) in caught.value.message


def test_a_runtime_that_needs_a_deadline_says_so(resolved: Resolution) -> None:
    with pytest.raises(ConfigError, match="NIXL/PYTHON needs a finite transfer_timeout_ms") as caught:
        create_transceiver(**arguments(resolved, transfer_timeout_ms=None))
    assert caught.value.field == "transceiver.transfer_timeout_ms"


@pytest.mark.parametrize("runtime", ["PYTHON", "CPP"])
def test_the_plug_in_of_nixl_is_passed_on(resolved: Resolution, runtime: str) -> None:
    """POSIX starts, but moves files: no peer could reach this worker."""
    wanted = replace(resolved, runtime=runtime, manager="V1")
    with pytest.raises(ConfigError, match="POSIX does not move memory between workers") as caught:
        create_transceiver(**arguments(wanted, nixl_plugin="POSIX"))
    assert caught.value.field == "transceiver.nixl_plugin"
    create_transceiver(**arguments(wanted, nixl_plugin="UCX")).close()


def test_cpp_runs_without_a_deadline(resolved: Resolution) -> None:
    made = create_transceiver(**arguments(replace(resolved, runtime="CPP", manager="V1"), transfer_timeout_ms=None))
    assert made.local.agent_metadata
    made.close()


@pytest.mark.parametrize(("wire", "dtype"), [(WireFormat.INT8, DType.INT8), (WireFormat.FP8, DType.FLOAT8)])
def test_a_wire_format_moves_pools_of_its_own(resolved: Resolution, wire: WireFormat, dtype: DType) -> None:
    layout = KVLayout(GroupKind.FULL, layers=(0, 1), kv_heads=2, head_dim=4, tokens_per_block=4)
    pool = build_pool(layout, 8, "cpu")
    made = create_transceiver(**arguments(replace(resolved, backend="NIXL"), pools=[pool], wire_format=wire))
    try:
        (moved,) = made.local.layouts
        assert (moved.dtype, moved.row_nbytes, moved.kv_heads) == (dtype, 8, 2)
        assert made.local.pools[0].addr != pool.region.addr
        assert made.local.pools[0].nbytes == pool.region.nbytes // 2
    finally:
        made.close()


def test_states_have_no_wire_format(resolved: Resolution) -> None:
    pool = build_pool(KVLayout(GroupKind.SSM, layers=(0,), kv_heads=2, head_dim=4, tokens_per_block=1), 2, "cpu")
    with pytest.raises(ConfigError, match="this model caches ssm states: set it to stored") as caught:
        create_transceiver(**arguments(resolved, pools=[pool], wire_format=WireFormat.INT8))
    assert caught.value.field == "transceiver.wire_format"
