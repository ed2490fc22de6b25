"""Finds stop strings in text that arrives in pieces, one pass, whatever the pieces."""

from __future__ import annotations

from collections.abc import Sequence


class _Pattern:
    """Knuth-Morris-Pratt over one stop string; `matched` is the longest prefix of it the text ends with."""

    __slots__ = ("_failure", "_stop", "matched")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._failure = _failure_table(stop)
        self.matched = 0

    def feed(self, text: str) -> int | None:
        """Index just behind the first complete match in `text`, if there is one."""
        stop, failure, matched = self._stop, self._failure, self.matched
        start = 0
        if matched == 0:  # the common case, at the speed of str.find
            start = text.find(stop[0])
            if start < 0:
                return None
        for index in range(start, len(text)):
            character = text[index]
            while matched and character != stop[matched]:
                matched = failure[matched - 1]
            if character == stop[matched]:
                matched += 1
                if matched == len(stop):
                    self.matched = matched
                    return index + 1
        self.matched = matched
        return None

    @property
    def length(self) -> int:
        return len(self._stop)


class StopMatcher:
    """The stop string whose end comes first wins (of several, the longest), so splits make no difference."""

    __slots__ = ("_patterns", "_seen")

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._seen = 0

    @property
    def held(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        return max((pattern.matched for pattern in self._patterns), default=0)

    def skip(self, nchars: int) -> None:
        """Passes over text that must not be searched."""
        self._seen += nchars

    def feed(self, text: str) -> int | None:
        """Position, in characters from the start of everything fed and skipped, at which a stop string begins."""
        found: list[tuple[int, int]] = []
        for pattern in self._patterns:
            end = pattern.feed(text)
            if end is not None:
                found.append((end, end - pattern.length))
        if found:
            return self._seen + min(found)[1]
        self._seen += len(text)
        return None


def _failure_table(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return table
