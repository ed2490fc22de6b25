"""Sampling parameters and their limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from kvferry.core.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_INTEGER = 2**31 - 1
DEFAULT_MAX_TOKENS = 256

_MAX_PENALTY = 100.0
_SHOWN_CHARS = 80

# What each field must be; the errors here and those of the front ends say it in these words.
LIMITS: Mapping[str, str] = {
    "temperature": "a number between 0 and 100",
    "top_p": "a number above 0 and at most 1",
    "top_k": f"an integer between 0 (off) and {MAX_INTEGER}",
    "min_p": "a number between 0 and 1",
    "seed": "an integer between 0 and 2**64 - 1",
    "max_tokens": f"an integer between 1 and {MAX_INTEGER}",
    "min_tokens": f"an integer between 0 and {MAX_INTEGER}",
    "stop": f"at most {MAX_STOP_STRINGS} non-empty strings of at most {MAX_STOP_CHARS} characters",
    "stop_token_ids": f"at most {MAX_STOP_TOKEN_IDS} token ids between 0 and {MAX_INTEGER}",
    "ignore_eos": "true or false",
    "logprobs": f"an integer between 0 and {MAX_LOGPROBS}",
    "repetition_penalty": f"a number above 0 and at most {_MAX_PENALTY:g}",
    "presence_penalty": "a number between -2 and 2",
    "frequency_penalty": "a number between -2 and 2",
    "logit_bias": f"at most {MAX_LOGIT_BIAS} token ids between 0 and {MAX_INTEGER}, with numbers between -100 and 100",
}


def _check(name: str, ok: bool, value: object) -> None:
    if not ok:
        raise InvalidRequestError(f"{name} must be {LIMITS[name]}, got {shown(value)}", field=name)


def shown(value: object) -> str:
    """`value` in a few characters; Python refuses to write very long integers."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    said = repr(value)
    return said if len(said) <= _SHOWN_CHARS else f"{said[:_SHOWN_CHARS]}..."


def check_count(name: str, count: int) -> None:
    """Raises InvalidRequestError when a field of several values has too many; cheap, so ask before copying them."""
    limit = {"stop": MAX_STOP_STRINGS, "stop_token_ids": MAX_STOP_TOKEN_IDS, "logit_bias": MAX_LOGIT_BIAS}[name]
    if count > limit:
        raise InvalidRequestError(f"{name} must be {LIMITS[name]}, got {count} of them", field=name)


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
        self._check_stops()
        self._check_penalties()

    def _check_choice(self) -> None:
        _check("temperature", _is_number(self.temperature) and 0 <= self.temperature <= 100, self.temperature)
        _check("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, self.top_p)
        _check("top_k", _is_integer(self.top_k, 0), self.top_k)
        _check("min_p", _is_number(self.min_p) and 0 <= self.min_p <= 1, self.min_p)
        _check("seed", self.seed is None or _is_integer(self.seed, 0, 2**64 - 1), self.seed)
        _check("logprobs", self.logprobs is None or _is_integer(self.logprobs, 0, MAX_LOGPROBS), self.logprobs)

    def _check_length(self) -> None:
        _check("max_tokens", self.max_tokens is None or _is_integer(self.max_tokens, 1), self.max_tokens)
        _check("min_tokens", _is_integer(self.min_tokens, 0), self.min_tokens)
        _check("ignore_eos", isinstance(self.ignore_eos, bool), self.ignore_eos)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}", field="min_tokens"
            )

    def _check_stops(self) -> None:
        check_count("stop", len(self.stop))
        for text in self.stop:
            _check("stop", isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS, text)
        check_count("stop_token_ids", len(self.stop_token_ids))
        for token_id in self.stop_token_ids:
            _check("stop_token_ids", _is_integer(token_id, 0), token_id)

    def _check_penalties(self) -> None:
        ok = _is_number(self.repetition_penalty) and 0 < self.repetition_penalty <= _MAX_PENALTY
        _check("repetition_penalty", ok, self.repetition_penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, _is_number(value) and -2 <= value <= 2, value)
        check_count("logit_bias", len(self.logit_bias))
        for token_id, bias in self.logit_bias.items():
            _check("logit_bias", _is_integer(token_id, 0), token_id)
            _check("logit_bias", _is_number(bias) and -100 <= bias <= 100, bias)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _is_number(value: Any) -> bool:
    """NaN and the infinities are: no range of finite limits holds them. Comparing is safe for integers of any size."""
    return not isinstance(value, bool) and isinstance(value, Real)


def _is_integer(value: Any, low: int, high: int = MAX_INTEGER) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and low <= int(value) <= high
