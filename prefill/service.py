"""The prefill worker: its scheduler on an engine thread, behind ``kvferry.v1.Prefill``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc

from kvferry.core import PREFILL_TRANSITIONS, HandOffPart, Lifecycle, PrefillLeg, TokenRange, codec
from kvferry.engine import EngineHost, EngineState, ModelRunner, Sequence, abort
from kvferry.kvcache import BlockHold, KVCacheManager
from kvferry.prefill.scheduler import PrefillResult, PrefillScheduler
from kvferry.proto import worker_pb2, worker_pb2_grpc
from kvferry.text import Tokenizer
from kvferry.transceiver import CancelOutcome, Transceiver


class PrefillWorker(worker_pb2_grpc.PrefillServicer):
    """Owns its scheduler, engine thread and transceiver; `close` ends them."""

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
        manager: KVCacheManager,
        transceiver: Transceiver,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._host = EngineHost(name)
        self._runner = runner
        self._tokenizer = tokenizer
        self._transceiver = transceiver
        self._scheduler = PrefillScheduler(runner, manager, self._host.thread.emit, self)

    def add_to(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_PrefillServicer_to_server(self, server)

    def start(self) -> None:
        """Call on the running loop of the gRPC server."""
        self._host.start(self._scheduler)

    async def state(self) -> EngineState:
        return await self._host.state()

    def drain(self) -> None:
        self._host.drain()

    def close(self) -> None:
        self._host.close()
        self._transceiver.close()

    # -- Advertiser (engine thread) ---------------------------------------------------------------------

    def advertise(
        self, hold: BlockHold, tokens: TokenRange, tokens_digest: bytes, released: Callable[[], None]
    ) -> bytes:
        return self._transceiver.advertise(hold, tokens, tokens_digest, lambda: self._host.thread.post(released))

    def withdraw(self, handle: bytes) -> CancelOutcome:
        return self._transceiver.withdraw(handle)

    def open_push(
        self, grant: bytes, tokens_digest: bytes, failed: Callable[[str], None]
    ) -> tuple[int, TokenRange] | None:
        side = self._transceiver.push_side
        if side is None:
            return None
        return side.open_push(grant, tokens_digest, lambda reason: self._host.thread.post(partial(failed, reason)))

    def push(self, push_id: int, hold: BlockHold, tokens: TokenRange, released: Callable[[], None]) -> None:
        side = self._transceiver.push_side
        assert side is not None, "a push was opened"
        side.push(push_id, hold, tokens, lambda: self._host.thread.post(released))

    def give_up_push(self, push_id: int) -> None:
        side = self._transceiver.push_side
        assert side is not None, "a push was opened"
        side.give_up_push(push_id)

    # -- kvferry.v1.Prefill (loop) ----------------------------------------------------------------------

    async def Run(  # noqa: N802 - the name of the RPC
        self, wire: worker_pb2.WorkerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.PrefillReply:
        try:
            result = await self._run(wire)
        except Exception as error:
            await abort(context, error, wire.request_id)
        return _reply(result)

    async def RunInParts(  # noqa: N802 - the name of the RPC
        self, wire: worker_pb2.WorkerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.PrefillStep]:
        try:
            sequence = self._sequence(wire)
            async with self._host.run(sequence, lambda: self._scheduler.add_in_parts(sequence, wire.grant)) as events:
                async for event in events:
                    if isinstance(event, HandOffPart):
                        yield worker_pb2.PrefillStep(part=codec.part_to_wire(event))
                    else:
                        assert isinstance(event, PrefillResult)
                        yield worker_pb2.PrefillStep(reply=_reply(event))
                        return
        except asyncio.CancelledError:
            self._abandon(wire.request_id)
            raise
        except Exception as error:
            await abort(context, error, wire.request_id)

    def _sequence(self, wire: worker_pb2.WorkerRequest) -> Sequence[PrefillLeg]:
        leg = Lifecycle(PrefillLeg.QUEUED, PREFILL_TRANSITIONS)
        return Sequence(codec.request_from_wire(wire), leg, self._runner.limits, self._tokenizer)

    async def _run(self, wire: worker_pb2.WorkerRequest) -> PrefillResult:
        sequence = self._sequence(wire)
        try:
            async with self._host.run(sequence, lambda: self._scheduler.add(sequence)) as events:
                result = await events.get()
                assert isinstance(result, PrefillResult)
                return result
        except asyncio.CancelledError:
            self._abandon(wire.request_id)  # it may have been answered meanwhile
            raise

    def _abandon(self, request_id: str) -> None:
        self._host.thread.post(lambda: self._scheduler.abandon(request_id))

    async def Release(  # noqa: N802 - the name of the RPC
        self, wire: worker_pb2.ReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ReleaseReply:
        try:
            outcome = self._transceiver.withdraw(wire.handle)
        except Exception as error:
            await abort(context, error, "release")
        return worker_pb2.ReleaseReply(found=outcome is not CancelOutcome.NOT_FOUND)

    async def Abandon(  # noqa: N802 - the name of the RPC
        self, wire: worker_pb2.AbandonRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.AbandonReply:
        self._abandon(wire.request_id)
        return worker_pb2.AbandonReply()


def _reply(result: PrefillResult) -> worker_pb2.PrefillReply:
    return worker_pb2.PrefillReply(
        aux=codec.aux_to_wire(result.aux),
        finish_reason=codec.finish_to_wire(result.finish_reason),
        handle=result.handle,
        text=result.text,
        pushed=result.pushed,
    )
