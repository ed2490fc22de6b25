"""What each transceiver backend and each KV cache manager declares it can do. The rules read only this.

An `implementation` is the lazy path ``module:attribute`` of what runs it. A capability without one is designed
and takes part in the rules, but this version cannot launch it (`check_buildable`).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.resolution.errors import ResolutionError
from kvferry.resolution.request import BACKEND_SETTING, DEFAULT_BACKEND, NONE_BACKEND

PYTHON = "PYTHON"
CPP = "CPP"
V1 = "V1"
V2 = "V2"

RUNTIMES = (PYTHON, CPP)
"""In the order in which `auto` without a preference tries them."""

MANAGERS = (V1, V2)
"""In the order in which `auto` falls back on them."""


@dataclass(frozen=True, slots=True)
class RuntimeCapability:
    """One runtime of one backend: the managers it drives, and whether it needs a finite transfer timeout."""

    runtime: str
    managers: tuple[str, ...]
    needs_finite_timeout: bool = False
    implementation: str | None = None


@dataclass(frozen=True, slots=True)
class TransceiverCapability:
    """One backend. library: the module it loads, install: the command that brings it (both empty: none needed).
    system_library, system_install: the same for a shared library of the system that the module needs.

    open_ports: its library listens on every network interface, whatever it is told.
    refused: why a backend that is recognised can never be used; empty for all others.
    """

    backend: str
    runtimes: tuple[RuntimeCapability, ...] = ()
    library: str = ""
    install: str = ""
    system_library: str = ""
    system_install: str = ""
    open_ports: bool = False
    refused: str = ""

    def __post_init__(self) -> None:
        where = f"transceiver backend {self.backend!r}"
        if not self.backend or self.backend != self.backend.upper():
            raise ResolutionError(f"{where}: a backend's name is written in capitals", field=BACKEND_SETTING)
        if self.backend in (NONE_BACKEND, DEFAULT_BACKEND):
            raise ResolutionError(f"{where}: this name is kvferry's own", field=BACKEND_SETTING)
        if not self.runtimes and not self.refused:
            raise ResolutionError(f"{where} declares no runtime", field=BACKEND_SETTING)
        names = [entry.runtime for entry in self.runtimes]
        if len(set(names)) != len(names):
            raise ResolutionError(f"{where} declares a runtime twice: {', '.join(names)}", field=BACKEND_SETTING)
        for entry in self.runtimes:
            _check_runtime(where, entry)

    def runtime(self, name: str) -> RuntimeCapability | None:
        return next((entry for entry in self.runtimes if entry.runtime == name), None)


def _check_runtime(where: str, entry: RuntimeCapability) -> None:
    if entry.runtime not in RUNTIMES:
        raise ResolutionError(
            f"{where} declares runtime {entry.runtime!r}; known: {', '.join(RUNTIMES)}", field=BACKEND_SETTING
        )
    if not entry.managers or not set(entry.managers) <= set(MANAGERS):
        raise ResolutionError(
            f"{where}, runtime {entry.runtime}: managers must be some of {', '.join(MANAGERS)}, got {entry.managers!r}",
            field=BACKEND_SETTING,
        )


@dataclass(frozen=True, slots=True)
class ManagerCapability:
    """One KV cache manager version and the engine features it can serve.

    state_snapshots: keeps copies of recurrent (Mamba) state at block borders, without which a hybrid model
    cannot reuse a prefix.
    """

    version: str
    beam_search: bool
    kv_connector: bool
    two_model_speculation: bool
    state_snapshots: bool
    implementation: str | None = None


_IMPLEMENTATIONS = "kvferry.transceiver.builtin"


def _python_both(implementation: str) -> RuntimeCapability:
    return RuntimeCapability(PYTHON, (V1, V2), needs_finite_timeout=True, implementation=implementation)


_NIXL_INSTALL = "pip install torch nixl-cu12"

BUILTIN_TRANSCEIVERS = (
    TransceiverCapability(
        "NIXL",
        runtimes=(
            _python_both(f"{_IMPLEMENTATIONS}:NIXL_PYTHON"),
            RuntimeCapability(CPP, (V1,), implementation=f"{_IMPLEMENTATIONS}:NIXL_CPP"),
        ),
        library="nixl_cu12",
        install=_NIXL_INSTALL,
    ),
    TransceiverCapability(
        "SHM",
        runtimes=(
            _python_both(f"{_IMPLEMENTATIONS}:SHM_PYTHON"),
            RuntimeCapability(CPP, (V1,), implementation=f"{_IMPLEMENTATIONS}:SHM_CPP"),
        ),
    ),
    TransceiverCapability(
        "UCX",
        runtimes=(RuntimeCapability(CPP, (V1,), implementation=f"{_IMPLEMENTATIONS}:UCX_CPP"),),
        library="libucx",
        install="pip install libucx-cu12",
    ),
    TransceiverCapability(
        "MOONCAKE",
        # Its library ends by itself what a peer that has stopped keeps waiting.
        runtimes=(RuntimeCapability(PYTHON, (V1, V2), implementation=f"{_IMPLEMENTATIONS}:MOONCAKE_PYTHON"),),
        library="mooncake",
        install="pip install mooncake-transfer-engine-non-cuda",
        system_library="libibverbs.so.1",
        system_install="apt-get install --no-install-recommends libibverbs1",
        open_ports=True,
    ),
    TransceiverCapability("MPI", refused="it is recognised but not built"),
)

BUILTIN_MANAGERS = (
    ManagerCapability(
        V1,
        beam_search=True,
        kv_connector=True,
        two_model_speculation=True,
        state_snapshots=False,
        implementation="kvferry.kvcache:create_manager",
    ),
    ManagerCapability(
        V2,
        beam_search=False,
        kv_connector=False,
        two_model_speculation=False,
        state_snapshots=True,
        implementation="kvferry.kvcache:create_manager",
    ),
)
