"""What keeps a choice from being taken, and what the operator can change about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.resolution.capabilities import TransceiverCapability


@dataclass(frozen=True, slots=True)
class Obstacle:
    """`setting` is what to change, `remedy` to what. `because`: how it came to this, for errors that stand alone."""

    setting: str
    why: str
    remedy: str
    because: str = ""

    @property
    def explanation(self) -> str:
        return f"{self.why} ({self.because})" if self.because else self.why


def one_of(names: Iterable[str]) -> str:
    return " or ".join(names)


def routes_for(
    offered: Iterable[TransceiverCapability], *, runtime: str | None = None, manager: str | None = None
) -> list[str]:
    """``BACKEND/RUNTIME`` of every offered route with this runtime, or driving this manager."""
    return [
        f"{transceiver.backend}/{capability.runtime}"
        for transceiver in offered
        for capability in transceiver.runtimes
        if runtime in (None, capability.runtime) and (manager is None or manager in capability.managers)
    ]
