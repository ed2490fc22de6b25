"""The OpenAI-style HTTP front end, and what operators read over HTTP."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from kvferry.core import ErrorCode, InvalidRequestError, error_for_code
from kvferry.resolution import resolution_dict
from kvferry.router.answers import Answer, ChatAnswer, CompletionAnswer
from kvferry.router.driver import Driver
from kvferry.router.failures import public_error
from kvferry.router.http_exchange import (
    REQUEST_ID_HEADER,
    Exchange,
    StreamExchange,
    WholeExchange,
    error_response,
    while_connected,
)
from kvferry.router.intake import Intake, new_arrival
from kvferry.router.ledger import Ledger
from kvferry.router.metrics import CONTENT_TYPE, RouterMetrics
from kvferry.router.openai import B, ChatBody, CompletionBody, parse_body
from kvferry.router.pool import Member, WorkerPool
from kvferry.router.worker_client import MAX_MESSAGE_NBYTES
from kvferry.text import Tokenizer

# A prompt in JSON: a character takes six bytes when it is escaped, a token id up to twelve with its comma.
_NBYTES_PER_CHAR, _NBYTES_PER_TOKEN, _NBYTES_BESIDE_PROMPT = 6, 12, 1 << 20
_STATUS_CODES = {404: ErrorCode.NOT_FOUND, 405: ErrorCode.INVALID_ARGUMENT}


class HttpFrontEnd:
    """Same intake and driver as the gRPC front end."""

    def __init__(
        self,
        model_name: str,
        intake: Intake,
        driver: Driver,
        pool: WorkerPool,
        ledger: Ledger,
        metrics: RouterMetrics,
        tokenizer: Tokenizer,
    ) -> None:
        self._model_name = model_name
        self._intake = intake
        self._driver = driver
        self._pool = pool
        self._ledger = ledger
        self._metrics = metrics
        self._tokenizer = tokenizer
        prompt_nbytes = max(
            _NBYTES_PER_CHAR * intake.max_prompt_chars, _NBYTES_PER_TOKEN * intake.limits.max_context_tokens
        )
        self._max_body_nbytes = min(MAX_MESSAGE_NBYTES, prompt_nbytes + _NBYTES_BESIDE_PROMPT)

    def app(self) -> FastAPI:
        app = FastAPI(title="kvferry", openapi_url=None)
        app.add_api_route("/v1/completions", self._completions, methods=["POST"])
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"])
        app.add_api_route("/v1/models", self._models, methods=["GET"])
        app.add_api_route("/health", self._health, methods=["GET"])
        app.add_api_route("/metrics", self._render_metrics, methods=["GET"])
        app.add_api_route("/server_info", self._server_info, methods=["GET"])
        app.add_exception_handler(HTTPException, _http_error)
        return app

    # -- generation -------------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        return await self._answered(request, CompletionBody, CompletionAnswer)

    async def _chat(self, request: Request) -> Response:
        return await self._answered(request, ChatBody, ChatAnswer)

    async def _answered(self, request: Request, kind: type[B], shape: type[Answer]) -> Response:
        request_id, arrived = new_arrival()
        try:
            body = parse_body(kind, await _read_body(request, self._max_body_nbytes))
            ask = body.ask(request.headers.get(REQUEST_ID_HEADER, ""))
            job = await while_connected(request.receive, self._intake.job(ask, request_id, arrived))
        except ClientDisconnect:
            return Response(status_code=ErrorCode.CANCELLED.http_status)  # for the books: nobody reads it
        except Exception as error:
            return error_response(public_error(error, request_id), request_id)
        answer = shape(job, self._model_name, self._token_text)
        exchange: Exchange
        if body.stream:
            exchange = StreamExchange(job, answer, self._driver, include_usage=body.include_usage)
        else:
            exchange = WholeExchange(job, answer, self._driver)
        return exchange

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special=False)

    # -- information ------------------------------------------------------------------------------------

    async def _models(self) -> Response:
        limits = self._intake.limits
        entry = {
            "id": self._model_name,
            "object": "model",
            "created": 0,
            "owned_by": "kvferry",
            "max_model_len": limits.max_context_tokens,
        }
        return JSONResponse({"object": "list", "data": [entry]})

    async def _health(self) -> Response:
        """200 while a request could be served now."""
        topology = self._pool.topology
        workers = {member.facts.name: member.state.value for member in self._pool.members()}
        body = {"status": "ok" if topology.usable else "unavailable", "workers": workers}
        return JSONResponse(body, status_code=200 if topology.usable else 503)

    async def _render_metrics(self) -> Response:
        self._metrics.queue_depth.set(self._driver.queue_depth)
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def _server_info(self) -> Response:
        return JSONResponse(
            {
                "model": self._model_name,
                "limits": asdict(self._intake.limits),
                "router": {"requests": dict(self._ledger.counts), "queue_depth": self._driver.queue_depth},
                "workers": [_worker_info(member) for member in self._pool.members()],
                "problems": list(self._pool.topology.problems),
            }
        )


def _worker_info(member: Member) -> dict[str, Any]:
    facts = member.facts
    return {
        "name": facts.name,
        "role": facts.role.value,
        "state": member.state.value,
        "state_reason": member.reason,
        "pid": facts.pid,
        "incarnation": facts.incarnation,
        "endpoint": facts.endpoint,
        "model": facts.model,
        "kv_cache_core": facts.kv_cache_core,
        "blocks": asdict(facts.blocks),
        "requests": dict(facts.requests),
        "cache": asdict(facts.cache),
        "tiers": [asdict(tier) for tier in facts.tiers],
        "peers": sorted(facts.peers_ready),
        "resolution": resolution_dict(facts.resolution),
    }


async def _read_body(request: Request, max_nbytes: int) -> bytes:
    """Raises InvalidRequestError as soon as the body passes the limit."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_nbytes:
            raise InvalidRequestError(f"the body exceeds the limit of {max_nbytes} bytes", field="body")
    return bytes(body)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the same form as all other errors."""
    assert isinstance(error, HTTPException)
    request_id, _ = new_arrival()
    code = _STATUS_CODES.get(error.status_code, ErrorCode.INTERNAL)
    where = f"{request.method} {request.url.path}"
    response = error_response(error_for_code(code, f"{error.detail}: {where}"), request_id)
    response.status_code = error.status_code
    return response
