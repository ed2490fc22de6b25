"""How many tokens one step may compute: pure values, no clocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Protocol

MIN_CHUNK_TOKENS = 16
_SMOOTHING = 0.3
_REMEMBERED = 5
"""Steps whose median counts: one or two that another process held up say nothing about the next."""


class StepBudget:
    """Follows the measured cost of a token so that a step stays under a time limit.

    The limit is what a cancel or a new stream waits for at most; but where a step takes long even without a prompt in
    it, twice as long is allowed, since shorter chunks would cost throughput and gain little. Starts low and grows, so
    that the first step of a slow machine does not overshoot.
    """

    def __init__(self, most_tokens: int, max_step_ms: float) -> None:
        self._most_tokens = most_tokens
        self._max_step_s = max_step_ms / 1000.0
        self._tokens = min(most_tokens, 64)
        self._affordable: deque[float] = deque(maxlen=_REMEMBERED)
        self._light_s: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def tokens(self) -> int:
        return self._tokens

    def observe(self, tokens: int, seconds: float) -> None:
        """Notes that a step of `tokens` took `seconds`."""
        if seconds <= 0:
            return
        if tokens < min(MIN_CHUNK_TOKENS, self._tokens):
            self._light_s.append(seconds)
            return
        limit_s = max(self._max_step_s, 2.0 * median(self._light_s)) if self._light_s else self._max_step_s
        # Much of a short chunk's time is what any step costs, which a longer one would not pay twice.
        if 2 * tokens < self._tokens and seconds <= limit_s:
            return
        # Aim below the limit: the next chunk attends over a longer context than this one did.
        self._affordable.append(tokens * (0.8 * limit_s) / seconds)
        target = min(median(self._affordable), 2.0 * self._tokens)
        smoothed = self._tokens + _SMOOTHING * (target - self._tokens) if target > self._tokens else target
        self._tokens = max(MIN_CHUNK_TOKENS, min(self._most_tokens, int(smoothed)))


class Pending(Protocol):
    """A sequence with tokens left to compute."""

    @property
    def uncomputed(self) -> int: ...


def plan_chunks(pending: Iterable[Pending], budget: int, most: Sequence[int] | None = None) -> list[int]:
    """How many tokens of each pending sequence to compute now, in order, within `budget`. most: of each; None: all.

    Sequences with one token left (those that are decoding) come first whatever their place: they always get
    it, so that a long prompt never stalls a running stream. The rest is shared first come, first served.
    """
    wanted = [sequence.uncomputed for sequence in pending]
    chunks = [1 if tokens == 1 else 0 for tokens in wanted]
    if most is not None:
        wanted = [min(tokens, limit) for tokens, limit in zip(wanted, most, strict=True)]
    left = max(budget - sum(chunks), MIN_CHUNK_TOKENS)
    for index, tokens in enumerate(wanted):
        if chunks[index] == 0 and left > 0:
            chunks[index] = min(tokens, left)
            left -= chunks[index]
    return chunks
