"""What the resolver is asked: the operator's settings, the model's config and the features in use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"
NONE_BACKEND = "NONE"
DEFAULT_BACKEND = "DEFAULT"
TWO_MODEL = "two-model"

BACKEND_SETTING = "transceiver.backend"
RUNTIME_SETTING = "transceiver.runtime"
TIMEOUT_SETTING = "transceiver.transfer_timeout_ms"
MANAGER_SETTING = "kv_cache.manager"
REUSE_SETTING = "kv_cache.prefix_reuse"
BEAM_SETTING = "beam_width"
CONNECTOR_SETTING = "kv_cache.connector"
SPECULATIVE_SETTING = "speculative"


@dataclass(frozen=True, slots=True)
class ResolveRequest:
    """Everything a resolution depends on: equal requests resolve equally, on every worker.

    architecture: the checkpoint's original ``architectures[0]`` (empty: taken from config). config: its
    config.json, the outer one of a wrapper. environ: where backend DEFAULT looks for KVFERRY_USE_*.
    prefix_reuse None: left at its default. missing_libraries: what `probe_libraries` did not find here.
    """

    architecture: str
    config: Mapping[str, Any] = field(default_factory=dict)
    backend: str = DEFAULT_BACKEND
    runtime: str = AUTO
    manager: str = AUTO
    transfer_timeout_ms: int | None = 60_000
    beam_width: int = 1
    kv_connector: str | None = None
    speculative: str | None = None
    prefix_reuse: bool | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    missing_libraries: frozenset[str] = frozenset()
