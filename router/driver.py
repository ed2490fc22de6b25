"""Drives one request to its end: admission, attempts, and the same again when a worker fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from kvferry.core import ErrorCode, OverloadedError, RequestState, Role, UnavailableError
from kvferry.router.admission import Gate
from kvferry.router.job import Job, Progress, Update
from kvferry.router.ledger import Ledger
from kvferry.router.legs import Legs
from kvferry.router.placement import Placement
from kvferry.router.pool import WorkerPool
from kvferry.router.settings import RouterSettings
from kvferry.router.worker_client import LegError, WorkerClients

logger = logging.getLogger(__name__)

# Errors another worker, or a later try, may not have. All others are the request's fault or the worker's own.
_RETRIED = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.RESOURCE_EXHAUSTED, ErrorCode.CANCELLED})
_RETRY_PAUSE_S, _MAX_RETRY_PAUSE_S = 0.05, 2.0


class Driver:
    """Runs jobs on the pool's workers. One per router; `close` waits for its background calls."""

    def __init__(self, settings: RouterSettings, pool: WorkerPool, clients: WorkerClients, ledger: Ledger) -> None:
        self._settings = settings
        self._pool = pool
        self._ledger = ledger
        # Decode's gate is entered first and left last: a prefilled cache never waits for a place in decode.
        self.decode_gate = self._gate("decode", (Role.DECODE, Role.AGGREGATED))
        self.prefill_gate = self._gate("prefill", (Role.PREFILL,))
        placement = Placement(pool, settings.prefill_policy, settings.decode_policy, settings.worker_wait_s)
        self._legs = Legs(
            placement, clients, ledger, self.prefill_gate, settings.queue_timeout_s, settings.schedule, settings.flow
        )

    @property
    def queue_depth(self) -> int:
        return self.decode_gate.queued + self.prefill_gate.queued

    async def run(self, job: Job) -> AsyncGenerator[Update, None]:
        """Yields tokens as they come; the last update has a finish reason. Raises KVFerryError.

        Close the generator (or cancel its reader) to cancel the request on its workers.
        """
        progress = Progress(job)
        self._ledger.opened(progress)
        try:
            async with self.decode_gate.place(min(self._settings.queue_timeout_s, job.deadline.left_s())):
                progress.queued_ms = 1000 * (time.monotonic() - job.arrived)
                async with aclosing(self._attempts(progress)) as updates:
                    async for update in updates:
                        self._ledger.sent(progress, update)
                        if update.delta.finish_reason is not None:
                            self._ledger.ended(progress, RequestState.FINISHED)
                        yield update
        except (asyncio.CancelledError, GeneratorExit):
            self._ledger.ended(progress, RequestState.CANCELLED)
            raise
        except BaseException as error:
            self._ledger.ended(progress, RequestState.FAILED, error)
            raise

    def admit(self) -> None:
        """Call when workers came or went: there may be more room."""
        self.decode_gate.admit()
        self.prefill_gate.admit()

    async def close(self) -> None:
        await self._legs.close()

    async def _attempts(self, progress: Progress) -> AsyncGenerator[Update, None]:
        while True:
            try:
                async with aclosing(self._legs.attempt(progress)) as updates:
                    async for update in updates:
                        yield update
                return
            except LegError as failure:
                await self._prepare_retry(progress, failure)

    async def _prepare_retry(self, progress: Progress, failure: LegError) -> None:
        """Back to QUEUED for another attempt; raises when the error is final or the budget is spent."""
        error, retries, worker = failure.error, progress.route.retries, failure.facts.name
        if failure.lost:
            self._pool.suspect(failure.facts, error.message)
        if error.code not in _RETRIED:
            raise error
        if retries >= self._settings.retry_budget:
            if isinstance(error, OverloadedError) and not progress.token_ids:
                raise error
            raise UnavailableError(
                f"gave up after {retries + 1} attempts (router.retries is {self._settings.retry_budget}); "
                f"the last one failed on {worker}: {error.message}"
            )
        logger.warning(
            "request %s: attempt %d failed on %s after %d tokens, trying again: %s",
            *(progress.job.request_id, retries + 1, worker, len(progress.token_ids), error.message),
        )
        progress.avoid.add(worker)
        progress.route = replace(progress.route, retries=retries + 1)
        self._ledger.moved(progress, RequestState.QUEUED)
        pause_s = max(error.retry_after_s, _RETRY_PAUSE_S * 2**retries)
        await asyncio.sleep(min(pause_s, _MAX_RETRY_PAUSE_S, progress.job.deadline.left_s()))

    def _gate(self, name: str, roles: Sequence[Role]) -> Gate:
        def limit() -> int:
            capacity = self._pool.batch_capacity(roles)
            return min(self._settings.max_running, capacity) if capacity else self._settings.max_running

        return Gate(f"the queue for {name}", "router.max_queued", limit, self._settings.max_queued)
