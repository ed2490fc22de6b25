"""One attempt at a request: the prefill leg, the hand-off, the decode leg. Retrying is the driver's.

Prefill first, a decode worker is chosen when the prompt is computed. Decode first, it has reserved room before and
loads each part of the prompt while the next is computed, so that only the last one's transfer is waited for. Which of
the two workers moves the parts is agreed before the first one, for each request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from kvferry.core import KVFerryError, OutputDelta, PeerAddress, RequestState, Role, WorkerRequest
from kvferry.router.admission import Gate
from kvferry.router.job import Progress, Update
from kvferry.router.ledger import Ledger
from kvferry.router.placement import Placement
from kvferry.router.pool import Lease
from kvferry.router.settings import Flow, Schedule
from kvferry.router.worker_client import DecodeCall, LegError, PrefillResult, ReservedCall, WorkerClients

logger = logging.getLogger(__name__)

_RELEASE_TIMEOUT_S = 2.0
_GRANT_WAIT_S = 0.25
"""For a decode worker's room. Prefill does not stand idle for longer: what is computed meanwhile is pulled."""


class Legs:
    """Runs attempts. Every generator here ends its calls and gives its leases back when it is closed."""

    def __init__(
        self,
        placement: Placement,
        clients: WorkerClients,
        ledger: Ledger,
        prefill_gate: Gate,
        queue_timeout_s: float,
        schedule: Schedule = Schedule.PREFILL_FIRST,
        flow: Flow = Flow.PUSH,
    ) -> None:
        self._placement = placement
        self._clients = clients
        self._ledger = ledger
        self._prefill_gate = prefill_gate
        self._queue_timeout_s = queue_timeout_s
        self._schedule = schedule
        self._flow = flow
        self._releases: set[asyncio.Task[None]] = set()

    async def attempt(self, progress: Progress) -> AsyncGenerator[Update, None]:
        """Yields what the client is sent. Raises LegError when a worker fails, KVFerryError when none is found."""
        with await self._placement.first(progress) as lease:
            updates = self._of(progress, lease)
            async with aclosing(updates):
                async for update in updates:
                    yield update

    def _of(self, progress: Progress, lease: Lease) -> AsyncGenerator[Update, None]:
        if lease.facts.role is not Role.PREFILL:
            return self._alone(progress, lease)
        if self._schedule is Schedule.DECODE_FIRST:
            return self._decode_first(progress, lease)
        return self._prefill_first(progress, lease)

    async def close(self) -> None:
        """Waits for hand-offs that are being released; each is bounded."""
        await asyncio.gather(*self._releases, return_exceptions=True)

    async def _alone(self, progress: Progress, lease: Lease) -> AsyncGenerator[Update, None]:
        """A worker that computes the prompt itself."""
        progress.route = replace(progress.route, prefill=lease.worker, decode=lease.worker, disaggregated=False)
        self._ledger.moved(progress, RequestState.DECODING)
        async with aclosing(self._decoded(progress, lease, None)) as updates:
            async for update in updates:
                yield update

    async def _prefill_first(self, progress: Progress, lease: Lease) -> AsyncGenerator[Update, None]:
        result = await self._prefilled(progress, lease)
        first = self._count_first(progress, lease, result)
        if result.finish_reason is not None:
            yield progress.last(first, result.finish_reason, time.monotonic())
            return
        try:
            self._ledger.moved(progress, RequestState.TRANSFERRING)
            # Neither does the first token wait for a decode worker, nor the hand-off for a slow client.
            decode = self._placement.successor_now(progress, lease.worker)
            if decode is None:
                yield first
                decode = await self._placement.successor(progress, lease.worker)
                early = None
            else:
                early = first
            lease.release()
            async with aclosing(self._handed_over(progress, decode, result, early)) as updates:
                async for update in updates:
                    yield update
        finally:
            if progress.lifecycle.state is RequestState.TRANSFERRING:
                release = self._clients.release(lease, result.handle, _RELEASE_TIMEOUT_S)
                self._later(lease, progress.job.request_id, release)

    async def _decode_first(self, progress: Progress, lease: Lease) -> AsyncGenerator[Update, None]:
        with await self._placement.successor(progress, lease.worker) as decode:
            request = progress.worker_request()
            call = self._clients.reserve(decode, request)
            try:
                result = await self._prefilled_in_parts(progress, lease, request, call)
                first = self._count_first(progress, lease, result)
                if result.finish_reason is not None:
                    yield progress.last(first, result.finish_reason, time.monotonic())
                    return
                self._ledger.moved(progress, RequestState.TRANSFERRING)
                progress.route = replace(progress.route, decode=decode.worker, disaggregated=True)
                failure = await self._started(progress, call, result)
                lease.release()
                yield first  # counted as sent already, so whatever became of the decode leg
                if failure is not None:
                    raise failure
                async with aclosing(self._deltas(progress, call, alone=False)) as updates:
                    async for update in updates:
                        yield update
            finally:
                call.cancel()
                if progress.lifecycle.state is RequestState.TRANSFERRING:
                    abandon = self._clients.abandon(lease, request.request_id, _RELEASE_TIMEOUT_S)
                    self._later(lease, request.request_id, abandon)

    async def _started(self, progress: Progress, call: ReservedCall, result: PrefillResult) -> LegError | None:
        try:
            await call.start(progress.worker_request(), result.handle, result.aux)
        except LegError as error:
            return error
        return None

    async def _prefilled_in_parts(
        self, progress: Progress, lease: Lease, request: WorkerRequest, call: ReservedCall
    ) -> PrefillResult:
        """The prefill leg, its parts passed on to the decode leg as they come."""
        wait_s = min(self._queue_timeout_s, progress.job.deadline.left_s())
        async with self._prefill_gate.place(wait_s):
            self._ledger.moved(progress, RequestState.PREFILLING)
            try:
                grant = await self._granted(lease, request, call)
                async with aclosing(self._clients.prefill_in_parts(lease, request, grant)) as steps:
                    async for step in steps:
                        if isinstance(step, PrefillResult):
                            return step
                        await call.load(step)
                raise AssertionError("a prefill leg ends with a result or an error")
            except BaseException:
                abandon = self._clients.abandon(lease, request.request_id, _RELEASE_TIMEOUT_S)
                self._later(lease, request.request_id, abandon)
                raise

    async def _granted(self, lease: Lease, request: WorkerRequest, call: ReservedCall) -> bytes:
        """What the prefill worker needs to push to the decode worker; empty: the decode worker pulls."""
        if self._flow is Flow.PULL:
            await call.reserve(request)
            return b""
        await call.reserve(request, PeerAddress(lease.facts.endpoint, lease.facts.incarnation))
        return await call.granted(_GRANT_WAIT_S)

    async def _prefilled(self, progress: Progress, lease: Lease) -> PrefillResult:
        wait_s = min(self._queue_timeout_s, progress.job.deadline.left_s())
        async with self._prefill_gate.place(wait_s):
            self._ledger.moved(progress, RequestState.PREFILLING)
            request = progress.worker_request()
            try:
                return await self._clients.prefill(lease, request)
            except BaseException:
                # Its answer may have crossed with our leaving: the worker would keep the cache for nobody.
                abandon = self._clients.abandon(lease, request.request_id, _RELEASE_TIMEOUT_S)
                self._later(lease, request.request_id, abandon)
                raise

    def _count_first(self, progress: Progress, lease: Lease, result: PrefillResult) -> Update:
        aux = result.aux
        if progress.cached_tokens is None:  # a replay finds its own prompt in the cache: that is no hit
            progress.cached_tokens = aux.usage.cached_tokens
        progress.route = replace(progress.route, prefill=lease.worker, decode="", disaggregated=False)
        progress.timings = replace(progress.timings, queue_ms=aux.timings.queue_ms, prefill_ms=aux.timings.prefill_ms)
        logprobs = (aux.first_logprob,) if aux.first_logprob is not None else ()
        return progress.sent((aux.first_token_id,), result.text, logprobs, time.monotonic())

    async def _handed_over(
        self, progress: Progress, lease: Lease, result: PrefillResult, first: Update | None
    ) -> AsyncGenerator[Update, None]:
        progress.route = replace(progress.route, decode=lease.worker, disaggregated=True)
        with lease:
            async with aclosing(self._decoded(progress, lease, result, first)) as updates:
                async for update in updates:
                    yield update

    async def _decoded(
        self, progress: Progress, lease: Lease, result: PrefillResult | None, first: Update | None = None
    ) -> AsyncGenerator[Update, None]:
        """The decode leg, ended at a finish reason. first: sent to the client once the call is on its way."""
        handle, aux = (result.handle, result.aux) if result is not None else (b"", None)
        call = self._clients.decode(lease, progress.worker_request(), handle, aux)
        try:
            if first is not None:
                yield first
            async with aclosing(self._deltas(progress, call, alone=result is None)) as updates:
                async for update in updates:
                    yield update
        finally:
            call.cancel()

    async def _deltas(self, progress: Progress, call: DecodeCall, *, alone: bool) -> AsyncGenerator[Update, None]:
        async with aclosing(call.deltas()) as deltas:
            async for delta in deltas:
                if progress.lifecycle.state is RequestState.TRANSFERRING:
                    self._ledger.moved(progress, RequestState.DECODING)
                yield self._counted(progress, delta, alone=alone)

    def _counted(self, progress: Progress, delta: OutputDelta, *, alone: bool) -> Update:
        if delta.transferred_bytes:
            progress.route = replace(progress.route, transferred_bytes=delta.transferred_bytes)
        now = time.monotonic()
        update = progress.sent(delta.token_ids, delta.text, delta.logprobs, now)
        if delta.finish_reason is None:
            return update
        if progress.cached_tokens is None:
            progress.cached_tokens = delta.usage.cached_tokens
        times = delta.timings
        if alone:
            progress.timings = times
        else:
            progress.timings = replace(progress.timings, transfer_ms=times.transfer_ms, decode_ms=times.decode_ms)
        return progress.last(update, delta.finish_reason, now)

    def _later(self, lease: Lease, request_id: str, giving_up: Coroutine[Any, Any, object]) -> None:
        """In the background: whoever cancelled us must not wait, nor be able to cancel this too."""
        if lease.lost_reason is not None:
            giving_up.close()
            return
        task = asyncio.get_running_loop().create_task(self._give_up(request_id, lease, giving_up))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _give_up(self, request_id: str, lease: Lease, giving_up: Coroutine[Any, Any, object]) -> None:
        try:
            await giving_up
        except (LegError, KVFerryError) as error:
            logger.warning(
                "request %s: %s keeps the hand-off until its lease ends: %s", request_id, lease.worker, error
            )
