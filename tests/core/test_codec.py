"""Every value survives the wire; what no peer sends is refused by name."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core import (
    AuxRecord,
    AxisOrder,
    BlockCounts,
    BlockTable,
    DType,
    ErrorCode,
    FinishReason,
    GroupKind,
    InvalidRequestError,
    KVLayout,
    MemRegion,
    OutputDelta,
    OverloadedError,
    PeerAddress,
    ProcessIdentity,
    RankInfo,
    Resolution,
    Role,
    SamplingParams,
    Source,
    Timings,
    TokenLogprob,
    TokenRange,
    TransferHandle,
    Usage,
    WorkerRequest,
    codec,
)
from kvferry.proto import worker_pb2

RESOLUTION = Resolution("LlamaForCausalLM", "NIXL", "PYTHON", Source.MODEL, "V2", Source.MODEL, "as preferred", ("w",))
LOGPROB = TokenLogprob(4, -0.5, ((4, -0.5), (9, -1.25)))
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)


def test_sampling_round_trip_keeps_what_is_set_and_what_is_not() -> None:
    sampling = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=3,
        seed=2**63,
        stop=("a", "b"),
        stop_token_ids=(1,),
        logit_bias={7: -2.5},
        logprobs=0,
    )
    assert codec.sampling_from_wire(codec.sampling_to_wire(sampling)) == sampling
    assert codec.sampling_from_wire(codec.sampling_to_wire(SamplingParams())) == SamplingParams()


def test_sampling_from_the_wire_is_checked() -> None:
    wire = codec.sampling_to_wire(SamplingParams())
    wire.temperature = -1.0
    with pytest.raises(InvalidRequestError, match="temperature") as caught:
        codec.sampling_from_wire(wire)
    assert caught.value.field == "temperature"


def test_request_round_trip() -> None:
    request = WorkerRequest("r", (1, 2), SamplingParams(seed=1), (3,), "salt", 2.5, 4)
    assert codec.request_from_wire(codec.request_to_wire(request)) == request
    endless = WorkerRequest("r", (1, 2), SamplingParams(seed=1))
    assert codec.request_from_wire(codec.request_to_wire(endless)).deadline_s is None


def test_results_round_trip() -> None:
    delta = OutputDelta(
        "r", (4,), "é", (LOGPROB,), FinishReason.LENGTH, Usage(3, 2, 1), Timings(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), 77
    )
    assert codec.delta_from_wire("r", codec.delta_to_wire(delta)) == delta
    for logprob in (LOGPROB, None):
        aux = AuxRecord(4, logprob, Usage(3, 1, 0), Timings(prefill_ms=2.0))
        assert codec.aux_from_wire(codec.aux_to_wire(aux)) == aux
    counts = BlockCounts(5, 4, 3, 2, 1)
    assert codec.blocks_from_wire(codec.blocks_to_wire(counts)) == counts


def test_rank_round_trip() -> None:
    layout = KVLayout(GroupKind.WINDOW, (1, 3), 2, 8, DType.BFLOAT16, 32, AxisOrder.TOKEN_HEAD, 128, 2, 1, 4)
    rank = RankInfo(
        worker="prefill-0",
        role=Role.PREFILL,
        incarnation="abc",
        endpoint="127.0.0.1:5",
        model_fingerprint="f",
        resolution=RESOLUTION,
        layouts=(layout,),
        pools=(MemRegion(4096, 8192),),
        generations=(MemRegion(64, 128, "cuda:0"),),
        agent_metadata=b"\0meta",
        handle_key=b"key",
        tp_rank=1,
        tp_size=2,
    )
    assert codec.rank_from_wire(codec.rank_to_wire(rank)) == rank


def test_addresses_and_processes_round_trip() -> None:
    address, process = PeerAddress("h:1", "life"), ProcessIdentity("boot/pid:[4]", 4711, 1 << 40)
    assert codec.address_from_wire(codec.address_to_wire(address)) == address
    assert codec.process_from_wire(codec.process_to_wire(process)) == process


def test_a_rank_of_an_unknown_role_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="role"):
        codec.rank_from_wire(worker_pb2.RankInfo(role="cook"))


@given(st.lists(st.tuples(st.lists(u32, max_size=5), st.lists(u64, max_size=5), u32), max_size=3), u64, st.binary())
def test_handle_round_trip(tables: list[tuple[list[int], list[int], int]], transfer_id: int, nonce: bytes) -> None:
    blocks = tuple(BlockTable(tuple(ids), tuple(generations), first) for ids, generations, first in tables)
    handle = TransferHandle("inc", "h:1", transfer_id, nonce, TokenRange(1, 9), blocks, b"d")
    assert codec.handle_from_bytes(codec.handle_to_bytes(handle)) == handle


@given(st.binary(max_size=200))
def test_any_bytes_are_a_handle_or_an_error_that_says_so(data: bytes) -> None:
    with contextlib.suppress(InvalidRequestError):
        assert isinstance(codec.handle_from_bytes(data), TransferHandle)


def test_errors_cross_with_code_field_and_hint() -> None:
    error = codec.error_from_wire(codec.error_to_wire(OverloadedError("full", field="q", retry_after_s=2.0), "r"))
    assert (error.code, error.message, error.field, error.retry_after_s) == (
        ErrorCode.RESOURCE_EXHAUSTED,
        "full",
        "q",
        2.0,
    )


def test_resolution_round_trip() -> None:
    aggregated = Resolution("A", "NONE", None, None, "V1", Source.DEFAULT, "r")
    for resolution in (RESOLUTION, aggregated):
        assert codec.resolution_from_wire(codec.resolution_to_wire(resolution)) == resolution
