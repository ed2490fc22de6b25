"""Streaming completions over kvferry's own gRPC service."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc

from kvferry.bench.load import Ask, CallFailedError, Client, Part
from kvferry.core import SamplingParams, codec
from kvferry.proto import generation_pb2, generation_pb2_grpc


class GRPCClient(Client):
    """kvferry.v1.Generation. endpoint: host:port."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._channel: grpc.aio.Channel | None = None

    async def parts(self, ask: Ask) -> AsyncGenerator[Part, None]:
        if self._channel is None:  # needs a running loop
            self._channel = grpc.aio.insecure_channel(self._endpoint)
        sampling = SamplingParams(temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=True)
        request = generation_pb2.GenerateRequest(
            prompt_token_ids=generation_pb2.TokenIds(ids=ask.prompt), sampling=codec.sampling_to_wire(sampling)
        )
        ended = False
        try:
            async for message in generation_pb2_grpc.GenerationStub(self._channel).GenerateStream(request):
                if message.finish_reason:
                    ended, usage = True, message.usage
                    yield Part(bool(message.token_ids), usage.prompt_tokens, usage.completion_tokens)
                else:
                    yield Part(bool(message.token_ids))
        except grpc.aio.AioRpcError as error:
            raise CallFailedError(f"{error.code().name}: {error.details()}") from None
        if not ended:
            raise CallFailedError("the stream broke off")

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
