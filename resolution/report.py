"""A resolution as plain data, for everything that prints it: the command, the status call, /server_info."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.core import ConfigError, Resolution


def resolution_dict(resolution: Resolution) -> dict[str, Any]:
    """JSON-ready. runtime and runtime_source are None on backend NONE."""
    return {
        "architecture": resolution.architecture,
        "backend": resolution.backend,
        "runtime": resolution.runtime,
        "runtime_source": resolution.runtime_source.value if resolution.runtime_source else None,
        "manager": resolution.manager,
        "manager_source": resolution.manager_source.value,
        "reason": resolution.reason,
        "warnings": list(resolution.warnings),
        "disaggregation": resolution.disaggregation,
        "transceiver": resolution.transceiver,
        "error": None,
    }


def failed_resolution_dict(
    architecture: str, error: ConfigError, warnings: Sequence[str] = (), backend: str | None = None
) -> dict[str, Any]:
    """The same keys when nothing could be resolved: `error` says why, `field` which setting to change.

    backend: the one that was asked for.
    """
    empty = dict.fromkeys(
        ("runtime", "runtime_source", "manager", "manager_source", "reason", "disaggregation", "transceiver")
    )
    return {
        "architecture": architecture,
        "backend": backend,
        **empty,
        "warnings": list(warnings),
        "error": error.message,
        "field": error.field,
    }


def worker_info_labels(worker: str, role: str, resolution: Resolution) -> dict[str, str]:
    """Labels of the ``kvferry_worker_info`` metric: what `resolved_line` says, without the sentence."""
    return {
        "worker": worker,
        "role": role,
        "model": resolution.architecture,
        "transceiver": resolution.transceiver,
        "transceiver_source": resolution.runtime_source.value if resolution.runtime_source else "-",
        "kv_manager": resolution.manager,
        "kv_manager_source": resolution.manager_source.value,
    }
