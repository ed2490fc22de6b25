"""What a step computes of each sequence, and which of its blocks matter to one layer group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core import GroupKind, KVLayout


@dataclass(frozen=True, slots=True)
class AttentionChunk:
    """The tokens of one sequence that a step computes: positions [start, start + length).

    block_tables: per layer group, slot ids in token order, enough for start + length tokens; more are ignored.
    first_blocks: per group, the index of its table's first block (a window may have dropped earlier ones).
    """

    start: int
    length: int
    block_tables: tuple[Sequence[int], ...]
    first_blocks: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Span:
    """One chunk in one group. row: its first row in the step; blocks: the slots it reads, oldest first;
    origin: the position their first token has; lowest: the first position its first token attends to."""

    row: int
    start: int
    length: int
    blocks: tuple[int, ...]
    origin: int
    lowest: int

    @property
    def stop(self) -> int:
        return self.start + self.length


def spans_of(layout: KVLayout, chunks: Sequence[AttentionChunk], group: int) -> list[Span]:
    """Cuts each table to the blocks that matter: none past the last token, none wholly out of the window."""
    block, spans, row = layout.tokens_per_block, [], 0
    for chunk in chunks:
        first = chunk.first_blocks[group]
        lowest = lowest_attended(layout, chunk.start)
        begin, end = max(first, lowest // block), layout.blocks_for(chunk.stop)
        blocks = tuple(chunk.block_tables[group][begin - first : end - first])
        assert len(blocks) == end - begin, "the block table covers the step's tokens"
        assert first * block <= lowest, "the block table reaches back to the window's start"
        spans.append(Span(row, chunk.start, chunk.length, blocks, begin * block, lowest))
        row += chunk.length
    return spans


def lowest_attended(layout: KVLayout, position: int) -> int:
    """The first position that the token at `position` attends to."""
    if layout.window is None:
        return 0
    if layout.kind is GroupKind.CHUNKED:
        return position // layout.window * layout.window
    return max(0, position + 1 - layout.window)
