"""What the rules can draw on: cards, transceivers (third-party ones included) and managers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points

from kvferry.core import ConfigError, Registry
from kvferry.resolution.architectures import CARDS
from kvferry.resolution.capabilities import (
    BUILTIN_MANAGERS,
    BUILTIN_TRANSCEIVERS,
    ManagerCapability,
    TransceiverCapability,
)
from kvferry.resolution.card import Card
from kvferry.resolution.connectors import connector_registry, default_connectors
from kvferry.resolution.errors import ResolutionError
from kvferry.resolution.request import BACKEND_SETTING, DEFAULT_BACKEND, MANAGER_SETTING, NONE_BACKEND

ENTRY_POINT_GROUP = "kvferry.transceivers"
"""Entry points of this group are named after a backend and give its TransceiverCapability."""

TransceiverSource = Callable[[], TransceiverCapability]
"""Loads a declaration. Third-party ones are imported when their backend is asked for, not before."""


def transceiver_registry(third_party: Iterable[EntryPoint] = ()) -> Registry[TransceiverSource]:
    registry: Registry[TransceiverSource] = Registry("transceiver backend", BACKEND_SETTING)
    for capability in BUILTIN_TRANSCEIVERS:
        registry.register(capability.backend, partial(_declared, capability))
    for entry_point in third_party:
        if entry_point.name.upper() in registry:
            raise ResolutionError(f"{_describe(entry_point)} is registered twice", field=BACKEND_SETTING)
        registry.register(entry_point.name.upper(), partial(load_third_party, entry_point))
    return registry


def _declared(capability: TransceiverCapability) -> TransceiverCapability:
    return capability


def load_third_party(entry_point: EntryPoint) -> TransceiverCapability:
    """Imports what `entry_point` names. Raises ResolutionError naming the distribution when it is no declaration."""
    where = _describe(entry_point)
    try:
        capability = entry_point.load()
    except Exception as error:
        raise ResolutionError(f"{where} cannot be loaded: {error}", field=BACKEND_SETTING) from error
    if not isinstance(capability, TransceiverCapability):
        raise ResolutionError(
            f"{where} must be a TransceiverCapability, not {type(capability).__name__}", field=BACKEND_SETTING
        )
    if capability.backend != entry_point.name.upper():
        raise ResolutionError(f"{where} declares itself as {capability.backend!r}", field=BACKEND_SETTING)
    return capability


def _describe(entry_point: EntryPoint) -> str:
    distribution = entry_point.dist.name if entry_point.dist else "an unknown distribution"
    return f"transceiver backend {entry_point.name!r} ({entry_point.value}, from {distribution})"


def _builtin_managers() -> Registry[ManagerCapability]:
    registry: Registry[ManagerCapability] = Registry("KV cache manager", MANAGER_SETTING)
    for capability in BUILTIN_MANAGERS:
        registry.register(capability.version, capability)
    return registry


@dataclass(frozen=True, slots=True)
class Catalog:
    cards: Registry[Card] = CARDS
    transceivers: Registry[TransceiverSource] = field(default_factory=transceiver_registry)
    managers: Registry[ManagerCapability] = field(default_factory=_builtin_managers)
    connectors: Registry[str] = field(default_factory=connector_registry)

    def transceiver(self, backend: str) -> TransceiverCapability | None:
        """None on NONE. Raises ResolutionError naming the choices when `backend` is unknown."""
        if backend == NONE_BACKEND:
            return None
        try:
            load = self.transceivers.get(backend)
        except ConfigError as error:
            raise ResolutionError(
                f"{error.message}, {DEFAULT_BACKEND}, {NONE_BACKEND} ({BACKEND_SETTING})", field=BACKEND_SETTING
            ) from None
        return load()

    def offered(self) -> tuple[TransceiverCapability, ...]:
        """Built-in backends an error may recommend; third-party ones are not imported only to be recommended."""
        return tuple(capability for capability in BUILTIN_TRANSCEIVERS if not capability.refused)


@cache
def default_catalog() -> Catalog:
    """The built-in declarations and those of installed third-party packages."""
    return Catalog(
        transceivers=transceiver_registry(entry_points(group=ENTRY_POINT_GROUP)), connectors=default_connectors()
    )
