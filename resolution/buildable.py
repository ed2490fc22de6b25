"""Whether this version, on this machine, can launch what was resolved. Asked before Ray starts or a weight loads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from kvferry.core import Resolution
from kvferry.resolution.architectures import card_named
from kvferry.resolution.backend import effective_backend
from kvferry.resolution.capabilities import TransceiverCapability
from kvferry.resolution.card import Card
from kvferry.resolution.catalog import Catalog, default_catalog
from kvferry.resolution.errors import ResolutionError
from kvferry.resolution.request import (
    BACKEND_SETTING,
    BEAM_SETTING,
    CONNECTOR_SETTING,
    MANAGER_SETTING,
    NONE_BACKEND,
    RUNTIME_SETTING,
    SPECULATIVE_SETTING,
    ResolveRequest,
)

MODEL_SETTING = "model"


@dataclass(frozen=True, slots=True)
class BuildGap:
    """Something designed that this version has no implementation of, and the setting that asks for it."""

    setting: str
    message: str


def build_gaps(
    resolution: Resolution, request: ResolveRequest | None = None, catalog: Catalog | None = None
) -> tuple[BuildGap, ...]:
    """Why this version cannot launch the pair of `resolution`, or a feature of `request`; empty when it can.
    The model's own implementation is not looked at: `required_implementation` does that when it is loaded."""
    catalog = catalog or default_catalog()
    gaps = [*_route_gaps(resolution, catalog), *(_feature_gaps(resolution, request, catalog) if request else ())]
    if catalog.managers.get(resolution.manager).implementation is None:
        message = f"KV manager {resolution.manager} is not built in this version; change {MANAGER_SETTING}"
        gaps.append(BuildGap(MANAGER_SETTING, message))
    return tuple(gaps)


def _route_gaps(resolution: Resolution, catalog: Catalog) -> list[BuildGap]:
    transceiver = catalog.transceiver(resolution.backend)
    if transceiver is None or resolution.runtime is None:
        return []
    capability = transceiver.runtime(resolution.runtime)
    if capability is not None and capability.implementation is not None:
        return []
    other_runtime = any(entry.implementation for entry in transceiver.runtimes)
    setting = RUNTIME_SETTING if other_runtime else BACKEND_SETTING
    built = [
        f"{offered.backend}/{entry.runtime}"
        for offered in catalog.offered()
        for entry in offered.runtimes
        if entry.implementation
    ]
    message = (
        f"transceiver {resolution.transceiver} is not built in this version; change {setting} "
        f"(built: {', '.join(built)})"
    )
    return [BuildGap(setting, message)]


def _feature_gaps(resolution: Resolution, request: ResolveRequest, catalog: Catalog) -> list[BuildGap]:
    gaps = []
    if request.beam_width > 1 and resolution.backend != NONE_BACKEND:
        message = (
            f"beam search is served in process only (LLM.beam_search), not by a cluster; leave {BEAM_SETTING} out, "
            f"or set {BACKEND_SETTING} to {NONE_BACKEND}"
        )
        gaps.append(BuildGap(BEAM_SETTING, message))
    if request.kv_connector is not None and request.kv_connector not in catalog.connectors:
        known = ", ".join(catalog.connectors)
        message = (
            f"no KV connector {request.kv_connector!r} is installed here (known: {known}); change {CONNECTOR_SETTING}"
        )
        gaps.append(BuildGap(CONNECTOR_SETTING, message))
    if request.speculative is not None:
        message = f"two-model speculative decoding is not built in this version; leave {SPECULATIVE_SETTING} out"
        gaps.append(BuildGap(SPECULATIVE_SETTING, message))
    return gaps


def check_buildable(
    resolution: Resolution, request: ResolveRequest | None = None, catalog: Catalog | None = None
) -> None:
    """Raises ResolutionError for the first gap, and for a model without an implementation. For launching, in the
    second or two before anything heavy starts; a dry run shows `build_gaps` instead."""
    catalog = catalog or default_catalog()
    for gap in build_gaps(resolution, request, catalog):
        raise ResolutionError(gap.message, field=gap.setting)
    required_implementation(card_named(resolution.architecture, catalog.cards), catalog)


def required_implementation(card: Card, catalog: Catalog | None = None) -> str:
    """The lazy path of what executes `card`'s architecture. Raises ResolutionError when this version has none."""
    if card.implementation:
        return card.implementation
    cards = (catalog or default_catalog()).cards
    built = [name for name in cards if cards.get(name).implementation]
    raise ResolutionError(
        f"{card.architecture} is known and resolves, but this version cannot load it; implemented: {', '.join(built)}",
        field=MODEL_SETTING,
    )


def probe_libraries(
    backend: str | None = None, environ: Mapping[str, str] | None = None, catalog: Catalog | None = None
) -> frozenset[str]:
    """Libraries of `backend` (as it is set: DEFAULT asks `environ`) that are not installed here; None: of every
    built-in one. Modules are looked up without importing: the edge between the machine and the pure rules."""
    catalog = catalog or default_catalog()
    if backend is None:
        asked: tuple[TransceiverCapability, ...] = catalog.offered()
    else:
        transceiver = catalog.transceiver(effective_backend(backend, environ or {}).name)
        asked = (transceiver,) if transceiver else ()
    return frozenset(name for entry in asked for name in _missing(entry))


def _missing(transceiver: TransceiverCapability) -> Iterator[str]:
    if transceiver.library and not _installed(transceiver.library):
        yield transceiver.library
    if transceiver.system_library and not _loadable(transceiver.system_library):
        yield transceiver.system_library


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that a dotted name lies in is missing
        return False


def _loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
