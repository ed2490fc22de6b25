"""One text through the `tokenizers` library, without holding everybody else up."""

from __future__ import annotations

import tokenizers

from kvferry.core import InvalidRequestError

# `encode` keeps the interpreter lock until it is done; the batch call lets go of it, but costs short texts more.
_SHORT_CHARS = 2_000


def token_ids(tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Other threads run meanwhile. Raises InvalidRequestError for text that is not valid Unicode."""
    try:
        if len(text) <= _SHORT_CHARS:
            encoding = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except (UnicodeEncodeError, TypeError):
        raise InvalidRequestError("the text is not valid Unicode (it holds a lone surrogate)", field="prompt") from None
    ids: list[int] = encoding.ids
    return ids
