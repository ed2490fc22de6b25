"""What rank 0 tells the other ranks before every step, in a fixed layout of 64-bit words.

One message: magic, kind, number; the page changes; then, of a step, its tokens, the rows that need logits, and each
chunk with its block tables, which are the same on every rank. Counts precede what they count.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvferry.core import InternalError
from kvferry.engine.spans import AttentionChunk
from kvferry.kvcache import LoggedChange, PageChange

MAGIC = 0x4B56_5354_4550_0001


class MessageKind(Enum):
    """PAGES: nothing but page changes, if any; also sent now and then while there is no work, as a sign of life."""

    STEP = 1
    PAGES = 2
    END = 3


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's tokens, all chunks concatenated. logit_rows: which tokens need logits."""

    token_ids: Sequence[int]
    logit_rows: Sequence[int]
    chunks: Sequence[AttentionChunk]

    @property
    def positions(self) -> list[int]:
        return [position for chunk in self.chunks for position in range(chunk.start, chunk.stop)]


@dataclass(frozen=True, slots=True)
class StepMessage:
    """number: counts messages from 1. plan: of a STEP."""

    kind: MessageKind
    number: int
    changes: Sequence[LoggedChange]
    plan: StepPlan | None = None


def encode_message(message: StepMessage) -> array[int]:
    words = array("q", (MAGIC, message.kind.value, message.number, len(message.changes)))
    for logged in message.changes:
        words.extend((logged.change.value, logged.group))
        _put(words, logged.slots)
    if message.plan is not None:
        _put(words, message.plan.token_ids)
        _put(words, message.plan.logit_rows)
        words.append(len(message.plan.chunks))
        for chunk in message.plan.chunks:
            words.extend((chunk.start, chunk.length, len(chunk.block_tables)))
            for first, table in zip(chunk.first_blocks, chunk.block_tables, strict=True):
                words.append(first)
                _put(words, table)
    return words


def _put(words: array[int], values: Iterable[int]) -> None:
    listed = list(values)
    words.append(len(listed))
    words.extend(listed)


def decode_message(words: Sequence[int]) -> StepMessage:
    """Raises InternalError for anything that `encode_message` did not make."""
    reader = _Reader(words)
    try:
        if reader.one() != MAGIC:
            raise ValueError("another version, or no message at all")
        kind, number = MessageKind(reader.one()), reader.one()
        changes = [
            LoggedChange(PageChange(reader.one()), reader.one(), tuple(reader.counted())) for _ in range(reader.one())
        ]
        plan = _read_plan(reader) if kind is MessageKind.STEP else None
        reader.end()
    except (ValueError, IndexError) as error:
        raise InternalError(f"not a step message: {error}") from None
    return StepMessage(kind, number, changes, plan)


def _read_plan(reader: _Reader) -> StepPlan:
    token_ids, logit_rows = reader.counted(), reader.counted()
    chunks = []
    for _ in range(reader.one()):
        start, length, groups = reader.one(), reader.one(), reader.one()
        tables = [(reader.one(), reader.counted()) for _ in range(groups)]
        chunks.append(
            AttentionChunk(
                start=start,
                length=length,
                block_tables=tuple(table for _, table in tables),
                first_blocks=tuple(first for first, _ in tables),
            )
        )
    return StepPlan(token_ids, logit_rows, chunks)


class _Reader:
    def __init__(self, words: Sequence[int]) -> None:
        self._words = words
        self._at = 0

    def one(self) -> int:
        self._at += 1
        return self._words[self._at - 1]

    def counted(self) -> list[int]:
        count = self.one()
        if not 0 <= count <= len(self._words) - self._at:
            raise ValueError(f"{count} words are announced, {len(self._words) - self._at} are left")
        self._at += count
        return list(self._words[self._at - count : self._at])

    def end(self) -> None:
        if self._at != len(self._words):
            raise ValueError(f"{len(self._words) - self._at} words too many")
