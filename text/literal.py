"""Special tokens spelled out in a message stay text: only the chat template's own begin and end a turn."""

from __future__ import annotations

import re
import secrets
from functools import cached_property

import tokenizers

from kvferry.text.encoding import token_ids


def new_mark() -> str:
    """Something no message holds: a client would have to guess it."""
    return f"\ufdd0{secrets.token_hex(8)}\ufdd0"


class LiteralEncoder:
    """Encodes a rendered chat in which `protect` broke up the special tokens that the messages spelled out.

    A tokenizer cuts a text at its special tokens and encodes each section between them for itself. So the sections
    that hold a mark, and only they, are encoded by a copy of the tokenizer that knows no special tokens.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token.content: token_id for token_id, token in added.items() if token.special}
        names = sorted(filter(None, self._special), key=len, reverse=True)  # the longest that matches is the token
        self._any_special = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        # A copy costs as much as loading did, and few messages ever need it.
        literal = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        literal.encode_special_tokens = True
        return literal

    def protect(self, content: str, mark: str) -> str:
        """`content` with a mark inside every special token; a token of one character is left to `encode`."""
        return self._any_special.sub(lambda found: found[0][:1] + mark + found[0][1:], content)

    def encode(self, rendered: str, mark: str) -> list[int]:
        ids: list[int] = []
        plain_from = 0
        while (first := rendered.find(mark, plain_from)) >= 0:
            start = self._end_of_last_special(rendered, plain_from, first)
            following = self._any_special.search(rendered, first)
            stop = following.start() if following else len(rendered)
            ids += token_ids(self._tokenizer, rendered[plain_from:start], add_special_tokens=False)
            ids += self._literal_ids(rendered[start:stop], mark)
            plain_from = stop
        return ids + token_ids(self._tokenizer, rendered[plain_from:], add_special_tokens=False)

    def _end_of_last_special(self, rendered: str, start: int, stop: int) -> int:
        for found in self._any_special.finditer(rendered, start, stop):
            start = found.end()
        return start

    def _literal_ids(self, section: str, mark: str) -> list[int]:
        text = section.replace(mark, "")
        ids = token_ids(self._literal, text, add_special_tokens=False)
        spelled_out = {self._special[name] for name in self._any_special.findall(text)}
        if spelled_out.isdisjoint(ids):
            return ids
        # A tokenizer of whole words or pieces finds the token in its vocabulary all the same.
        return [
            token_id
            for part in section.split(mark)
            for token_id in token_ids(self._literal, part, add_special_tokens=False)
        ]
