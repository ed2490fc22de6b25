"""The decode worker (and, without a transceiver, the aggregated one), behind ``kvferry.v1.Decode``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc

from kvferry.core import DECODE_TRANSITIONS, DecodeLeg, Lifecycle, OutputDelta, codec
from kvferry.decode.loader import TransceiverLoader
from kvferry.engine import EngineHost, EngineState, GenerationScheduler, Granted, ModelRunner, Sequence, abort
from kvferry.kvcache import KVCacheManager
from kvferry.proto import worker_pb2, worker_pb2_grpc
from kvferry.text import Tokenizer
from kvferry.transceiver import Transceiver


class DecodeWorker(worker_pb2_grpc.DecodeServicer):
    """Owns its scheduler, engine thread and transceiver; `close` ends them.

    recompute: a request whose KV could not be loaded computes its prompt here (else it fails). max_quarantined: the
    share of the blocks that late writers may block before it refuses hand-offs and calls itself unhealthy.
    """

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
        manager: KVCacheManager,
        transceiver: Transceiver | None,
        tokenizer: Tokenizer | None,
        recompute: bool = True,
        max_quarantined: float = 0.25,
    ) -> None:
        self._host = EngineHost(name)
        self._runner = runner
        self._tokenizer = tokenizer
        self._transceiver = transceiver
        loader = TransceiverLoader(transceiver, self._host.thread.post, runner.settle_pages) if transceiver else None
        self._scheduler = GenerationScheduler(
            runner, manager, self._host.thread.emit, loader, recompute, max_quarantined
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_DecodeServicer_to_server(self, server)

    def start(self) -> None:
        """Call on the running loop of the gRPC server."""
        self._host.start(self._scheduler)

    async def state(self) -> EngineState:
        return await self._host.state()

    def drain(self) -> None:
        self._host.drain()

    def connect(self, endpoint: str) -> None:
        """First contact with a prefill worker; blocking. Raises TransferError naming what does not fit."""
        if self._transceiver is not None:
            self._transceiver.connect(endpoint)

    def close(self) -> None:
        self._host.close()
        if self._transceiver is not None:
            self._transceiver.close()

    # -- kvferry.v1.Decode (loop) -----------------------------------------------------------------------

    async def Run(  # noqa: N802 - the name of the RPC
        self, wire: worker_pb2.DecodeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.DecodeReply]:
        try:
            sequence = self._sequence(wire)
            async with self._host.run(sequence, lambda: self._add(sequence, wire.handle)) as events:
                async for event in events:
                    assert isinstance(event, OutputDelta)
                    yield codec.delta_to_wire(event)
                    if event.finish_reason is not None:
                        return
        except Exception as error:
            await abort(context, error, wire.request.request_id)

    async def RunReserved(  # noqa: N802 - the name of the RPC
        self, steps: AsyncIterator[worker_pb2.DecodeStep], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.DecodeReply]:
        request_id = ""
        try:
            wire = (await anext(steps)).reserve
            request_id = wire.request.request_id
            sequence = self._sequence(wire)
            writer = codec.address_from_wire(wire.writer) if wire.HasField("writer") else None
            async with self._host.run(sequence, lambda: self._scheduler.add_reserved(sequence, writer)) as events:
                feeding = asyncio.create_task(self._feed(sequence.key, steps))
                try:
                    async for event in events:
                        if isinstance(event, Granted):
                            yield worker_pb2.DecodeReply(grant=event.grant)
                            continue
                        assert isinstance(event, OutputDelta)
                        yield codec.delta_to_wire(event)
                        if event.finish_reason is not None:
                            return
                finally:
                    feeding.cancel()
        except Exception as error:
            await abort(context, error, request_id)

    async def _feed(self, key: int, steps: AsyncIterator[worker_pb2.DecodeStep]) -> None:
        """Passes on to the engine thread what prefill says, in order."""
        async for step in steps:
            if step.HasField("part"):
                self._host.thread.post(partial(self._scheduler.add_part, key, codec.part_from_wire(step.part)))
                continue
            request, aux = codec.request_from_wire(step.start.request), step.start.aux
            go = partial(self._scheduler.start, key, request, step.start.handle, aux.usage.cached_tokens)
            self._host.thread.post(go)
            return

    def _sequence(self, wire: worker_pb2.DecodeRequest) -> Sequence[DecodeLeg]:
        leg = Lifecycle(DecodeLeg.QUEUED, DECODE_TRANSITIONS)
        sequence = Sequence(codec.request_from_wire(wire.request), leg, self._runner.limits, self._tokenizer)
        if wire.HasField("aux"):
            sequence.cached_tokens = wire.aux.usage.cached_tokens
        return sequence

    def _add(self, sequence: Sequence[DecodeLeg], handle: bytes) -> None:
        if handle:
            self._scheduler.add_with_handle(sequence, handle)
        else:
            self._scheduler.add(sequence)
