from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.text import Tokenizer
from kvferry.text.pieces import ByteStream, WindowStream

relaxed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[start:stop] for start, stop in pairwise(edges)]


@relaxed
@given(ids=st.lists(st.integers(0, 430), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=12))
def test_byte_level_equals_the_library_for_any_ids_and_any_split(
    byte_level_dir: Path, ids: list[int], cuts: list[int]
) -> None:
    stream = Tokenizer.load(byte_level_dir).text_stream()
    assert isinstance(stream, ByteStream)
    text = "".join(stream.feed(part) for part in _split(ids, cuts)) + stream.finish()
    library = tokenizers.Tokenizer.from_file(str(byte_level_dir / "tokenizer.json"))
    assert text == library.decode(ids, skip_special_tokens=True)


@relaxed
@given(text=st.text(alphabet="abc xyzé世😀界🏳️‍🌈\n", max_size=30), cuts=st.lists(st.integers(0, 90), max_size=12))
def test_byte_fallback_equals_the_library_for_text(byte_fallback_dir: Path, text: str, cuts: list[int]) -> None:
    tokenizer = Tokenizer.load(byte_fallback_dir)
    ids = tokenizer.encode(text)
    stream = tokenizer.text_stream()
    assert isinstance(stream, ByteStream)
    streamed = "".join(stream.feed(part) for part in _split(ids, cuts)) + stream.finish()
    library = tokenizers.Tokenizer.from_file(str(byte_fallback_dir / "tokenizer.json"))
    assert streamed == library.decode(ids) == text


@relaxed
@given(ids=st.lists(st.integers(0, 330), max_size=30), cuts=st.lists(st.integers(0, 30), max_size=8))
def test_byte_fallback_is_the_same_for_any_ids_and_any_split(
    byte_fallback_dir: Path, ids: list[int], cuts: list[int]
) -> None:
    tokenizer = Tokenizer.load(byte_fallback_dir)
    stream = tokenizer.text_stream()
    assert "".join(stream.feed(part) for part in _split(ids, cuts)) + stream.finish() == tokenizer.decode(ids)


def test_unfinished_character_waits_and_never_shows_a_replacement(byte_fallback_dir: Path) -> None:
    tokenizer = Tokenizer.load(byte_fallback_dir)
    ids = tokenizer.encode("😀")
    assert len(ids) == 5  # the leading space, four bytes
    stream = tokenizer.text_stream()
    assert [stream.feed([token_id]) for token_id in ids] == ["", "", "", "", "😀"]
    assert stream.finish() == ""
    stream.feed(ids[1:3])
    assert stream.finish() == "\ufffd"


def test_bytes_that_cannot_become_a_character_show_at_once(byte_fallback_dir: Path) -> None:
    tokenizer = Tokenizer.load(byte_fallback_dir)
    first = tokenizer.encode("😀")[1]
    stream = tokenizer.text_stream()
    assert stream.feed([first]) == ""
    assert stream.feed(tokenizer.encode("a")[-1:]) == "\ufffda"


def test_special_tokens_have_no_text_and_unknown_ids_neither(byte_level_dir: Path) -> None:
    tokenizer = Tokenizer.load(byte_level_dir)
    ids = tokenizer.encode("<|im_start|>é<|im_end|><tool→call>")
    assert tokenizer.decode([*ids, 100_000]) == "é<tool→call>"


def test_other_decoders_go_through_a_window(word_dir: Path) -> None:
    tokenizer = Tokenizer.load(word_dir)
    stream = tokenizer.text_stream()
    assert isinstance(stream, WindowStream)
    ids = tokenizer.encode("the fox jumps over the dog")
    texts = [stream.feed([token_id]) for token_id in ids]
    assert texts == ["the", " fox", " jump", "s", " over", " the", " dog"]
    assert "".join(texts) == tokenizer.decode(ids)


def test_window_stays_short(word_dir: Path) -> None:
    stream = Tokenizer.load(word_dir).text_stream()
    assert isinstance(stream, WindowStream)
    stream.feed([4] * 500)
    assert len(stream._window) <= 2


@pytest.mark.parametrize("name", ["byte_level_dir", "byte_fallback_dir"])
def test_streams_of_one_tokenizer_do_not_mix(request: pytest.FixtureRequest, name: str) -> None:
    tokenizer = Tokenizer.load(request.getfixturevalue(name))
    one, two = tokenizer.text_stream(), tokenizer.text_stream()
    ids = tokenizer.encode("a😀b")
    parts = [(one.feed([token_id]), two.feed([token_id])) for token_id in ids]
    assert "".join(first for first, _ in parts) == "".join(second for _, second in parts) == "a😀b"
