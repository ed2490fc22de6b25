"""What a request asks for and what it gets: the values that cross folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvferry.core.errors import InvalidRequestError
from kvferry.core.sampling import DEFAULT_MAX_TOKENS, SamplingParams


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. cached_tokens: prompt tokens whose KV came from a cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations in milliseconds, each taken from one process's monotonic clock."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    decode_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a chosen token, and of the likeliest ones, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class AuxRecord:
    """What travels from prefill to decode beside the KV."""

    first_token_id: int
    first_logprob: TokenLogprob | None
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """One request as the workers see it.

    output_token_ids: tokens generated already (the first token after prefill; more on a replay). Their KV is
    part of what prefill computes, except the last one's, which the next step computes. sent_text_chars: how
    much of their text the client holds. deadline_s: what is left of the deadline when sent; None: no deadline.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    scope: str = ""
    deadline_s: float | None = None
    sent_text_chars: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_token_ids + self.output_token_ids


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one step added to one request. finish_reason, usage and timings come with the last one."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    transferred_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One rank of a worker, its place among them, and its process."""

    rank: int
    tp_rank: int
    pp_rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """KV blocks of one worker, all layer groups together.

    free: what a new request could get, cached blocks included; cached: unused but reusable as a prefix.
    """

    total: int = 0
    free: int = 0
    cached: int = 0
    pinned: int = 0
    quarantined: int = 0


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What requests to a model are checked against."""

    vocab_size: int
    max_context_tokens: int


def resolve_max_tokens(sampling: SamplingParams, prompt_tokens: int, limits: ModelLimits) -> int:
    """How many tokens this request may generate; raises InvalidRequestError when it cannot fit."""
    room = limits.max_context_tokens - prompt_tokens
    if sampling.max_tokens is None:
        return min(DEFAULT_MAX_TOKENS, room)
    if sampling.max_tokens > room:
        raise InvalidRequestError(
            f"max_tokens is {sampling.max_tokens}, but a prompt of {prompt_tokens} tokens leaves room for {room} "
            f"(max_context_tokens is {limits.max_context_tokens})",
            field="max_tokens",
        )
    return sampling.max_tokens


def check_prompt(token_ids: Sequence[int], limits: ModelLimits, field_name: str = "prompt") -> None:
    """Raises InvalidRequestError when a prompt is empty, too long, or holds ids outside the vocabulary."""
    if not token_ids:
        raise InvalidRequestError("prompt is empty: at least 1 token is needed", field=field_name)
    if len(token_ids) >= limits.max_context_tokens:
        raise InvalidRequestError(
            f"prompt has {len(token_ids)} tokens; the limit is {limits.max_context_tokens - 1} "
            f"(max_context_tokens {limits.max_context_tokens} less one to generate)",
            field=field_name,
        )
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequestError(
                f"token id {token_id} at position {position} is outside the vocabulary [0, {limits.vocab_size})",
                field=field_name,
            )
