"""Whether prompts may reuse a cached prefix: the setting, the model's family and what the manager can do."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.resolution.capabilities import ManagerCapability
from kvferry.resolution.card import CardFacts
from kvferry.resolution.errors import ResolutionError
from kvferry.resolution.request import MANAGER_SETTING, REUSE_SETTING


@dataclass(frozen=True, slots=True)
class PrefixReuse:
    enabled: bool
    reason: str
    warnings: tuple[str, ...] = ()


def choose_prefix_reuse(requested: bool | None, facts: CardFacts, manager: ManagerCapability) -> PrefixReuse:
    """Raises ResolutionError when reuse is asked for and cannot be had. requested None: left at its default."""
    if facts.recurrent_state and not manager.state_snapshots:
        return _without_snapshots(requested, facts, manager)
    if requested is not None:
        return PrefixReuse(requested, f"{REUSE_SETTING} is {'on' if requested else 'off'}")
    if facts.prefix_reuse_opt_in:
        return PrefixReuse(False, f"prefix reuse is opt-in for {facts.architecture}")
    return PrefixReuse(True, "on by default")


def _without_snapshots(requested: bool | None, facts: CardFacts, manager: ManagerCapability) -> PrefixReuse:
    why = f"KV manager {manager.version} keeps no snapshots of the recurrent state of {facts.architecture}"
    if requested:
        raise ResolutionError(
            f"{REUSE_SETTING} is on, but {why}; switch {REUSE_SETTING} off, or run a manager that does "
            f"({MANAGER_SETTING} V2)",
            field=REUSE_SETTING,
        )
    if requested is None and not facts.prefix_reuse_opt_in:
        return PrefixReuse(False, why, (f"prefix reuse is switched off: {why}",))
    return PrefixReuse(False, why)
