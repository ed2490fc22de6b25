"""Where a sequence's recurrent state is worth a snapshot, for later prompts to start from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SnapshotRule:
    """Snapshots can be taken at the ends of blocks only. Due are those nearest above every multiple of `every_tokens`,
    so that prompts with a common beginning share most of it, and the last one in a prompt that still leaves a token to
    compute, so that the same prompt, or one that goes on from it, is not computed again."""

    every_tokens: int
    tokens_per_block: int

    def due(self, position: int, prompt_len: int) -> bool:
        """Whether the state that ends at `position` is to be kept."""
        return position > 0 and position == self.next_due(position - 1, prompt_len)

    def next_due(self, position: int, prompt_len: int) -> int:
        """The first position above `position` where a snapshot is due."""
        block = self.tokens_per_block
        step = -(-self.every_tokens // block) * block
        regular = (position // step + 1) * step
        last = (prompt_len - 1) // block * block
        return last if position < last < regular else regular
