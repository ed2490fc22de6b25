"""How much of the memory each layer group of manager V2 has, and how that changes while serving."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from kvferry.core import ConfigError, KVLayout
from kvferry.kvcache.base import OutOfBlocksError
from kvferry.kvcache.groups import GroupRule
from kvferry.kvcache.pool import slot_counts, withheld_blocks
from kvferry.kvcache.tiering import TieredBooks

MIN_SLABS_PER_GROUP = 2


class PoolShares(ABC):
    """Who may use how many slots. All calls are for the engine thread. moved: shares that changed hands, ever."""

    moved: int = 0

    @abstractmethod
    def relieve(self, needs: Sequence[int]) -> bool:
        """Makes `needs` slots of each group available, where they are not, out of what other groups can spare. False,
        with nothing changed, where they cannot."""

    @abstractmethod
    def could(self, needs: Sequence[int]) -> bool:
        """Whether `needs` slots of each group could be had now."""

    @abstractmethod
    def max_tokens(self) -> int:
        """The longest capacity one request could get with everything to itself, a window a step at a time."""

    @abstractmethod
    def resize(self, nbytes: int) -> None:
        """As `KVCacheManager.resize`."""


class FixedShares(PoolShares):
    """Every group has memory of its own; a quota withholds the same part of each."""

    def __init__(
        self, books: TieredBooks, layouts: Sequence[KVLayout], num_blocks: int, typical_tokens: int | None
    ) -> None:
        self._books = books
        self._layouts = tuple(layouts)
        self._num_blocks = num_blocks
        self._typical_tokens = typical_tokens
        self._withheld: list[list[int]] = [[] for _ in layouts]

    def relieve(self, needs: Sequence[int]) -> bool:
        return False

    def could(self, needs: Sequence[int]) -> bool:
        return all(need <= self._books.ledger.available(group) for group, need in enumerate(needs))

    def max_tokens(self) -> int:
        slots = slot_counts(self._layouts, self._num_blocks, self._typical_tokens)
        return min(
            (count - len(withheld)) * layout.tokens_per_block
            for layout, count, withheld in zip(self._layouts, slots, self._withheld, strict=True)
            if not layout.kind.is_state
        )

    def resize(self, nbytes: int) -> None:
        typical = self._typical_tokens
        blocks = self._num_blocks - withheld_blocks(self._layouts, nbytes, self._num_blocks, typical)
        have, want = (slot_counts(self._layouts, count, typical) for count in (self._num_blocks, blocks))
        more = [h - w - len(withheld) for h, w, withheld in zip(have, want, self._withheld, strict=True)]
        ledger = self._books.ledger
        for group, count in enumerate(more):
            if count > ledger.available(group):
                raise _too_little_free(count, ledger.available(group), nbytes)
        for group, (count, withheld) in enumerate(zip(more, self._withheld, strict=True)):
            if count > 0:
                idle = ledger.idle(group)
                free = len(idle) - ledger.counts(group)[2]
                chosen = [*idle[:free][::-1], *idle[free:]][:count]
                self._books.withhold(group, chosen)
                withheld += chosen
            elif count < 0:
                ledger.give_back(group, withheld[count:])
                del withheld[count:]


@dataclass(frozen=True, slots=True)
class SlabGroup:
    """A group that shares the buffer: how many of its slots a slab holds."""

    group: int
    rule: GroupRule
    per_slab: int


@dataclass(frozen=True, slots=True)
class Move:
    slab: int
    giver: SlabGroup
    taker: SlabGroup


class SlabShares(PoolShares):
    """Every group sees one buffer, cut into slots of its own size. A *slab* is a stretch of it that is a whole number
    of slots of every group; it belongs to one group at a time, and the slots other groups have there are withheld.

    The first division is by expected use: a request of `typical_tokens` holds all its blocks in groups that keep
    all, and in a window those of the window and of one step. A group that is short gets slabs in which others hold
    nothing: empty ones first, then those whose cached blocks eviction would come to first.
    """

    def __init__(
        self,
        books: TieredBooks,
        layouts: Sequence[KVLayout],
        rules: Sequence[GroupRule],
        nbytes: int,
        typical_tokens: int,
        step_tokens: int,
    ) -> None:
        """nbytes: of the buffer, whole slabs. All slots of the ledger are free and belong to nobody yet."""
        self._books = books
        self._slab_nbytes = slab_nbytes(layouts)
        self._groups = [
            SlabGroup(group, rule, self._slab_nbytes // layout.slot_nbytes)
            for group, (layout, rule) in enumerate(zip(layouts, rules, strict=True))
        ]
        self._step_tokens = step_tokens
        self._num_slabs = nbytes // self._slab_nbytes
        weights = [
            rule.blocks_in_use(typical_tokens, step_tokens) / each.per_slab
            for each, rule in zip(self._groups, rules, strict=True)
        ]
        owners = [g for g, n in zip(self._groups, divide(self._num_slabs, weights), strict=True) for _ in range(n)]
        self._retired: list[int] = []  # slabs that belong to nobody: a quota keeps them from use
        for each in self._groups:
            self._books.ledger.withhold(
                each.group,
                [slot for slab, owner in enumerate(owners) if owner is not each for slot in _slots(each, slab)],
            )

    def relieve(self, needs: Sequence[int]) -> bool:
        if not self.could(needs):
            return False
        for move in self._plan(needs):
            self._books.withhold(move.giver.group, _slots(move.giver, move.slab))
            self._books.ledger.give_back(move.taker.group, _slots(move.taker, move.slab))
            self.moved += 1
        return True

    def could(self, needs: Sequence[int]) -> bool:
        spare = self._spare(needs)
        wanted = sum(count for _, count in self._wanted(spare))
        return not wanted or wanted <= sum(self._can_give(each, spare) for each in self._groups)

    def _spare(self, needs: Sequence[int]) -> list[int]:
        """Slots each group has beyond its needs; below 0 what it lacks."""
        return [self._books.ledger.available(each.group) - needs[each.group] for each in self._groups]

    def _wanted(self, spare: Sequence[int]) -> list[tuple[SlabGroup, int]]:
        """Slabs that would end each group's lack."""
        return [(each, -(spare[each.group] // each.per_slab)) for each in self._groups if spare[each.group] < 0]

    def _can_give(self, each: SlabGroup, spare: Sequence[int]) -> int:
        return max(0, min(spare[each.group] // each.per_slab, self._books.ledger.idle_slabs(each.group)))

    def _plan(self, needs: Sequence[int]) -> list[Move]:
        """The moves after which every group has its `needs`, which can be."""
        spare = self._spare(needs)
        takers = [each for each, count in self._wanted(spare) for _ in range(count)]
        givers = [(each, min(len(takers), self._can_give(each, spare))) for each in self._groups]
        offers = self._offers([(each, most) for each, most in givers if most])
        return [Move(slab, giver, taker) for (giver, slab), taker in zip(offers, takers, strict=False)]

    def _offers(self, givers: Sequence[tuple[SlabGroup, int]]) -> list[tuple[SlabGroup, int]]:
        """Idle slabs, up to so many of each group: empty ones first, the others by turns."""
        ranked = [
            (cached, turn, each.group, slab)
            for each, most in givers
            for turn, (cached, slab) in enumerate(self._books.ledger.first_idle_slabs(each.group, most))
        ]
        return [(self._groups[group], slab) for _, _, group, slab in sorted(ranked)]

    def max_tokens(self) -> int:
        size = self._groups[0].rule.tokens_per_block
        slabs = self._num_slabs - len(self._retired)
        few, many = 0, slabs * max(each.per_slab for each in self._groups)
        while few < many:  # the most blocks whose slabs there are
            blocks = -(-(few + many) // 2)
            in_use = [each.rule.blocks_in_use(blocks * size, self._step_tokens) for each in self._groups]
            if sum(-(-n // each.per_slab) for n, each in zip(in_use, self._groups, strict=True)) <= slabs:
                few = blocks
            else:
                many = blocks - 1
        return few * size

    def resize(self, nbytes: int) -> None:
        slabs = nbytes // self._slab_nbytes
        least = len(self._groups) * MIN_SLABS_PER_GROUP
        if not least <= slabs <= self._num_slabs:
            raise ConfigError(
                f"kv_cache.bytes cannot be {nbytes} while serving: the layer groups share {self._num_slabs} pieces of "
                f"{self._slab_nbytes} bytes and need {least}",
                field="kv_cache.bytes",
            )
        surplus = self._num_slabs - len(self._retired) - slabs
        idle = sum(self._books.ledger.idle_slabs(each.group) for each in self._groups)
        if surplus > idle:
            raise _too_little_free(surplus, idle, nbytes)
        for giver, slab in self._offers([(each, max(0, surplus)) for each in self._groups])[: max(0, surplus)]:
            self._books.withhold(giver.group, _slots(giver, slab))
            self._retired.append(slab)
        for _ in range(-surplus):
            self._give(self._retired.pop())

    def _give(self, slab: int) -> None:
        """A retired slab goes to the group with the least available; others get it from there when they need it."""
        taker = min(self._groups, key=lambda each: self._books.ledger.available(each.group) / each.per_slab)
        self._books.ledger.give_back(taker.group, _slots(taker, slab))


def _slots(each: SlabGroup, slab: int) -> range:
    return range(slab * each.per_slab, (slab + 1) * each.per_slab)


def _too_little_free(needed: int, available: int, nbytes: int) -> OutOfBlocksError:
    return OutOfBlocksError(
        f"{needed} more KV blocks would have to be free to shrink to {nbytes} bytes, {available} are: "
        "try again when fewer requests are running",
        field="kv_cache.bytes",
    )


def slab_nbytes(layouts: Sequence[KVLayout]) -> int:
    return lcm(*(layout.slot_nbytes for layout in layouts))


def shareable(layouts: Sequence[KVLayout], rules: Sequence[GroupRule], nbytes: int) -> bool:
    """Whether groups gain by sharing one buffer of `nbytes`: some keep all, some do not, and it has slabs enough."""
    if not any(rule.is_window for rule in rules) or not any(rule.keeps_all for rule in rules):
        return False
    return not any(rule.is_state for rule in rules) and nbytes // slab_nbytes(layouts) >= 2 * MIN_SLABS_PER_GROUP * len(
        rules
    )


def divide(slabs: int, weights: Sequence[float]) -> list[int]:
    """`slabs` by weight, MIN_SLABS_PER_GROUP at least, the largest remainders rounded up."""
    rest = slabs - MIN_SLABS_PER_GROUP * len(weights)
    exact = [rest * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda which: counts[which] - exact[which])
    for which in by_remainder[: rest - sum(counts)]:
        counts[which] += 1
    return [MIN_SLABS_PER_GROUP + count for count in counts]
