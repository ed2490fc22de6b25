"""Percentiles and the report that every comparison writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


def percentile(values: Sequence[float], share: float) -> float | None:
    """share: 0 to 100. None of nothing."""
    return float(np.percentile(values, share)) if len(values) else None


def percentile_ms(seconds: Sequence[float], share: float) -> float | None:
    value = percentile(seconds, share)
    return None if value is None else 1e3 * value


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A system, or a part of a run, without figures, and why."""

    system: str
    reason: str


@dataclass(slots=True)
class Report:
    """machine: what the figures depend on. rows: dataclasses of one kind."""

    machine: dict[str, Any]
    rows: list[Any] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "rows": [asdict(row) for row in self.rows],
            "left_out": [asdict(entry) for entry in self.left_out],
        }

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
