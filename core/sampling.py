"""Sampling parameters and their limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.core.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 1024
DEFAULT_MAX_TOKENS = 256


def _check(name: str, ok: bool, limit: str, value: object) -> None:
    if not ok:
        raise InvalidRequestError(f"{name} must be {limit}, got {value!r}", field=name)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Raises InvalidRequestError naming field and limit.

    temperature 0 is greedy. top_k 0 and min_p 0 are off. seed None: the router (or `LLM`) draws one; the
    random number of a choice is a pure function of (seed, position). max_tokens None: DEFAULT_MAX_TOKENS or
    what the context leaves, whichever is less. logprobs N: the chosen token's log probability and the top N.
    logprobs are those of the model's distribution after logit_bias and penalties, before temperature.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stop: object = self.stop  # a lone string is taken too
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check_choice()
        self._check_length()
        self._check_penalties()

    def _check_choice(self) -> None:
        _check("temperature", _within(self.temperature, 0.0, 100.0), "between 0 and 100", self.temperature)
        _check("top_p", _within(self.top_p, 0.0, 1.0) and self.top_p > 0, "above 0 and at most 1", self.top_p)
        _check("top_k", self.top_k >= 0, "at least 0 (0: off)", self.top_k)
        _check("min_p", _within(self.min_p, 0.0, 1.0), "between 0 and 1", self.min_p)
        _check("seed", self.seed is None or 0 <= self.seed < 2**64, "between 0 and 2**64 - 1", self.seed)

    def _check_length(self) -> None:
        _check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1", self.max_tokens)
        _check("min_tokens", self.min_tokens >= 0, "at least 0", self.min_tokens)
        if self.max_tokens is not None:
            _check(
                "min_tokens",
                self.min_tokens <= self.max_tokens,
                f"at most max_tokens ({self.max_tokens})",
                self.min_tokens,
            )
        _check("stop", len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings", len(self.stop))
        _check("stop", all(self.stop), "made of non-empty strings", self.stop)
        _check("stop_token_ids", all(i >= 0 for i in self.stop_token_ids), "at least 0", self.stop_token_ids)
        _check(
            "logprobs",
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            f"between 0 and {MAX_LOGPROBS}",
            self.logprobs,
        )

    def _check_penalties(self) -> None:
        ok = math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0
        _check("repetition_penalty", ok, "above 0", self.repetition_penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, _within(value, -2.0, 2.0), "between -2 and 2", value)
        size = len(self.logit_bias)
        _check("logit_bias", size <= MAX_LOGIT_BIAS, f"at most {MAX_LOGIT_BIAS} entries", size)
        for token_id, bias in self.logit_bias.items():
            _check("logit_bias", token_id >= 0, "keyed by token ids of at least 0", token_id)
            _check("logit_bias", _within(bias, -100.0, 100.0), "between -100 and 100", bias)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _within(value: float, low: float, high: float) -> bool:
    return math.isfinite(value) and low <= value <= high
