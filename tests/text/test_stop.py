from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.text.stop import StopMatcher


def _oracle(text: str, stops: list[str]) -> int | None:
    """Begin of the match whose end comes first, of several the longest."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return end - max(map(len, matching))
    return None


def _held(text: str, stops: list[str]) -> int:
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


@given(
    parts=st.lists(st.text(alphabet="ab", max_size=6), max_size=8),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4),
)
def test_agrees_with_the_plain_definition(parts: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = ""
    for part in parts:
        seen += part
        found = matcher.feed(part)
        assert found == _oracle(seen, stops)
        if found is not None:
            return
        assert matcher.held == _held(seen, stops)


def test_skipped_text_is_counted_but_not_searched() -> None:
    matcher = StopMatcher(["END"])
    matcher.skip(len("END "))
    assert matcher.feed("of the E") is None
    assert matcher.held == 1
    assert matcher.feed("ND") == len("END of the ")
