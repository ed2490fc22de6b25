from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.core import InvalidRequestError
from kvferry.text import OutputText, Tokenizer

relaxed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXT = "Hello wörld 😀 こんにちは. STOP after"


@pytest.fixture(params=["byte_level_dir", "byte_fallback_dir"], scope="session")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.load(request.getfixturevalue(request.param))


def _run(output: OutputText, ids: list[int]) -> str:
    return "".join(output.push([token_id]) for token_id in ids) + output.flush()


def test_without_stops_everything_is_sent(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, ())
    assert _run(output, tokenizer.encode(TEXT)) == TEXT
    assert not output.stopped


@pytest.mark.parametrize("stop", ["STOP", "😀", "は. S", "P", "Hello"])
def test_text_ends_before_the_stop_string(tokenizer: Tokenizer, stop: str) -> None:
    output = OutputText(tokenizer, [stop, "never there"])
    assert _run(output, tokenizer.encode(TEXT)) == TEXT[: TEXT.index(stop)]
    assert output.stopped
    assert output.push(tokenizer.encode("more")) == ""
    assert output.flush() == ""


def test_beginning_of_a_stop_string_is_held_back_until_decided(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, ["xyzzy"])
    sent = [output.push([token_id]) for token_id in tokenizer.encode("a x")]
    assert "".join(sent) == "a "
    assert output.push(tokenizer.encode("y")[-1:]) == ""
    assert output.push(tokenizer.encode("q")[-1:]) == "xyq"
    assert not output.stopped


def test_held_back_text_comes_with_flush(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, ["xyzzy"])
    assert output.push(tokenizer.encode("axyz")) == "a"
    assert output.flush() == "xyz"


def test_stop_strings_do_not_count_before_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("stop. stop. x")
    once = tokenizer.encode("stop. s")
    output = OutputText(tokenizer, ["stop."], min_tokens=len(once) - 1)
    assert _run(output, ids) == "stop. "
    assert output.stopped
    assert OutputText(tokenizer, ["stop."], min_tokens=len(once) - 1).push(ids) == "stop. "


@relaxed
@given(
    text=st.text(alphabet="ab é😀世", max_size=24),
    stops=st.lists(st.text(alphabet="ab é😀", min_size=1, max_size=4), max_size=3),
    splits=st.lists(st.integers(1, 5), max_size=10),
    hand_over=st.integers(0, 24),
    min_tokens=st.integers(0, 4),
)
def test_any_split_and_any_hand_over_give_the_same_text(
    tokenizer: Tokenizer, text: str, stops: list[str], splits: list[int], hand_over: int, min_tokens: int
) -> None:
    ids = tokenizer.encode(text)
    expected = _run(OutputText(tokenizer, stops, min_tokens=min_tokens), ids)
    if min_tokens == 0:
        ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
        assert len(expected) <= min(ends, default=len(text))

    output = OutputText(tokenizer, stops, min_tokens=min_tokens)
    sent, at = "", 0
    for size in splits:
        if at >= min(hand_over, len(ids)) or output.stopped:
            break
        part = ids[at : min(at + size, hand_over)]
        sent += output.push(part)
        at += len(part)
    successor = OutputText(tokenizer, stops, ids[:at], len(sent), min_tokens=min_tokens)
    assert sent + _run(successor, ids[at:]) == expected


def test_successor_sends_what_the_first_worker_kept_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀")
    first = OutputText(tokenizer, ["😀😀"])
    sent = first.push(ids)
    assert sent == "a"
    successor = OutputText(tokenizer, ["😀😀"], ids, len(sent))
    assert successor.push(tokenizer.encode("b")[-1:]) == "😀b"


def test_sent_chars_beyond_the_text_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        OutputText(tokenizer, (), tokenizer.encode("abc"), 4)
    assert caught.value.field == "sent_text_chars"
    assert "3 characters" in caught.value.message


def test_cost_per_token_does_not_grow_with_the_output(tokenizer: Tokenizer) -> None:
    """Nothing that was sent is kept, so there is nothing to go through again."""
    output = OutputText(tokenizer, ["never"])
    ids = tokenizer.encode("some words 😀 ")
    for _ in range(200):
        output.push(ids)
    assert len(output._pending) < 8
