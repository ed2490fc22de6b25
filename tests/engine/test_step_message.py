"""What rank 0 tells the others arrives as it was said, and nothing else is taken for it."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core import InternalError
from kvferry.engine.spans import AttentionChunk
from kvferry.engine.step_message import MessageKind, StepMessage, StepPlan, decode_message, encode_message
from kvferry.kvcache import LoggedChange, PageChange

_NUMBERS = st.integers(0, 1 << 40)
_LISTS = st.lists(_NUMBERS, max_size=6)
_CHANGES = st.builds(LoggedChange, st.sampled_from(PageChange), st.integers(0, 3), _LISTS.map(tuple))


@st.composite
def _messages(draw: st.DrawFn) -> StepMessage:
    kind, groups = draw(st.sampled_from(MessageKind)), draw(st.integers(1, 3))
    plan = None
    if kind is MessageKind.STEP:
        chunks = [
            AttentionChunk(
                draw(_NUMBERS),
                draw(st.integers(1, 5)),
                tuple(draw(_LISTS) for _ in range(groups)),
                tuple(draw(_NUMBERS) for _ in range(groups)),
            )
            for _ in range(draw(st.integers(1, 3)))
        ]
        plan = StepPlan(draw(_LISTS), draw(_LISTS), chunks)
    return StepMessage(kind, draw(_NUMBERS), draw(st.lists(_CHANGES, max_size=3)), plan)


@given(_messages())
def test_a_message_arrives_as_it_was_said(message: StepMessage) -> None:
    assert decode_message(list(encode_message(message))) == message


@given(_messages(), st.data())
def test_a_message_cut_short_or_too_long_is_refused(message: StepMessage, data: st.DataObject) -> None:
    words = list(encode_message(message))
    with pytest.raises(InternalError, match="not a step message"):
        decode_message(words[: data.draw(st.integers(0, len(words) - 1))])
    with pytest.raises(InternalError, match="1 words too many"):
        decode_message([*words, 7])


@pytest.mark.parametrize("words", [[], [1, 1, 1, 0], list(array("q", (0x4B56_5354_4550_0001, 9, 1, 0)))])
def test_anything_else_is_refused(words: list[int]) -> None:
    with pytest.raises(InternalError, match="not a step message"):
        decode_message(words)


def test_positions_are_those_of_the_chunks() -> None:
    chunks = [AttentionChunk(5, 2, ((0,),), (0,)), AttentionChunk(0, 3, ((1,),), (0,))]
    assert StepPlan([1, 2, 3, 4, 5], [1], chunks).positions == [5, 6, 0, 1, 2]
