"""Calls whose request is no readable message end as every bad request does: with a status and a detail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvferry.core import InvalidRequestError, new_request_id
from kvferry.router.failures import Context, abort

Method = Callable[[Any, Context], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Stands for a request that could not be parsed. Raising there would end the call before anybody can say why."""

    method: str

    def error(self) -> InvalidRequestError:
        return InvalidRequestError(f"the request is not a readable message for {self.method}", field="request")


class ReadableRequests(grpc.aio.ServerInterceptor):
    """For the services whose methods are coroutines: those of `package`, such as ``kvferry.v1``."""

    def __init__(self, package: str) -> None:
        self._prefix = f"/{package}."

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(self._prefix):
            return handler
        make, inner = _shape(handler)
        guarded = _guarded_stream(inner) if handler.request_streaming else _guarded(inner)
        return make(
            guarded,
            request_deserializer=_forgiving(handler.request_deserializer, _Unreadable(method)),
            response_serializer=handler.response_serializer,
        )


def _shape(handler: Any) -> tuple[Callable[..., Any], Method]:
    """How a handler of this kind is made, and what it calls."""
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler, handler.unary_unary
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream
    if handler.stream_unary is not None:
        return grpc.stream_unary_rpc_method_handler, handler.stream_unary
    return grpc.stream_stream_rpc_method_handler, handler.stream_stream


def _forgiving(parse: Callable[[bytes], Any], instead: _Unreadable) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return instead

    return read


def _guarded(inner: Method) -> Method:
    async def call(request: Any, context: Context) -> Any:
        if isinstance(request, _Unreadable):
            await abort(context, request.error(), new_request_id())
        return await inner(request, context)

    return call


def _guarded_stream(inner: Method) -> Method:
    async def call(requests: AsyncIterator[Any], context: Context) -> Any:
        return await inner(_Readable(requests), context)

    return call


class _Readable:
    """A stream of requests that raises InvalidRequestError at one that cannot be read."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = aiter(requests)

    def __aiter__(self) -> _Readable:
        return self

    async def __anext__(self) -> Any:
        request = await anext(self._requests)
        if isinstance(request, _Unreadable):
            raise request.error()
        return request
