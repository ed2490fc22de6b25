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
    STATE = "state"


@dataclass(frozen=True, slots=True)
class GroupRule:
    """window: tokens; 0 where everything is kept."""

    keeps: Keeps
    window: int
    tokens_per_block: int

    @classmethod
    def of(cls, layout: KVLayout, tokens_per_block: int) -> GroupRule:
        if layout.kind.is_state:
            return cls(Keeps.STATE, 0, tokens_per_block)
        keeps = {GroupKind.WINDOW: Keeps.WINDOW, GroupKind.CHUNKED: Keeps.CHUNK}.get(layout.kind, Keeps.ALL)
        return cls(keeps, layout.window or 0, tokens_per_block)

    @property
    def keeps_all(self) -> bool:
        return self.keeps is Keeps.ALL

    @property
    def is_state(self) -> bool:
        """One live slot per cache and, in the prefix index, snapshots of it at the ends of some blocks."""
        return self.keeps is Keeps.STATE

    @property
    def is_window(self) -> bool:
        return self.keeps in (Keeps.WINDOW, Keeps.CHUNK)

    def blocks_in_use(self, tokens: int, step_tokens: int) -> int:
        """The most blocks a request of `tokens` tokens holds at a time, computing `step_tokens` in a step."""
        blocks = -(-tokens // self.tokens_per_block)
        if self.is_window:
            return min(blocks, -(-(self.window + step_tokens) // self.tokens_per_block) + 1)
        return min(blocks, 1) if self.is_state else blocks

    def first_live_block(self, history: int) -> int:
        """Index of the first block that the token at position `history`, or a later one, can look at."""
        if self.keeps is Keeps.WINDOW:
            return max(0, history + 1 - self.window) // self.tokens_per_block
        if self.keeps is Keeps.CHUNK:
            return history // self.window * self.window // self.tokens_per_block
        if self.keeps is Keeps.STATE:  # the state after block n is all that block n + 1 needs
            return max(0, -(-history // self.tokens_per_block) - 1)
        return 0


def lead_group(rules: Sequence[GroupRule]) -> int:
    """The group that speaks for a whole block when it is told who holds what: the first that keeps all blocks."""
    return next((group for group, rule in enumerate(rules) if rule.keeps_all), 0)


def rules_of(layouts: Sequence[KVLayout], tokens_per_block: int) -> list[GroupRule]:
    return [GroupRule.of(layout, tokens_per_block) for layout in layouts]


def check_layouts(layouts: Sequence[KVLayout]) -> int:
    """Tokens per block, the same in all attention groups. Raises ConfigError naming what no manager can hold."""
    if not layouts:
        raise ConfigError("a KV cache needs at least one layer group, the model declares none", field="model")
    sizes = {layout.tokens_per_block for layout in layouts if not layout.kind.is_state}
    if not sizes:
        raise ConfigError(
            "a KV cache needs at least one attention layer group, the model has state only", field="model"
        )
    if len(sizes) > 1:
        raise ConfigError(
            f"all layer groups must have the same tokens per block, got {sorted(sizes)}",
            field="kv_cache.tokens_per_block",
        )
    seen: set[tuple[int, GroupKind | None]] = set()
    for index, layout in enumerate(layouts):
        _check_window(index, layout)
        # A Mamba layer has a conv and an SSM state, one of each.
        held = {(layer, layout.kind if layout.kind.is_state else None) for layer in layout.layers}
        twice = sorted(layer for layer, _ in seen & held)
        if twice:
            raise ConfigError(f"layers {twice} stand in two layer groups", field="model")
        seen |= held
    return sizes.pop()


def _check_window(index: int, layout: KVLayout) -> None:
    if layout.kind in _BOUNDED and (layout.window is None or layout.window < 1):
        raise ConfigError(
            f"layer group {index} is {layout.kind.value}: its window must be at least 1 token, got {layout.window}",
            field="model",
        )
