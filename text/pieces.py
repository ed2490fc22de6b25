"""Token ids to text, as they come: what a tokenizer's decoder does, made incremental.

The common decoders (byte-level BPE; SentencePiece-style BPE with byte fallback) map every token to bytes on its
own, so a stream is a UTF-8 decoder over a table of pieces: constant time per token and independent of how the
ids were split into calls. For any other decoder a short window of tokens is decoded again.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
# An unfinished character spans at most 4 byte tokens; a window this long without a boundary is not one.
_MAX_WINDOW = 16


class TextStream(ABC):
    """Turns one sequence of token ids into text. Special tokens have none."""

    @abstractmethod
    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that is complete now; bytes of an unfinished character are kept for the next call."""

    @abstractmethod
    def finish(self) -> str:
        """What was kept: U+FFFD for a character that never became whole."""


@dataclass(frozen=True, slots=True)
class PieceRule:
    """How one token becomes bytes. strip_leading: spaces removed at the very start of a text."""

    to_bytes: Callable[[str], bytes]
    strip_leading: int = 0


class PieceTable:
    """Bytes of every token of one tokenizer, filled as tokens come up. Shared by its streams."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, rule: PieceRule) -> None:
        self.strip_leading = rule.strip_leading
        self._tokenizer = tokenizer
        self._to_bytes = rule.to_bytes
        added = tokenizer.get_added_tokens_decoder()
        self._pieces = {token_id: b"" for token_id, token in added.items() if token.special}

    def piece(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._tokenizer.id_to_token(token_id)
            # Ids without a token (a padded vocabulary's tail) have no text.
            piece = b"" if token is None else self._to_bytes(token)
            self._pieces[token_id] = piece
        return piece


class ByteStream(TextStream):
    """A UTF-8 decoder over a table of pieces."""

    def __init__(self, table: PieceTable) -> None:
        self._piece = table.piece
        self._strip = table.strip_leading
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._stripped(self._decoder.decode(b"".join(map(self._piece, token_ids))))

    def finish(self) -> str:
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class WindowStream(TextStream):
    """Decodes the last few tokens again with the new ones, and takes what was added."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._known = 0  # tokens of the window whose text was handed out

    def feed(self, token_ids: Sequence[int]) -> str:
        # One at a time, so that the text does not depend on how the ids were split.
        return "".join(self._feed_one(token_id) for token_id in token_ids)

    def _feed_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._known < _MAX_WINDOW:
            return ""
        return self._take(text)

    def finish(self) -> str:
        return self._take(self._decode(self._window))

    def _take(self, text: str) -> str:
        before = self._decode(self._window[: self._known])
        if len(text) > len(before):
            del self._window[: self._known]
            self._known = len(self._window)
        return text[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


def piece_rule(tokenizer: tokenizers.Tokenizer) -> PieceRule | None:
    """How to decode tokens one by one, or None when this tokenizer's decoder needs their neighbours."""
    decoder = tokenizer.decoder
    if decoder is None:
        return None
    spec = json.loads(decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceRule(_byte_level_piece)
    if "ByteFallback" in kinds:
        return _byte_fallback_rule(steps)
    return None


def _byte_fallback_rule(steps: list[dict[str, Any]]) -> PieceRule | None:
    """`Replace`s of plain strings, then ByteFallback, Fuse, and a Strip of leading spaces; nothing else."""
    replaced: list[tuple[str, str]] = []
    strip_leading = 0
    order = {"Replace": 0, "ByteFallback": 1, "Fuse": 2, "Strip": 3}
    position = 0
    for step in steps:
        if order.get(step["type"], -1) < position:
            return None
        position = order[step["type"]]
        if step["type"] == "Replace":
            if "String" not in step["pattern"]:
                return None
            replaced.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Strip":
            if step["content"] != " " or step["stop"]:
                return None
            strip_leading = step["start"]

    def to_bytes(token: str) -> bytes:
        for old, new in replaced:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.match(token)
        return bytes([int(match[1], 16)]) if match else token.encode()

    return PieceRule(to_bytes, strip_leading)


def _byte_alphabet() -> dict[str, int]:
    """The printable character byte-level BPE writes for each byte: itself, or the next free one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level_piece(token: str) -> bytes:
    try:
        return bytes([_BYTE_ALPHABET[character] for character in token])
    except KeyError:  # an added token: written as it is
        return token.encode()
