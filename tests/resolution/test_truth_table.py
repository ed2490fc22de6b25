"""Every row of the resolver's truth table, with every variant that an "any" stands for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from kvferry.core import Resolution
from kvferry.resolution import ResolutionError

ANY_BACKEND = ("NONE", "DEFAULT", "NIXL", "UCX", "SHM", "MOONCAKE")
RUNS_CPP = ("NONE", "DEFAULT", "NIXL", "UCX", "SHM")
ANY_RUNTIME = ("auto", "CPP", "PYTHON")
ANY_MANAGER = ("auto", "V1", "V2")
ANY_PREFERRED_RUNTIME = ("none", "PYTHON", "CPP")
ANY_PREFERRED_MANAGER = ("none", "V1", "V2")

TIMEOUT_NULL = {"transfer_timeout_ms": None}
BEAMS = {"beam_width": 4}
CONNECTOR = {"kv_connector": "lmcache"}
TWO_MODEL = {"speculative": "two-model"}
REQUIRED = {"required": True}
UCX_ENV = {"environ": {"KVFERRY_USE_UCX": "1"}}

PER_R1 = "per R1"


@dataclass(frozen=True)
class Row:
    number: int
    backends: tuple[str, ...]
    runtimes: tuple[str, ...]
    managers: tuple[str, ...]
    prefers_runtime: tuple[str, ...]
    prefers_manager: tuple[str, ...]
    runtime: str | None = None
    manager: str = ""
    others: tuple[dict[str, Any], ...] = ({},)
    error: tuple[str, ...] = ()
    manager_source: str | None = None
    runtime_source: str | None = None
    warning: str = ""
    never_warned: bool = False

    def cases(self) -> Iterator[Any]:
        lists = (self.backends, self.runtimes, self.managers, self.prefers_runtime, self.prefers_manager, self.others)
        for case in product(*lists):
            *words, other = case
            label = "-".join((str(self.number), *words, ",".join(map(str, other.values()))))
            yield pytest.param(self, *case, id=label)


ROWS = (
    Row(1, ("NONE",), ANY_RUNTIME, ("auto",), ANY_PREFERRED_RUNTIME, ("V2",), None, "V2", manager_source="model"),
    Row(2, ("NONE",), ANY_RUNTIME, ("auto",), ANY_PREFERRED_RUNTIME, ("V1", "none"), None, "V1"),
    Row(
        3,
        ("NIXL",),
        ("auto",),
        ("auto",),
        ("PYTHON",),
        ("V2",),
        "PYTHON",
        "V2",
        runtime_source="model",
        manager_source="model",
        never_warned=True,
    ),
    Row(
        4,
        ("NIXL",),
        ("auto",),
        ("auto",),
        ("none",),
        ("V2",),
        "PYTHON",
        "V2",
        runtime_source="default",
        manager_source="model",
    ),
    Row(
        5,
        ("NIXL",),
        ("auto",),
        ("auto",),
        ("PYTHON",),
        ("V2",),
        "CPP",
        "V1",
        others=(TIMEOUT_NULL,),
        runtime_source="demoted",
        manager_source="demoted",
        warning="transfer_timeout_ms",
    ),
    Row(
        5,
        ("NIXL",),
        ("auto",),
        ("auto",),
        ("none",),
        ("V2",),
        "CPP",
        "V1",
        others=(TIMEOUT_NULL,),
        runtime_source="default",
        manager_source="demoted",
    ),
    Row(
        6,
        ("NIXL",),
        ("auto",),
        ("auto",),
        ("CPP",),
        ("V2",),
        "CPP",
        "V1",
        runtime_source="model",
        manager_source="demoted",
    ),
    Row(
        7,
        ("NIXL",),
        ("CPP",),
        ("auto",),
        ANY_PREFERRED_RUNTIME,
        ("V2",),
        "CPP",
        "V1",
        runtime_source="user",
        manager_source="demoted",
    ),
    Row(
        8,
        ("NIXL",),
        ("PYTHON",),
        ("auto",),
        ANY_PREFERRED_RUNTIME,
        ("V2",),
        "PYTHON",
        "V2",
        runtime_source="user",
        manager_source="model",
    ),
    Row(9, ("NIXL",), ("auto",), ("auto",), ("PYTHON",), ("V1", "none"), "PYTHON", "V1", runtime_source="model"),
    Row(
        10,
        ("UCX",),
        ("auto",),
        ("auto",),
        ("none",),
        ("V2",),
        "CPP",
        "V1",
        runtime_source="default",
        manager_source="demoted",
    ),
    Row(
        11,
        ("UCX",),
        ("auto",),
        ("auto",),
        ("PYTHON",),
        ("V2",),
        "CPP",
        "V1",
        runtime_source="demoted",
        manager_source="demoted",
        warning="UCX cannot run PYTHON",
    ),
    Row(12, ("DEFAULT",), ("auto",), ("auto",), ("PYTHON",), ("V2",), "PYTHON", "V2", never_warned=True),
    Row(
        13,
        ("DEFAULT",),
        ("auto",),
        ("auto",),
        ("PYTHON",),
        ("V2",),
        "CPP",
        "V1",
        others=(UCX_ENV,),
        runtime_source="demoted",
        manager_source="demoted",
        warning="transceiver.backend: UCX",
    ),
    Row(
        14,
        ("UCX",),
        ("PYTHON",),
        ANY_MANAGER,
        ANY_PREFERRED_RUNTIME,
        ANY_PREFERRED_MANAGER,
        others=({}, TIMEOUT_NULL, BEAMS, CONNECTOR, TWO_MODEL, REQUIRED),
        error=("transceiver.runtime", "UCX", "PYTHON"),
    ),
    Row(
        15,
        ("NIXL", "SHM"),
        ("PYTHON",),
        ANY_MANAGER,
        ANY_PREFERRED_RUNTIME,
        ANY_PREFERRED_MANAGER,
        others=(TIMEOUT_NULL, TIMEOUT_NULL | BEAMS, TIMEOUT_NULL | REQUIRED),
        error=("transceiver.transfer_timeout_ms", "transfer_timeout_ms"),
    ),
    Row(
        16,
        RUNS_CPP,
        ("auto", "CPP"),
        ("V1",),
        ANY_PREFERRED_RUNTIME,
        ANY_PREFERRED_MANAGER,
        PER_R1,
        "V1",
        manager_source="user",
    ),
    # MOONCAKE, whose only runtime is PYTHON: as row 19, as row 11 the other way round, and as row 14.
    Row(
        19,
        ("MOONCAKE",),
        ("auto", "PYTHON"),
        ("auto", "V2"),
        ("none", "PYTHON"),
        ("V2",),
        "PYTHON",
        "V2",
        others=({}, TIMEOUT_NULL),
        never_warned=True,
    ),
    Row(
        16,
        ("MOONCAKE",),
        ("auto", "PYTHON"),
        ("V1",),
        ANY_PREFERRED_RUNTIME,
        ANY_PREFERRED_MANAGER,
        "PYTHON",
        "V1",
        manager_source="user",
    ),
    Row(
        11,
        ("MOONCAKE",),
        ("auto",),
        ("auto",),
        ("CPP",),
        ("V2",),
        "PYTHON",
        "V2",
        runtime_source="demoted",
        warning="cannot run CPP",
    ),
    Row(
        14,
        ("MOONCAKE",),
        ("CPP",),
        ANY_MANAGER,
        ANY_PREFERRED_RUNTIME,
        ANY_PREFERRED_MANAGER,
        error=("transceiver.runtime", "MOONCAKE", "CPP"),
    ),
    Row(
        17,
        ("NIXL", "UCX", "SHM"),
        ("CPP",),
        ("V2",),
        ANY_PREFERRED_RUNTIME,
        ANY_PREFERRED_MANAGER,
        error=("kv_cache.manager", "CPP", "V2", "transceiver.runtime is CPP"),
    ),
    Row(
        18,
        ANY_BACKEND,
        ("auto",),
        ("auto", "V2"),
        ANY_PREFERRED_RUNTIME,
        ("V2",),
        PER_R1,
        "V1",
        others=(BEAMS,),
        manager_source="demoted",
        warning="beam_width is 4",
    ),
    Row(
        18,
        ANY_BACKEND,
        ("auto",),
        ("auto", "V2"),
        ANY_PREFERRED_RUNTIME,
        ("V2",),
        PER_R1,
        "V1",
        others=(CONNECTOR, CONNECTOR | BEAMS),
        manager_source="demoted",
        warning="kv_cache.connector is lmcache",
    ),
    Row(19, ("SHM",), ("auto",), ("auto",), ("none", "PYTHON"), ("V2",), "PYTHON", "V2", manager_source="model"),
    Row(
        20,
        ("SHM",),
        ("CPP",),
        ("auto",),
        ANY_PREFERRED_RUNTIME,
        ("V2",),
        "CPP",
        "V1",
        runtime_source="user",
        manager_source="demoted",
    ),
    Row(21, ("NIXL",), ("auto",), ("V2",), ("none",), ("none",), "PYTHON", "V2", manager_source="user"),
    Row(
        22,
        ("UCX",),
        ("auto",),
        ("V2",),
        ANY_PREFERRED_RUNTIME,
        ANY_PREFERRED_MANAGER,
        error=("kv_cache.manager", "UCX", "V2"),
    ),
    Row(
        23,
        ANY_BACKEND,
        ("auto",),
        ("auto",),
        ANY_PREFERRED_RUNTIME,
        ("V2",),
        PER_R1,
        "V1",
        others=(TWO_MODEL, TWO_MODEL | BEAMS),
        manager_source="demoted",
        warning="two-model",
    ),
    Row(
        23,
        ANY_BACKEND,
        ("auto",),
        ("V2",),
        ANY_PREFERRED_RUNTIME,
        ("V2",),
        others=(TWO_MODEL, TWO_MODEL | BEAMS),
        error=("kv_cache.manager", "two-model"),
    ),
    Row(
        24,
        ("NIXL", "UCX"),
        ("CPP",),
        ("auto", "V2"),
        ANY_PREFERRED_RUNTIME,
        ("V2",),
        others=(REQUIRED, REQUIRED | BEAMS, REQUIRED | CONNECTOR),
        error=("transceiver.runtime", "requires KV manager V2", "CPP"),
    ),
    Row(
        24,
        RUNS_CPP,
        ("auto", "CPP"),
        ("V1",),
        ANY_PREFERRED_RUNTIME,
        ("V2",),
        others=(REQUIRED, REQUIRED | BEAMS),
        error=("kv_cache.manager", "requires KV manager V2", "V1"),
    ),
    Row(
        24,
        ("UCX",),
        ("auto",),
        ("auto", "V2"),
        ANY_PREFERRED_RUNTIME,
        ("V2",),
        others=(REQUIRED,),
        error=("transceiver.backend", "requires KV manager V2", "UCX"),
    ),
    Row(
        24,
        ("NONE", "NIXL"),
        ("auto",),
        ("auto", "V2"),
        ("none", "PYTHON"),
        ("V2",),
        others=(REQUIRED | BEAMS,),
        error=("beam_width", "requires KV manager V2"),
    ),
    Row(
        24,
        ("NONE", "NIXL"),
        ("auto",),
        ("auto", "V2"),
        ("none", "PYTHON"),
        ("V2",),
        others=(REQUIRED | CONNECTOR,),
        error=("kv_cache.connector", "requires KV manager V2"),
    ),
    Row(
        24,
        ("NONE", "NIXL"),
        ("auto",),
        ("auto", "V2"),
        ("none", "PYTHON"),
        ("V2",),
        others=(REQUIRED | TWO_MODEL,),
        error=("speculative", "requires KV manager V2"),
    ),
)


def per_r1(backend: str, user: str, prefers: str) -> str | None:
    """R1 written out for a finite timeout, apart from the code under test."""
    if backend == "NONE":
        return None
    if user != "auto":
        return user
    if backend == "UCX":
        return "CPP"
    return "PYTHON" if prefers == "none" or backend == "MOONCAKE" else prefers


@pytest.mark.parametrize(
    ("row", "backend", "runtime", "manager", "prefers_runtime", "prefers_manager", "other"),
    [case for row in ROWS for case in row.cases()],
)
def test_row(
    row: Row,
    backend: str,
    runtime: str,
    manager: str,
    prefers_runtime: str,
    prefers_manager: str,
    other: dict[str, Any],
    resolve_preferring: Callable[..., Resolution],
) -> None:
    settings = {"backend": backend, "runtime": runtime, "manager": manager, **other}
    if row.error:
        setting, *words = row.error
        with pytest.raises(ResolutionError) as raised:
            resolve_preferring(prefers_runtime, prefers_manager, **settings)
        assert raised.value.field == setting
        for word in words:
            assert word in raised.value.message
        return
    resolution = resolve_preferring(prefers_runtime, prefers_manager, **settings)
    expected = per_r1(backend, runtime, prefers_runtime) if row.runtime == PER_R1 else row.runtime
    assert (resolution.runtime, resolution.manager) == (expected, row.manager)
    if row.runtime_source is not None:
        assert resolution.runtime_source is not None
        assert resolution.runtime_source.value == row.runtime_source
    if row.manager_source is not None:
        assert resolution.manager_source.value == row.manager_source
    assert (resolution.runtime is None) == (backend == "NONE") == (resolution.runtime_source is None)
    assert any(row.warning in warning for warning in resolution.warnings) or not row.warning
    assert not (row.never_warned and resolution.warnings)


def test_the_table_is_whole() -> None:
    assert {row.number for row in ROWS} == set(range(1, 25))
    assert sum(len(list(row.cases())) for row in ROWS) > 500
