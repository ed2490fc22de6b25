"""How an error leaves over gRPC: status, message, and a detail for programs in the trailing metadata."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc

from kvferry.core import DeadlineExceededError, InternalError, KVFerryError, codec

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


def public_error(error: Exception, request_id: str) -> KVFerryError:
    """What a client may know of `error`. Our own bugs go to the log under the request's id."""
    if isinstance(error, TimeoutError):
        return DeadlineExceededError("the request's deadline passed (the longest is router.request_timeout_s)")
    if isinstance(error, InternalError) or not isinstance(error, KVFerryError):
        logger.error("request %s: internal error", request_id, exc_info=error)
        said = f"{error.message} " if isinstance(error, InternalError) else ""
        return InternalError(f"internal error: {said}(request {request_id})")
    return error


async def abort(context: Context, error: KVFerryError, request_id: str) -> NoReturn:
    metadata = ((codec.ERROR_METADATA_KEY, codec.error_to_wire(error, request_id)),)
    await context.abort(getattr(grpc.StatusCode, error.code.name), error.message, metadata)
    raise AssertionError("unreachable: abort raises")


@asynccontextmanager
async def failures_answered(context: Context, request_id: str) -> AsyncIterator[None]:
    """Ends the call with a status for whatever the body raises."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        if context.done():  # the client is gone: there is nobody to tell
            logger.debug("request %s: %r after its call was over", request_id, error)
            return
        await abort(context, public_error(error, request_id), request_id)
