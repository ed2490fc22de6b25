"""One HTTP request being answered: whole or as server-sent events, cancelled when the client hangs up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from contextlib import aclosing, suppress
from math import ceil
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvferry.core import KVFerryError
from kvferry.router.answers import Answer, error_body
from kvferry.router.driver import Driver
from kvferry.router.failures import public_error
from kvferry.router.job import Job, Update

REQUEST_ID_HEADER = "x-request-id"

T = TypeVar("T")


def error_response(error: KVFerryError, request_id: str) -> Response:
    headers = {REQUEST_ID_HEADER: request_id}
    if error.retry_after_s:
        headers["retry-after"] = str(ceil(error.retry_after_s))
    return JSONResponse(error_body(error, request_id), status_code=error.code.http_status, headers=headers)


class Exchange(Response):
    """A response that drives its job while it is being sent. Subclasses say in which form."""

    def __init__(self, job: Job, answer: Answer, driver: Driver) -> None:
        # The status and headers are not known before the first token: Response.__init__ would fix them now.
        self._job = job
        self._answer = answer
        self._driver = driver
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await while_connected(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class WholeExchange(Exchange):
    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        job, answer = self._job, self._answer
        response: Response
        try:
            async with asyncio.timeout(job.deadline.left_s()), aclosing(self._driver.run(job)) as updates:
                async for update in updates:
                    answer.add(update)
        except Exception as error:
            response = error_response(public_error(error, job.request_id), job.request_id)
        else:
            response = JSONResponse(answer.whole(), headers={REQUEST_ID_HEADER: job.label})
        await response(scope, receive, send)


class StreamExchange(Exchange):
    """Server-sent events. An error before the first token has its own status; one after it is the last event."""

    def __init__(self, job: Job, answer: Answer, driver: Driver, *, include_usage: bool) -> None:
        super().__init__(job, answer, driver)
        self._include_usage = include_usage
        self._started = False
        self._chars = 0

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self._job
        try:
            async with asyncio.timeout(job.deadline.left_s()), aclosing(self._driver.run(job)) as updates:
                async for update in updates:
                    await self._send_update(send, update)
        except (ClientDisconnect, OSError):
            raise ClientDisconnect from None
        except Exception as error:
            public = public_error(error, job.request_id)
            if not self._started:
                await error_response(public, job.request_id)(scope, receive, send)
                return
            await _send(send, _event(error_body(public, job.request_id)))
        else:
            await _send(send, b"data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_update(self, send: Send, update: Update) -> None:
        events = []
        if not self._started:
            await send({"type": "http.response.start", "status": 200, "headers": self._start_headers()})
            self._started = True
            events += self._answer.opening()
        events.append(self._answer.chunk(update, self._chars))
        self._chars += len(update.delta.text)
        if update.route is not None and self._include_usage:
            events.append(self._answer.usage_chunk(update))
        # Waits for a slow client: uvicorn's send returns when its buffer has room again.
        await _send(send, b"".join(map(_event, events)))

    def _start_headers(self) -> list[tuple[bytes, bytes]]:
        return [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (REQUEST_ID_HEADER.encode(), self._job.label.encode("latin-1", "replace")),
        ]


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Cancels `work` when the client hangs up, and raises ClientDisconnect then. The body must have been read."""
    working = asyncio.create_task(work)
    hanging_up = asyncio.create_task(_hang_up(receive))
    try:
        await asyncio.wait((working, hanging_up), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
    finally:
        hanging_up.cancel()
        if not working.done():
            working.cancel()
            with suppress(asyncio.CancelledError, ClientDisconnect):
                await working
    return working.result()


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
