"""One request on one worker: its tokens, its cache, its text, and when it is over."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as Seq
from enum import Enum
from typing import Generic, TypeVar

from kvferry.core import (
    CheckpointError,
    FinishReason,
    InvalidRequestError,
    Lifecycle,
    ModelLimits,
    OutputDelta,
    Timings,
    TokenLogprob,
    Usage,
    WorkerRequest,
    check_prompt,
    resolve_max_tokens,
    tokens_digest,
)
from kvferry.engine.sampler import Sampled
from kvferry.kvcache import KVCache
from kvferry.text import OutputText, Tokenizer

L = TypeVar("L", bound=Enum)

_keys = itertools.count(1)


class Sequence(Generic[L]):
    """Owned by the engine thread. `key` is unique in this process; the request's id is a label only.

    tokens: prompt, then output. A token is *uncomputed* while its position is not below the cache's history.
    """

    def __init__(
        self, request: WorkerRequest, leg: Lifecycle[L], limits: ModelLimits, tokenizer: Tokenizer | None
    ) -> None:
        """Raises InvalidRequestError when the request cannot fit the model."""
        check_prompt(request.prompt_token_ids, limits)
        _check_ids(request, limits)
        self.key = next(_keys)
        self.request = request
        self.leg = leg
        self.max_tokens = resolve_max_tokens(request.sampling, len(request.prompt_token_ids), limits)
        self.tokens: list[int] = list(request.token_ids)
        self.cache: KVCache | None = None
        self.cached_tokens: int | None = None
        self.transferred_bytes = 0
        self._tokenizer = tokenizer
        self._text = self._open_text(tokenizer)
        self._stop_ids = self._find_stop_ids(tokenizer)
        self._marks = {"queued": time.monotonic()}
        self.deadline = time.monotonic() + request.deadline_s if request.deadline_s is not None else None

    def _open_text(self, tokenizer: Tokenizer | None) -> OutputText | None:
        sampling = self.request.sampling
        if tokenizer is None:
            if sampling.stop:
                raise CheckpointError("stop strings need a tokenizer, and this model directory has none", field="stop")
            return None
        prior = self.request.output_token_ids
        return OutputText(
            tokenizer,
            sampling.stop,
            prior_token_ids=prior,
            sent_chars=self.request.sent_text_chars,
            min_tokens=sampling.min_tokens,
        )

    def _find_stop_ids(self, tokenizer: Tokenizer | None) -> frozenset[int]:
        stop_ids = frozenset(self.request.sampling.stop_token_ids)
        if tokenizer is None or self.request.sampling.ignore_eos:
            return stop_ids
        return stop_ids | tokenizer.eos_token_ids

    def continue_with(self, request: WorkerRequest) -> None:
        """The same request, further along: `request` has output tokens that another worker computed."""
        self.request = request
        self.tokens = list(request.token_ids)
        self._text = self._open_text(self._tokenizer)

    # -- lengths ----------------------------------------------------------------------------------------

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - (self.cache.history if self.cache else 0)

    @property
    def output_ids(self) -> Seq[int]:
        return self.tokens[self.prompt_len :]

    @property
    def suppressed_ids(self) -> frozenset[int]:
        """Token ids that may not be sampled next: every stop id, until min_tokens is reached."""
        return self._stop_ids if self.output_len < self.request.sampling.min_tokens else frozenset()

    def digest(self, tokens: int) -> bytes:
        """Names the first `tokens` tokens and their scope."""
        return tokens_digest(self.request.scope, self.tokens[:tokens])

    # -- cache ------------------------------------------------------------------------------------------

    def attach(self, cache: KVCache) -> None:
        self.cache = cache
        if self.cached_tokens is None:
            self.cached_tokens = min(cache.reused, self.prompt_len)

    @property
    def has_pages(self) -> bool:
        """Whether it can be computed: it has a cache, and that is not suspended."""
        return self.cache is not None and not self.cache.suspended

    def drop_cache(self) -> None:
        """Closes the cache if there is one; its published blocks stay findable."""
        if self.cache is not None:
            self.cache.close()
            self.cache = None

    # -- output -----------------------------------------------------------------------------------------

    def accept(self, sampled: Sampled) -> OutputDelta:
        """Appends a sampled token and applies the stop rules: the one place where a sequence finishes."""
        self.tokens.append(sampled.token_id)
        finish, text = self._finish_and_text(sampled.token_id)
        logprobs = (sampled.logprob,) if sampled.logprob else ()
        return self.delta((sampled.token_id,), text, logprobs, finish)

    def _finish_and_text(self, token_id: int) -> tuple[FinishReason | None, str]:
        # A stop token ends the text; it is not part of it.
        if token_id in self._stop_ids:
            return FinishReason.STOP, self._text.flush() if self._text else ""
        text = self._text.push((token_id,)) if self._text else ""
        if self._text is not None and self._text.stopped:
            return FinishReason.STOP, text
        if self.output_len >= self.max_tokens:
            return FinishReason.LENGTH, text + (self._text.flush() if self._text else "")
        return None, text

    def delta(
        self,
        token_ids: tuple[int, ...],
        text: str,
        logprobs: tuple[TokenLogprob, ...],
        finish: FinishReason | None,
    ) -> OutputDelta:
        return OutputDelta(
            request_id=self.request.request_id,
            token_ids=token_ids,
            text=text,
            logprobs=logprobs,
            finish_reason=finish,
            usage=self.usage(),
            timings=self.timings() if finish else Timings(),
            transferred_bytes=self.transferred_bytes,
        )

    def usage(self) -> Usage:
        return Usage(self.prompt_len, self.output_len, self.cached_tokens or 0)

    # -- timings ----------------------------------------------------------------------------------------

    def mark(self, name: str) -> None:
        """Notes the first time something happened."""
        self._marks.setdefault(name, time.monotonic())

    def _between_ms(self, start: str, stop: float) -> float:
        return 1000.0 * (stop - self._marks[start]) if start in self._marks else 0.0

    def timings(self) -> Timings:
        """Marks: queued, started (first forward pass), prefilled, loading, loaded."""
        now = time.monotonic()
        marks = self._marks
        begun = marks.get("loading", marks.get("started", now))
        ready = "loaded" if "loaded" in marks else "prefilled"
        return Timings(
            queue_ms=self._between_ms("queued", begun),
            prefill_ms=self._between_ms("started", marks.get("prefilled", now)) if "loaded" not in marks else 0.0,
            transfer_ms=self._between_ms("loading", marks["loaded"]) if "loaded" in marks else 0.0,
            decode_ms=self._between_ms(ready, now),
        )


def _check_ids(request: WorkerRequest, limits: ModelLimits) -> None:
    sampling = request.sampling
    for name, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        for token_id in ids:
            if token_id >= limits.vocab_size:
                raise InvalidRequestError(
                    f"{name} names token {token_id}; the vocabulary has {limits.vocab_size}", field=name
                )
