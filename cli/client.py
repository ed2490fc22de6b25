"""A blocking client of ``kvferry.v1.Generation``, built on the generated stubs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc

from kvferry.cluster.admin_client import rpc_error
from kvferry.core import FinishReason, InvalidRequestError, SamplingParams, codec
from kvferry.proto import generation_pb2, generation_pb2_grpc

GenerateRequest = generation_pb2.GenerateRequest

DEFAULT_TIMEOUT_S = 600.0
MAX_TIMEOUT_S = 30 * 86_400.0

Message = tuple[str, str]
"""(role, content)"""


@dataclass(slots=True)
class Completed:
    """A completion, put together from the messages of a stream (or one message)."""

    request_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: dict[str, int] = field(default_factory=dict)
    route: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)

    def add(self, message: generation_pb2.GenerateResponse) -> None:
        self.request_id = message.request_id or self.request_id
        self.token_ids += message.token_ids
        self.text += message.text
        self.logprobs += [_logprob_dict(logprob) for logprob in message.logprobs]
        if message.finish_reason:
            self.finish_reason = codec.finish_from_wire(message.finish_reason)
            usage, route, timings = message.usage, message.route, message.timings
            self.usage = {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            }
            self.route = {
                "prefill": route.prefill or None,
                "decode": route.decode or None,
                "disaggregated": route.disaggregated,
                "transferred_bytes": route.transferred_bytes,
                "retries": route.retries,
            }
            names = ("queue_ms", "prefill_ms", "transfer_ms", "decode_ms", "ttft_ms", "total_ms")
            self.timings = {name: round(getattr(timings, name), 3) for name in names}

    def as_dict(self, with_logprobs: bool) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason.value if self.finish_reason else None,
            "logprobs": self.logprobs if with_logprobs else None,
            "usage": self.usage,
            "route": self.route,
            "timings": self.timings,
        }


class GenerationClient:
    """Owns its channel. Calls are bounded by `timeout_s` and raise the server's KVFerryError.

    Raises InvalidRequestError for a timeout that bounds nothing.
    """

    def __init__(self, endpoint: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise InvalidRequestError(
                f"timeout must be above 0 and at most {MAX_TIMEOUT_S:.0f} seconds, got {timeout_s}", field="timeout"
            )
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(endpoint)
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)

    def generate(self, request: generation_pb2.GenerateRequest) -> Completed:
        completed = Completed()
        try:
            completed.add(self._stub.Generate(request, timeout=self._timeout_s))
        except grpc.RpcError as error:
            raise rpc_error(error, self._endpoint) from None
        return completed

    def stream(self, request: generation_pb2.GenerateRequest) -> Iterator[generation_pb2.GenerateResponse]:
        """Messages as they come. Closing the iterator early cancels the request."""
        call = self._stub.GenerateStream(request, timeout=self._timeout_s)
        try:
            yield from call
        except grpc.RpcError as error:
            raise rpc_error(error, self._endpoint) from None
        finally:
            call.cancel()

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> GenerationClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def chat_request(messages: Sequence[Message], sampling: SamplingParams) -> generation_pb2.GenerateRequest:
    for _, content in messages:
        _check_text("chat", content)
    wire = [generation_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    return generation_pb2.GenerateRequest(chat=generation_pb2.ChatMessages(messages=wire), sampling=_wire(sampling))


def prompt_request(prompt: str, sampling: SamplingParams) -> generation_pb2.GenerateRequest:
    _check_text("prompt", prompt)
    return generation_pb2.GenerateRequest(prompt=prompt, sampling=_wire(sampling))


def token_request(token_ids: Sequence[int], sampling: SamplingParams) -> generation_pb2.GenerateRequest:
    ids = generation_pb2.TokenIds(ids=token_ids)
    return generation_pb2.GenerateRequest(prompt_token_ids=ids, sampling=_wire(sampling))


def label_request(request: generation_pb2.GenerateRequest, **labels: str) -> None:
    """Sets model, cache_salt and request_id. Raises InvalidRequestError for text that cannot be sent."""
    for name, value in labels.items():
        _check_text(name, value)
        setattr(request, name, value)


def _check_text(name: str, text: str) -> None:
    """Bytes of the command line that are no text come as lone surrogates, which nothing on the wire can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} is not valid UTF-8: the byte at position {error.start} is no text", field=name
        ) from None


def _wire(sampling: SamplingParams) -> generation_pb2.SamplingParams:
    """Raises InvalidRequestError naming the parameter that does not fit its field."""
    for name in sampling.__dataclass_fields__:
        value = getattr(sampling, name)
        for text in value if name == "stop" else ():
            _check_text(name, text)
        if isinstance(value, int | float):
            try:
                setattr(generation_pb2.SamplingParams(), name, value)
            except ValueError:
                raise InvalidRequestError(f"{name} is too large to be sent: {value}", field=name) from None
    return codec.sampling_to_wire(sampling)


def _logprob_dict(wire: generation_pb2.TokenLogprob) -> dict[str, Any]:
    top = [{"token_id": entry.token_id, "logprob": entry.logprob} for entry in wire.top]
    return {"token_id": wire.token_id, "logprob": wire.logprob, "top": top}
