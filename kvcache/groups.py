"""Layer groups: which of its blocks a group still needs, and which layouts a manager can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvferry.core import ConfigError, GroupKind, KVLayout

_BOUNDED = (GroupKind.WINDOW, GroupKind.CHUNKED)


class Keeps(Enum):
    """Which blocks of a sequence a layer group needs to its end."""

    ALL = "all"
    WINDOW = "window"
    CHUNK = "chunk"


@dataclass(frozen=True, slots=True)
class GroupRule:
    """window: tokens; 0 where everything is kept."""

    keeps: Keeps
    window: int
    tokens_per_block: int

    @classmethod
    def of(cls, layout: KVLayout) -> GroupRule:
        keeps = {GroupKind.WINDOW: Keeps.WINDOW, GroupKind.CHUNKED: Keeps.CHUNK}.get(layout.kind, Keeps.ALL)
        return cls(keeps, layout.window or 0, layout.tokens_per_block)

    @property
    def keeps_all(self) -> bool:
        return self.keeps is Keeps.ALL

    def first_live_block(self, history: int) -> int:
        """Index of the first block that the token at position `history`, or a later one, can look at."""
        if self.keeps is Keeps.WINDOW:
            return max(0, history + 1 - self.window) // self.tokens_per_block
        if self.keeps is Keeps.CHUNK:
            return history // self.window * self.window // self.tokens_per_block
        return 0


def lead_group(rules: Sequence[GroupRule]) -> int:
    """The group that speaks for a whole block when it is told who holds what: the first that keeps all blocks."""
    return next((group for group, rule in enumerate(rules) if rule.keeps_all), 0)


def check_layouts(version: str, layouts: Sequence[KVLayout]) -> int:
    """Tokens per block, the same in all layer groups. Raises ConfigError naming what the manager cannot hold."""
    if not layouts:
        raise ConfigError("a KV cache needs at least one layer group, the model declares none", field="model")
    sizes = {layout.tokens_per_block for layout in layouts}
    if len(sizes) > 1:
        raise ConfigError(
            f"all layer groups must have the same tokens per block, got {sorted(sizes)}",
            field="kv_cache.tokens_per_block",
        )
    seen: set[int] = set()
    for index, layout in enumerate(layouts):
        _check_layout(version, index, layout)
        twice = seen & set(layout.layers)
        if twice:
            raise ConfigError(f"layers {sorted(twice)} stand in two layer groups", field="model")
        seen.update(layout.layers)
    return layouts[0].tokens_per_block


def _check_layout(version: str, index: int, layout: KVLayout) -> None:
    if layout.kind.is_state:
        raise ConfigError(
            f"KV cache manager {version} holds attention caches (full, window, chunked, mla), "
            f"but layer group {index} is {layout.kind.value} state",
            field="kv_cache.manager",
        )
    if layout.kind in _BOUNDED and (layout.window is None or layout.window < 1):
        raise ConfigError(
            f"layer group {index} is {layout.kind.value}: its window must be at least 1 token, got {layout.window}",
            field="model",
        )
