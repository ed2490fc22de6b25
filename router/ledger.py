"""The book of all requests: each one's state, how many are in each, and what the metrics say of them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping

from kvferry.core import ErrorCode, KVFerryError, RequestState
from kvferry.router.job import Progress, Update
from kvferry.router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

_ENDED = frozenset({RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED})


class Ledger:
    """Every change of a request's state goes through here."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._counts: Counter[RequestState] = Counter()
        self._last_token_at: dict[str, float] = {}

    @property
    def counts(self) -> Mapping[str, int]:
        """Requests by state: live ones now, ended ones since the start."""
        return {state.value: self._counts[state] for state in RequestState}

    def opened(self, progress: Progress) -> None:
        job = progress.job
        self._count(RequestState.QUEUED, 1)
        logger.info(
            "request %s: %d prompt tokens, at most %d new%s",
            *(job.request_id, len(job.prompt_token_ids), job.max_tokens),
            f", called {job.client_id!r}" if job.client_id else "",
        )

    def moved(self, progress: Progress, state: RequestState) -> None:
        """Moves a live request to another live state, or back to QUEUED for a retry."""
        before = progress.lifecycle.state
        progress.lifecycle.to(state)
        self._count(before, -1)
        self._count(state, 1)
        if state is RequestState.QUEUED:
            self._metrics.retries.inc()

    def sent(self, progress: Progress, update: Update) -> None:
        """Tokens are on their way to the client."""
        number = len(update.delta.token_ids)
        if not number:
            return
        now, request_id = time.monotonic(), progress.job.request_id
        before = self._last_token_at.get(request_id)
        if before is None:
            self._metrics.ttft.observe(now - progress.job.arrived)
            self._metrics.queue_wait.observe(progress.queued_ms / 1000)
        else:
            for _ in range(number):
                self._metrics.inter_token.observe((now - before) / number)
        self._last_token_at[request_id] = now
        self._metrics.output_tokens.inc(number)

    def ended(self, progress: Progress, state: RequestState, error: BaseException | None = None) -> None:
        """The first end counts: a client that hangs up after the last token changes nothing."""
        if progress.lifecycle.ended:
            return
        self.moved(progress, state)
        job = progress.job
        self._last_token_at.pop(job.request_id, None)
        self._metrics.requests.labels(state.value).inc()
        if state is RequestState.FINISHED:
            self._finished(progress)
        elif state is RequestState.FAILED:
            code = error.code if isinstance(error, KVFerryError) else ErrorCode.INTERNAL
            self._metrics.errors.labels(code.name).inc()
            logger.warning("request %s failed: %s: %s", job.request_id, code.name, error)
        else:
            logger.info("request %s cancelled after %d tokens", job.request_id, len(progress.token_ids))

    def _finished(self, progress: Progress) -> None:
        job, route, metrics = progress.job, progress.route, self._metrics
        metrics.decisions.labels("disaggregated" if route.disaggregated else "single").inc()
        metrics.prompt_tokens.inc(len(job.prompt_token_ids))
        metrics.cached_tokens.inc(progress.cached_tokens or 0)
        metrics.transferred.inc(route.transferred_bytes)
        metrics.duration.observe(time.monotonic() - job.arrived)
        logger.info(
            "request %s finished: %d tokens, prefill=%s decode=%s, %d KV bytes moved, %d retries",
            *(job.request_id, len(progress.token_ids), route.prefill, route.decode or "-"),
            *(route.transferred_bytes, route.retries),
        )

    def _count(self, state: RequestState, change: int) -> None:
        self._counts[state] += change
        if state not in _ENDED:
            self._metrics.live.labels(state.value).inc(change)
