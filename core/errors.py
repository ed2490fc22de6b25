"""Errors under one root, named by whose fault they are and what to do.

Every error carries the status an API client sees: a gRPC status name and its HTTP equivalent
(the mapping of https://github.com/googleapis/googleapis/blob/master/google/rpc/code.proto).
"""

from __future__ import annotations

from enum import Enum


class ErrorCode(Enum):
    """A gRPC status by name; `http_status` is what the HTTP front end answers for it."""

    INVALID_ARGUMENT = 400
    NOT_FOUND = 404
    CANCELLED = 499
    RESOURCE_EXHAUSTED = 429
    INTERNAL = 500
    UNIMPLEMENTED = 501
    UNAVAILABLE = 503
    DEADLINE_EXCEEDED = 504

    @property
    def http_status(self) -> int:
        return self.value


class KVFerryError(Exception):
    """The root. `field` names the request field or setting at fault, if there is one."""

    code = ErrorCode.INTERNAL

    def __init__(self, message: str, *, field: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidRequestError(KVFerryError):
    """The client's fault: a parameter is out of its limits. The message names both."""

    code = ErrorCode.INVALID_ARGUMENT


class ModelNotFoundError(KVFerryError):
    """The request names a model that is not served here."""

    code = ErrorCode.NOT_FOUND


class NotFoundError(KVFerryError):
    """A named worker, transfer or other object does not exist."""

    code = ErrorCode.NOT_FOUND


class OverloadedError(KVFerryError):
    """A bounded queue or budget is full; `retry_after_s` says when to try again."""

    code = ErrorCode.RESOURCE_EXHAUSTED


class RequestCancelledError(KVFerryError):
    """The client went away or cancelled."""

    code = ErrorCode.CANCELLED


class DeadlineExceededError(KVFerryError):
    """The request's deadline passed before it finished."""

    code = ErrorCode.DEADLINE_EXCEEDED


class UnavailableError(KVFerryError):
    """No worker can serve this now: lost, draining, or not started."""

    code = ErrorCode.UNAVAILABLE


class TransferError(KVFerryError):
    """A KV transfer failed; the request may be computed again elsewhere."""

    code = ErrorCode.UNAVAILABLE


class ConfigError(KVFerryError):
    """The operator's fault: a setting, flag or environment variable. `field` is the setting."""

    code = ErrorCode.INVALID_ARGUMENT


class CheckpointError(ConfigError):
    """A model directory is incomplete or does not fit its own config; names the file or tensor."""


class InternalError(KVFerryError):
    """Our fault. Clients see a request id, never a stack trace."""


_BY_CODE: dict[ErrorCode, type[KVFerryError]] = {
    ErrorCode.INVALID_ARGUMENT: InvalidRequestError,
    ErrorCode.NOT_FOUND: NotFoundError,
    ErrorCode.CANCELLED: RequestCancelledError,
    ErrorCode.RESOURCE_EXHAUSTED: OverloadedError,
    ErrorCode.INTERNAL: InternalError,
    ErrorCode.UNAVAILABLE: UnavailableError,
    ErrorCode.DEADLINE_EXCEEDED: DeadlineExceededError,
}


def error_for_code(code: ErrorCode, message: str, field: str = "", retry_after_s: float = 0.0) -> KVFerryError:
    """The error a remote peer raised, raised again here."""
    return _BY_CODE.get(code, InternalError)(message, field=field, retry_after_s=retry_after_s)
