"""The resolved transceiver/KV pair of a worker, as everybody reads it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Source(Enum):
    """Where one half of a resolution came from."""

    USER = "user"
    MODEL = "model"
    DEFAULT = "default"
    DEMOTED = "demoted"


@dataclass(frozen=True, slots=True)
class Resolution:
    """The pair a worker runs with. runtime and runtime_source are None on backend NONE (aggregated serving).

    backend: the effective one, never DEFAULT. reason: one sentence for operators. disaggregation: "validated"
    or "unvalidated".
    """

    architecture: str
    backend: str
    runtime: str | None
    runtime_source: Source | None
    manager: str
    manager_source: Source
    reason: str
    warnings: tuple[str, ...] = ()
    disaggregation: str = "validated"

    @property
    def transceiver(self) -> str:
        """``NIXL/PYTHON``, or ``-`` on NONE: as the log line shows it."""
        return f"{self.backend}/{self.runtime}" if self.runtime else "-"


def resolved_line(worker: str, role: str, resolution: Resolution, ranks: tuple[int, int] = (1, 1)) -> str:
    """The one line every worker logs when it is ready: machine-readable and stable.

    ranks: tensor and pipeline parallel sizes, which only workers of several ranks mention."""
    sizes = f"tensor_parallel={ranks[0]} pipeline_parallel={ranks[1]} " if ranks != (1, 1) else ""
    runtime_source = resolution.runtime_source.value if resolution.runtime_source else "-"
    # One line that shell-like splitters read back: no line breaks, quotes or escapes inside the quoted reason.
    reason = " ".join(resolution.reason.split()).replace('"', "'").replace("\\", "/")
    return (
        f"resolved worker={worker} role={role} model={resolution.architecture} "
        f"transceiver={resolution.transceiver} transceiver_source={runtime_source} "
        f"kv_manager={resolution.manager} kv_manager_source={resolution.manager_source.value} {sizes}"
        f'reason="{reason}"'
    )
