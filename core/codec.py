"""Wire <-> dataclass: the only importer of the generated message modules beside the gRPC shells.

Names pair up as ``x_to_wire`` / ``x_from_wire``. Decoding raises InvalidRequestError for values no peer of this
version sends, never a protobuf error.
"""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from kvferry.core.errors import ErrorCode, InvalidRequestError, KVFerryError, error_for_code
from kvferry.core.layout import AxisOrder, DType, GroupKind, KVLayout, MemRegion, TokenRange
from kvferry.core.request import (
    AuxRecord,
    BlockCounts,
    FinishReason,
    OutputDelta,
    RankProcess,
    Role,
    Timings,
    TokenLogprob,
    Usage,
    WorkerRequest,
)
from kvferry.core.resolved import Resolution, Source
from kvferry.core.sampling import SamplingParams, check_count
from kvferry.core.transfer import BlockTable, HandOffPart, PeerAddress, ProcessIdentity, RankInfo, TransferHandle
from kvferry.proto import admin_pb2, generation_pb2, worker_pb2

M = TypeVar("M", bound=Message)

ERROR_METADATA_KEY = "kvferry-error-bin"

_FINISH_TO_WIRE = {
    None: generation_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}
_FINISH_FROM_WIRE = {wire: reason for reason, wire in _FINISH_TO_WIRE.items()}

_OPTIONAL_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def parse(kind: type[M], data: bytes, what: str) -> M:
    """Parses `data` or raises InvalidRequestError naming `what`."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise InvalidRequestError(f"{what} is malformed", field=what) from None
    return message


# -- errors ---------------------------------------------------------------------------------------------


def error_to_wire(error: KVFerryError, request_id: str = "") -> bytes:
    detail = generation_pb2.ErrorDetail(
        code=error.code.name,
        message=error.message,
        field=error.field,
        request_id=request_id,
        retry_after_s=error.retry_after_s,
    )
    return detail.SerializeToString()


def error_from_wire(data: bytes) -> KVFerryError:
    detail = parse(generation_pb2.ErrorDetail, data, "error detail")
    try:
        code = ErrorCode[detail.code]
    except KeyError:
        code = ErrorCode.INTERNAL
    return error_for_code(code, detail.message, detail.field, detail.retry_after_s)


# -- sampling -------------------------------------------------------------------------------------------


def sampling_to_wire(sampling: SamplingParams) -> generation_pb2.SamplingParams:
    wire = generation_pb2.SamplingParams(
        stop=sampling.stop, stop_token_ids=sampling.stop_token_ids, logit_bias=dict(sampling.logit_bias)
    )
    for name in _OPTIONAL_SAMPLING:
        value = getattr(sampling, name)
        if value is not None:
            setattr(wire, name, value)
    return wire


def sampling_from_wire(wire: generation_pb2.SamplingParams) -> SamplingParams:
    """Unset fields take their defaults. Raises InvalidRequestError naming field and limit."""
    values: dict[str, Any] = {name: getattr(wire, name) for name in _OPTIONAL_SAMPLING if wire.HasField(name)}
    for name in ("stop", "stop_token_ids", "logit_bias"):
        check_count(name, len(getattr(wire, name)))
    return SamplingParams(
        stop=tuple(wire.stop),
        stop_token_ids=tuple(wire.stop_token_ids),
        logit_bias=dict(wire.logit_bias),
        **values,
    )


# -- results --------------------------------------------------------------------------------------------


def finish_to_wire(reason: FinishReason | None) -> generation_pb2.FinishReason:
    return _FINISH_TO_WIRE[reason]


def finish_from_wire(wire: int) -> FinishReason | None:
    try:
        return _FINISH_FROM_WIRE[wire]  # type: ignore[index]
    except KeyError:
        raise InvalidRequestError(f"unknown finish reason {wire}", field="finish_reason") from None


def logprob_to_wire(logprob: TokenLogprob) -> generation_pb2.TokenLogprob:
    top = [generation_pb2.TopLogprob(token_id=token_id, logprob=value) for token_id, value in logprob.top]
    return generation_pb2.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, top=top)


def logprob_from_wire(wire: generation_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(wire.token_id, wire.logprob, tuple((top.token_id, top.logprob) for top in wire.top))


def usage_to_wire(usage: Usage) -> generation_pb2.Usage:
    return generation_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def usage_from_wire(wire: generation_pb2.Usage) -> Usage:
    return Usage(wire.prompt_tokens, wire.completion_tokens, wire.cached_tokens)


def timings_to_wire(timings: Timings) -> generation_pb2.Timings:
    return generation_pb2.Timings(
        queue_ms=timings.queue_ms,
        prefill_ms=timings.prefill_ms,
        transfer_ms=timings.transfer_ms,
        decode_ms=timings.decode_ms,
        ttft_ms=timings.ttft_ms,
        total_ms=timings.total_ms,
    )


def timings_from_wire(wire: generation_pb2.Timings) -> Timings:
    return Timings(wire.queue_ms, wire.prefill_ms, wire.transfer_ms, wire.decode_ms, wire.ttft_ms, wire.total_ms)


def aux_to_wire(aux: AuxRecord) -> worker_pb2.AuxRecord:
    return worker_pb2.AuxRecord(
        first_token_id=aux.first_token_id,
        first_logprob=logprob_to_wire(aux.first_logprob) if aux.first_logprob else None,
        usage=usage_to_wire(aux.usage),
        timings=timings_to_wire(aux.timings),
    )


def aux_from_wire(wire: worker_pb2.AuxRecord) -> AuxRecord:
    return AuxRecord(
        first_token_id=wire.first_token_id,
        first_logprob=logprob_from_wire(wire.first_logprob) if wire.HasField("first_logprob") else None,
        usage=usage_from_wire(wire.usage),
        timings=timings_from_wire(wire.timings),
    )


def delta_to_wire(delta: OutputDelta) -> worker_pb2.DecodeReply:
    return worker_pb2.DecodeReply(
        token_ids=delta.token_ids,
        text=delta.text,
        logprobs=[logprob_to_wire(logprob) for logprob in delta.logprobs],
        finish_reason=finish_to_wire(delta.finish_reason),
        usage=usage_to_wire(delta.usage),
        transferred_bytes=delta.transferred_bytes,
        timings=timings_to_wire(delta.timings),
    )


def delta_from_wire(request_id: str, wire: worker_pb2.DecodeReply) -> OutputDelta:
    return OutputDelta(
        request_id=request_id,
        token_ids=tuple(wire.token_ids),
        text=wire.text,
        logprobs=tuple(logprob_from_wire(logprob) for logprob in wire.logprobs),
        finish_reason=finish_from_wire(wire.finish_reason),
        usage=usage_from_wire(wire.usage),
        timings=timings_from_wire(wire.timings),
        transferred_bytes=wire.transferred_bytes,
    )


# -- requests to workers --------------------------------------------------------------------------------


def request_to_wire(request: WorkerRequest) -> worker_pb2.WorkerRequest:
    return worker_pb2.WorkerRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        sampling=sampling_to_wire(request.sampling),
        scope=request.scope,
        deadline_s=request.deadline_s or 0.0,
        sent_text_chars=request.sent_text_chars,
    )


def request_from_wire(wire: worker_pb2.WorkerRequest) -> WorkerRequest:
    return WorkerRequest(
        request_id=wire.request_id,
        prompt_token_ids=tuple(wire.prompt_token_ids),
        output_token_ids=tuple(wire.output_token_ids),
        sampling=sampling_from_wire(wire.sampling),
        scope=wire.scope,
        deadline_s=wire.deadline_s or None,
        sent_text_chars=wire.sent_text_chars,
    )


# -- resolution and status ------------------------------------------------------------------------------


def resolution_to_wire(resolution: Resolution) -> admin_pb2.Resolution:
    return admin_pb2.Resolution(
        architecture=resolution.architecture,
        backend=resolution.backend,
        runtime=resolution.runtime or "",
        runtime_source=resolution.runtime_source.value if resolution.runtime_source else "",
        manager=resolution.manager,
        manager_source=resolution.manager_source.value,
        reason=resolution.reason,
        warnings=resolution.warnings,
        disaggregation=resolution.disaggregation,
    )


def resolution_from_wire(wire: admin_pb2.Resolution) -> Resolution:
    try:
        return Resolution(
            architecture=wire.architecture,
            backend=wire.backend,
            runtime=wire.runtime or None,
            runtime_source=Source(wire.runtime_source) if wire.runtime_source else None,
            manager=wire.manager,
            manager_source=Source(wire.manager_source),
            reason=wire.reason,
            warnings=tuple(wire.warnings),
            disaggregation=wire.disaggregation,
        )
    except ValueError as error:
        raise InvalidRequestError(f"resolution: {error}", field="resolution") from None


def rank_process_to_wire(rank: RankProcess) -> admin_pb2.RankStatus:
    return admin_pb2.RankStatus(rank=rank.rank, tp_rank=rank.tp_rank, pp_rank=rank.pp_rank, pid=rank.pid)


def rank_process_from_wire(wire: admin_pb2.RankStatus) -> RankProcess:
    return RankProcess(wire.rank, wire.tp_rank, wire.pp_rank, wire.pid)


def blocks_to_wire(counts: BlockCounts) -> admin_pb2.BlockCounts:
    return admin_pb2.BlockCounts(
        total=counts.total,
        free=counts.free,
        cached=counts.cached,
        pinned=counts.pinned,
        quarantined=counts.quarantined,
    )


def blocks_from_wire(wire: admin_pb2.BlockCounts) -> BlockCounts:
    return BlockCounts(wire.total, wire.free, wire.cached, wire.pinned, wire.quarantined)


# -- transceiver ----------------------------------------------------------------------------------------


def part_to_wire(part: HandOffPart) -> worker_pb2.HandOffPart:
    return worker_pb2.HandOffPart(handle=part.handle, stop=part.stop)


def part_from_wire(wire: worker_pb2.HandOffPart) -> HandOffPart:
    return HandOffPart(wire.handle, wire.stop)


def address_to_wire(address: PeerAddress) -> worker_pb2.Peer:
    return worker_pb2.Peer(endpoint=address.endpoint, incarnation=address.incarnation)


def address_from_wire(wire: worker_pb2.Peer) -> PeerAddress:
    return PeerAddress(wire.endpoint, wire.incarnation)


def process_to_wire(process: ProcessIdentity) -> worker_pb2.ProcessIdentity:
    return worker_pb2.ProcessIdentity(machine=process.machine, pid=process.pid, started=process.started)


def process_from_wire(wire: worker_pb2.ProcessIdentity) -> ProcessIdentity:
    return ProcessIdentity(wire.machine, wire.pid, wire.started)


def layout_to_wire(layout: KVLayout) -> worker_pb2.KVLayout:
    return worker_pb2.KVLayout(
        kind=layout.kind.value,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype.value,
        tokens_per_block=layout.tokens_per_block,
        axis_order=layout.axis_order.value,
        window=layout.window or 0,
        planes=layout.planes,
        first_head=layout.first_head,
        all_heads=layout.all_heads or 0,
    )


def layout_from_wire(wire: worker_pb2.KVLayout) -> KVLayout:
    try:
        return KVLayout(
            kind=GroupKind(wire.kind),
            layers=tuple(wire.layers),
            kv_heads=wire.kv_heads,
            head_dim=wire.head_dim,
            dtype=DType(wire.dtype),
            tokens_per_block=wire.tokens_per_block,
            axis_order=AxisOrder(wire.axis_order),
            window=wire.window or None,
            planes=wire.planes,
            first_head=wire.first_head,
            all_heads=wire.all_heads or None,
        )
    except ValueError as error:
        raise InvalidRequestError(f"layout: {error}", field="layouts") from None


def _region_to_wire(region: MemRegion) -> worker_pb2.MemRegion:
    return worker_pb2.MemRegion(addr=region.addr, nbytes=region.nbytes, device=region.device)


def _region_from_wire(wire: worker_pb2.MemRegion) -> MemRegion:
    return MemRegion(wire.addr, wire.nbytes, wire.device)


def rank_to_wire(rank: RankInfo) -> worker_pb2.RankInfo:
    return worker_pb2.RankInfo(
        protocol_version=rank.protocol_version,
        worker=rank.worker,
        role=rank.role.value,
        incarnation=rank.incarnation,
        endpoint=rank.endpoint,
        model_fingerprint=rank.model_fingerprint,
        resolution=resolution_to_wire(rank.resolution),
        tp_rank=rank.tp_rank,
        tp_size=rank.tp_size,
        pp_rank=rank.pp_rank,
        pp_size=rank.pp_size,
        layouts=[layout_to_wire(layout) for layout in rank.layouts],
        pools=[_region_to_wire(region) for region in rank.pools],
        generations=[_region_to_wire(region) for region in rank.generations],
        agent_metadata=rank.agent_metadata,
        handle_key=rank.handle_key,
        others=[rank_to_wire(other) for other in rank.others],
    )


def rank_from_wire(wire: worker_pb2.RankInfo) -> RankInfo:
    try:
        role = Role(wire.role)
    except ValueError as error:
        raise InvalidRequestError(f"role: {error}", field="role") from None
    return RankInfo(
        worker=wire.worker,
        role=role,
        incarnation=wire.incarnation,
        endpoint=wire.endpoint,
        model_fingerprint=wire.model_fingerprint,
        resolution=resolution_from_wire(wire.resolution),
        layouts=tuple(layout_from_wire(layout) for layout in wire.layouts),
        pools=tuple(_region_from_wire(region) for region in wire.pools),
        generations=tuple(_region_from_wire(region) for region in wire.generations),
        agent_metadata=wire.agent_metadata,
        handle_key=wire.handle_key,
        tp_rank=wire.tp_rank,
        tp_size=wire.tp_size,
        pp_rank=wire.pp_rank,
        pp_size=wire.pp_size,
        protocol_version=wire.protocol_version,
        others=tuple(rank_from_wire(other) for other in wire.others),
    )


def resolution_to_bytes(resolution: Resolution) -> bytes:
    return resolution_to_wire(resolution).SerializeToString()


def resolution_from_bytes(data: bytes) -> Resolution:
    return resolution_from_wire(parse(admin_pb2.Resolution, data, "resolution"))


def rank_to_bytes(rank: RankInfo) -> bytes:
    return rank_to_wire(rank).SerializeToString()


def rank_from_bytes(data: bytes) -> RankInfo:
    return rank_from_wire(parse(worker_pb2.RankInfo, data, "rank"))


def handle_to_bytes(handle: TransferHandle) -> bytes:
    blocks = [
        worker_pb2.BlockList(ids=table.block_ids, generations=table.generations, first_block=table.first_block)
        for table in handle.blocks
    ]
    wire = worker_pb2.TransferHandle(
        incarnation=handle.incarnation,
        endpoint=handle.endpoint,
        transfer_id=handle.transfer_id,
        nonce=handle.nonce,
        start=handle.tokens.start,
        stop=handle.tokens.stop,
        blocks=blocks,
        tokens_digest=handle.tokens_digest,
    )
    return wire.SerializeToString()


def handle_from_bytes(data: bytes) -> TransferHandle:
    wire = parse(worker_pb2.TransferHandle, data, "handle")
    try:
        tokens = TokenRange(wire.start, wire.stop)
    except ValueError as error:
        raise InvalidRequestError(f"handle: {error}", field="handle") from None
    return TransferHandle(
        incarnation=wire.incarnation,
        endpoint=wire.endpoint,
        transfer_id=wire.transfer_id,
        nonce=wire.nonce,
        tokens=tokens,
        blocks=tuple(
            BlockTable(tuple(table.ids), tuple(table.generations), table.first_block) for table in wire.blocks
        ),
        tokens_digest=wire.tokens_digest,
    )


def signed_handle_to_bytes(handle: bytes, mac: bytes) -> bytes:
    return worker_pb2.SignedHandle(handle=handle, mac=mac).SerializeToString()


def signed_handle_from_bytes(data: bytes) -> tuple[bytes, bytes]:
    """(handle, mac) as they came; the MAC is not checked here."""
    wire = parse(worker_pb2.SignedHandle, data, "signed handle")
    return wire.handle, wire.mac
