"""The gRPC shell of `kvferry.v1.Transceiver`. Never blocks its event loop."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import grpc
import grpc.aio

from kvferry.core import KVFerryError
from kvferry.core.codec import ERROR_METADATA_KEY, error_to_wire, process_from_wire, rank_from_wire, rank_to_wire
from kvferry.proto import worker_pb2, worker_pb2_grpc
from kvferry.transceiver.base import Transceiver
from kvferry.transceiver.control import ControlTarget

logger = logging.getLogger(__name__)


_Context = grpc.aio.ServicerContext[Any, Any]


class TransceiverService(worker_pb2_grpc.TransceiverServicer):
    def __init__(self, target: ControlTarget) -> None:
        self._target = target

    async def Handshake(  # noqa: N802 - the name the contract gives it
        self, request: worker_pb2.HandshakeRequest, context: _Context
    ) -> worker_pb2.HandshakeReply:
        try:
            initiator = rank_from_wire(request.initiator)
            answer = self._target.answer_handshake(initiator)
        except KVFerryError as error:
            logger.warning("handshake refused: %s", error.message)
            await _refuse(context, error)
        return worker_pb2.HandshakeReply(target=rank_to_wire(answer))

    async def Heartbeat(  # noqa: N802
        self, request: worker_pb2.LeaseHeartbeat, context: _Context
    ) -> worker_pb2.LeaseHeartbeatReply:
        unknown = self._target.answer_heartbeat(request.incarnation, request.transfer_ids)
        return worker_pb2.LeaseHeartbeatReply(unknown=unknown)

    async def Cancel(  # noqa: N802
        self, request: worker_pb2.TransferCancel, context: _Context
    ) -> worker_pb2.TransferCancelReply:
        outcome = self._target.answer_cancel(request.transfer_id, request.nonce)
        return worker_pb2.TransferCancelReply(outcome=outcome.value)

    async def OpenPush(  # noqa: N802
        self, request: worker_pb2.PushOpen, context: _Context
    ) -> worker_pb2.PushOpened:
        try:
            digest = self._target.answer_open_push(
                request.incarnation, request.grant, process_from_wire(request.process)
            )
        except KVFerryError as error:
            logger.warning("push refused: %s", error.message)
            await _refuse(context, error)
        return worker_pb2.PushOpened(agent_digest=digest)

    async def CheckPush(  # noqa: N802
        self, request: worker_pb2.PushCheck, context: _Context
    ) -> worker_pb2.PushChecked:
        report = self._target.answer_check_push(request.transfer_id, request.nonce, stop=request.stop)
        return worker_pb2.PushChecked(
            incarnation=report.incarnation, state=report.state.value, nbytes=report.nbytes, cut=report.cut
        )


async def _refuse(context: _Context, error: KVFerryError) -> NoReturn:
    await context.abort(
        grpc.StatusCode[error.code.name],
        error.message,
        trailing_metadata=((ERROR_METADATA_KEY, error_to_wire(error)),),
    )
    raise AssertionError("abort returned")


def add_transceiver_service(server: grpc.aio.Server, transceiver: Transceiver) -> None:
    """Adds the control channel of `transceiver` to a worker's server, before the server starts."""
    if not isinstance(transceiver, ControlTarget):
        raise TypeError(f"{type(transceiver).__name__} does not answer the control channel")
    worker_pb2_grpc.add_TransceiverServicer_to_server(TransceiverService(transceiver), server)
