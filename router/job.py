"""One request inside the router: what was asked, and how far it got."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvferry.core import (
    REQUEST_TRANSITIONS,
    DeadlineExceededError,
    FinishReason,
    Lifecycle,
    OutputDelta,
    RequestState,
    SamplingParams,
    Timings,
    TokenLogprob,
    Usage,
    WorkerRequest,
)


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on this process's monotonic clock; it crosses the wire as what is left of it."""

    at: float
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    def left_s(self) -> float:
        """Raises DeadlineExceededError when nothing is left."""
        left = self.at - self.clock()
        if left <= 0:
            raise DeadlineExceededError("the request's deadline passed")
        return left


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request. sampling is complete: seed and max_tokens are set. request_id was minted here."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline: Deadline
    arrived: float
    scope: str = ""
    client_id: str = ""

    @property
    def label(self) -> str:
        """What the client calls this request."""
        return self.client_id or self.request_id

    @property
    def max_tokens(self) -> int:
        assert self.sampling.max_tokens is not None
        return self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class RouteTaken:
    """Which workers served a request; see the message of the same meaning in generation.proto."""

    prefill: str = ""
    decode: str = ""
    disaggregated: bool = False
    transferred_bytes: int = 0
    retries: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    """What a client is sent next. route comes with the last one, whose delta has a finish reason."""

    delta: OutputDelta
    route: RouteTaken | None = None


@dataclass(slots=True)
class Progress:
    """How far one job got. The tokens and characters counted here are with the client, or on their way there.

    avoid: workers a leg of this job failed on.
    """

    job: Job
    lifecycle: Lifecycle[RequestState] = field(
        default_factory=lambda: Lifecycle(RequestState.QUEUED, REQUEST_TRANSITIONS)
    )
    token_ids: list[int] = field(default_factory=list)
    text_chars: int = 0
    cached_tokens: int | None = None
    route: RouteTaken = field(default_factory=RouteTaken)
    timings: Timings = field(default_factory=Timings)
    queued_ms: float = 0.0
    first_token_at: float | None = None
    avoid: set[str] = field(default_factory=set)

    def worker_request(self) -> WorkerRequest:
        """What the next leg is asked: everything sent so far is part of it, so no token comes twice."""
        job, retries = self.job, self.route.retries
        return WorkerRequest(
            # A worker may still be cleaning up an earlier attempt.
            request_id=f"{job.request_id}-{retries}" if retries else job.request_id,
            prompt_token_ids=job.prompt_token_ids,
            sampling=job.sampling,
            output_token_ids=tuple(self.token_ids),
            scope=job.scope,
            deadline_s=job.deadline.left_s(),
            sent_text_chars=self.text_chars,
        )

    @property
    def context_tokens(self) -> int:
        return len(self.job.prompt_token_ids) + len(self.token_ids)

    def sent(self, token_ids: tuple[int, ...], text: str, logprobs: tuple[TokenLogprob, ...], now: float) -> Update:
        """Counts tokens as the client's."""
        self.token_ids.extend(token_ids)
        self.text_chars += len(text)
        if token_ids and self.first_token_at is None:
            self.first_token_at = now
        return Update(OutputDelta(self.job.request_id, token_ids, text, logprobs))

    def last(self, update: Update, reason: FinishReason, now: float) -> Update:
        """`update` with everything that comes with the last one."""
        job = self.job
        usage = Usage(len(job.prompt_token_ids), len(self.token_ids), self.cached_tokens or 0)
        first = self.first_token_at if self.first_token_at is not None else now
        timings = replace(
            self.timings,
            queue_ms=self.queued_ms + self.timings.queue_ms,
            ttft_ms=1000 * (first - job.arrived),
            total_ms=1000 * (now - job.arrived),
        )
        return Update(replace(update.delta, finish_reason=reason, usage=usage, timings=timings), self.route)
