"""``kvferry.v1.Generation``: the gRPC front end."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from kvferry.core import InvalidRequestError, codec
from kvferry.proto import generation_pb2, generation_pb2_grpc
from kvferry.router.driver import Driver
from kvferry.router.failures import Context, failures_answered
from kvferry.router.intake import Ask, ChatPrompt, Intake, Prompt, TextPrompt, TokensPrompt, new_arrival
from kvferry.router.job import Job, Update
from kvferry.router.tokenizing import check_message_count


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """Cancelling a call cancels the request on its workers."""

    def __init__(self, intake: Intake, driver: Driver) -> None:
        self._intake = intake
        self._driver = driver

    async def Generate(  # noqa: N802 - the name of the RPC
        self, wire: generation_pb2.GenerateRequest, context: Context
    ) -> generation_pb2.GenerateResponse:
        request_id, arrived = new_arrival()
        whole = generation_pb2.GenerateResponse()
        async with failures_answered(context, request_id):
            job = await self._job(wire, context, request_id, arrived)
            async with asyncio.timeout(job.deadline.left_s()), aclosing(self._driver.run(job)) as updates:
                async for update in updates:
                    _append(whole, _response(job, update))
        return whole

    async def GenerateStream(  # type: ignore[override]  # noqa: N802 - as above; a handler that writes by itself
        self, wire: generation_pb2.GenerateRequest, context: Context
    ) -> None:
        """Waits for a slow client at `write`; its worker is then held back by flow control, and nobody else."""
        request_id, arrived = new_arrival()
        async with failures_answered(context, request_id):
            job = await self._job(wire, context, request_id, arrived)
            async with asyncio.timeout(job.deadline.left_s()), aclosing(self._driver.run(job)) as updates:
                async for update in updates:
                    await context.write(_response(job, update))

    async def Tokenize(  # noqa: N802 - the name of the RPC
        self, wire: generation_pb2.TokenizeRequest, context: Context
    ) -> generation_pb2.TokenizeResponse:
        request_id, _ = new_arrival()
        async with failures_answered(context, request_id):
            token_ids = await self._intake.tokenize(wire.model, self._prompt(wire, "text"), context.time_remaining())
            return generation_pb2.TokenizeResponse(
                token_ids=token_ids, max_context_tokens=self._intake.limits.max_context_tokens
            )

    async def _job(
        self, wire: generation_pb2.GenerateRequest, context: Context, request_id: str, arrived: float
    ) -> Job:
        ask = Ask(
            prompt=self._prompt(wire, "prompt"),
            sampling=codec.sampling_from_wire(wire.sampling),
            model=wire.model,
            client_id=wire.request_id,
            cache_salt=wire.cache_salt,
            timeout_s=context.time_remaining(),
        )
        return await self._intake.job(ask, request_id, arrived)

    def _prompt(self, wire: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest, text_field: str) -> Prompt:
        kind = wire.WhichOneof("input")
        if kind is None:
            raise InvalidRequestError(f"{text_field} is missing: send text, token ids or a chat", field=text_field)
        if kind == "chat":
            # Before they are copied: a request has room for millions of empty ones.
            check_message_count(len(wire.chat.messages), self._intake.limits)
            return ChatPrompt([{"role": message.role, "content": message.content} for message in wire.chat.messages])
        if kind == "prompt_token_ids":
            assert isinstance(wire, generation_pb2.GenerateRequest)
            return TokensPrompt(wire.prompt_token_ids.ids)
        return TextPrompt(getattr(wire, text_field))


def _response(job: Job, update: Update) -> generation_pb2.GenerateResponse:
    delta = update.delta
    response = generation_pb2.GenerateResponse(
        request_id=job.label,
        token_ids=delta.token_ids,
        text=delta.text,
        logprobs=[codec.logprob_to_wire(logprob) for logprob in delta.logprobs],
    )
    if update.route is not None:
        route = update.route
        response.finish_reason = codec.finish_to_wire(delta.finish_reason)
        response.usage.CopyFrom(codec.usage_to_wire(delta.usage))
        response.timings.CopyFrom(codec.timings_to_wire(delta.timings))
        response.route.CopyFrom(
            generation_pb2.Route(
                prefill=route.prefill,
                decode=route.decode,
                disaggregated=route.disaggregated,
                transferred_bytes=route.transferred_bytes,
                retries=route.retries,
            )
        )
    return response


def _append(whole: generation_pb2.GenerateResponse, part: generation_pb2.GenerateResponse) -> None:
    """Repeated fields and set messages merge as they should; text is a scalar, which merging would replace."""
    part.text = whole.text + part.text
    whole.MergeFrom(part)
    whole.text = part.text  # an empty scalar is not merged
