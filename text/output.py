"""One request's output text: what may be sent now, and where it stops."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.core import InvalidRequestError
from kvferry.text.stop import StopMatcher
from kvferry.text.tokenizer import Tokenizer


class OutputText:
    """Turns generated tokens into text that can be sent at once, for one request.

    Text is cut only at character boundaries, and text that may be the beginning of a stop string is kept until
    that is decided. A stop string ends the text before itself; it counts only in the text of tokens after the
    first `min_tokens`.

    prior_token_ids, sent_chars: tokens generated already, and how much of their text the client holds. A new
    OutputText given them goes on exactly where another worker's left off: its first `push` or `flush` also
    returns what that one had kept back. Raises InvalidRequestError when their text is shorter than sent_chars.
    """

    __slots__ = ("_matcher", "_min_tokens", "_pending", "_sent", "_stop_at", "_stream", "_tokens")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        prior_token_ids: Sequence[int] = (),
        sent_chars: int = 0,
        *,
        min_tokens: int = 0,
    ) -> None:
        self._stream = tokenizer.text_stream()
        self._matcher = StopMatcher(stop)
        self._min_tokens = min_tokens
        self._tokens = 0
        self._pending = ""  # decoded, not sent
        self._sent = 0  # characters before `_pending`
        self._stop_at: int | None = None
        self._decode(prior_token_ids)
        if not 0 <= sent_chars <= len(self._pending):
            raise InvalidRequestError(
                f"sent_text_chars is {sent_chars}, but the {len(prior_token_ids)} tokens generated so far make "
                f"{len(self._pending)} characters",
                field="sent_text_chars",
            )
        self._pending = self._pending[sent_chars:]
        self._sent = sent_chars

    @property
    def stopped(self) -> bool:
        """A stop string was found; nothing pushed afterwards changes the text."""
        return self._stop_at is not None

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens; returns the text that may be sent now, which may be empty."""
        self._decode(token_ids)
        return self._take(self._matcher.held)

    def flush(self) -> str:
        """The rest, at the end of the output."""
        if self._stop_at is None:
            self._accept(self._stream.finish())
        return self._take(0)

    def _decode(self, token_ids: Sequence[int]) -> None:
        unsearched = self._min_tokens - self._tokens
        self._tokens += len(token_ids)
        if unsearched > 0:
            text = self._stream.feed(token_ids[:unsearched])
            self._matcher.skip(len(text))
            self._pending += text
            token_ids = token_ids[unsearched:]
        if self._stop_at is None and token_ids:
            self._accept(self._stream.feed(token_ids))

    def _accept(self, text: str) -> None:
        self._stop_at = self._matcher.feed(text)
        self._pending += text

    def _take(self, held: int) -> str:
        """Hands out all pending text but the last `held` characters, or up to the stop string."""
        if self._stop_at is not None:
            text = self._pending[: max(0, self._stop_at - self._sent)]
            self._pending = ""
        else:
            keep = max(0, len(self._pending) - held)
            text, self._pending = self._pending[:keep], self._pending[keep:]
        self._sent += len(text)
        return text
