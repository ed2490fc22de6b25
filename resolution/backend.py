"""Which backend is meant: the setting, or what the environment says when the setting is DEFAULT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.resolution.errors import ResolutionError
from kvferry.resolution.request import BACKEND_SETTING, DEFAULT_BACKEND

ENVIRONMENT_BACKENDS = ("NIXL", "UCX", "MOONCAKE", "MPI")
"""Looked for in this order, as KVFERRY_USE_<name>=1."""

FALLBACK_BACKEND = "NIXL"


@dataclass(frozen=True, slots=True)
class EffectiveBackend:
    """name: never DEFAULT. variable: the environment variable that chose it, empty when none did."""

    name: str
    variable: str = ""
    warnings: tuple[str, ...] = ()


def effective_backend(backend: str, environ: Mapping[str, str]) -> EffectiveBackend:
    """An explicit backend is itself and ignores the environment; DEFAULT asks the environment, then is NIXL."""
    name = backend.strip().upper()
    if not name:
        raise ResolutionError(f"{BACKEND_SETTING} is empty; leave it out for {DEFAULT_BACKEND}", field=BACKEND_SETTING)
    if name != DEFAULT_BACKEND:
        return EffectiveBackend(name)
    chosen = [candidate for candidate in ENVIRONMENT_BACKENDS if environ.get(_variable(candidate)) == "1"]
    if not chosen:
        return EffectiveBackend(FALLBACK_BACKEND)
    variable = _variable(chosen[0])
    ignored = f" ({', '.join(map(_variable, chosen[1:]))} ignored)" if len(chosen) > 1 else ""
    warning = f"{variable}=1 chose backend {chosen[0]}{ignored}; set {BACKEND_SETTING}: {chosen[0]} instead"
    return EffectiveBackend(chosen[0], variable, (warning,))


def _variable(backend: str) -> str:
    return f"KVFERRY_USE_{backend}"
