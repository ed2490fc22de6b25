"""Prefill and decode schedulers joined by a loader that copies slots when told to: hand-offs without a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from echo_engine import BLOCK, LAYOUT, STATE, Bench, EchoRunner, nbytes_of

from kvferry.core import (
    DECODE_TRANSITIONS,
    PREFILL_TRANSITIONS,
    BlockTable,
    DecodeLeg,
    HandOffPart,
    Lifecycle,
    PrefillLeg,
    SamplingParams,
    TokenRange,
    TransferError,
    WorkerRequest,
)
from kvferry.engine import EngineSettings, GenerationScheduler, LoadOutcome
from kvferry.engine import Sequence as EngineSequence
from kvferry.kvcache import BlockHold, KVCacheManager, create_manager
from kvferry.prefill.scheduler import PrefillResult, PrefillScheduler


@dataclass
class Load:
    handle: bytes
    tables: tuple[BlockTable, ...]
    tokens: TokenRange
    done: Callable[[LoadOutcome], None]
    cancelled: bool = False


@dataclass
class Link:
    """Both halves of a transceiver. Loads wait in `loads` until `deliver`."""

    source: KVCacheManager
    target: KVCacheManager
    advertised: dict[bytes, tuple[BlockHold, bytes, Callable[[], None]]] = field(default_factory=dict)
    loads: dict[int, Load] = field(default_factory=dict)
    quarantined: list[BlockHold] = field(default_factory=list)

    def advertise(self, hold: BlockHold, tokens: TokenRange, digest: bytes, released: Callable[[], None]) -> bytes:
        handle = f"handle-{len(self.advertised)}".encode()
        self.advertised[handle] = (hold, digest, released)
        return handle

    def withdraw(self, handle: bytes) -> None:
        self.advertised[handle][2]()

    def start(
        self,
        handle: bytes,
        digest: bytes,
        tables: tuple[BlockTable, ...],
        tokens: TokenRange,
        done: Callable[[LoadOutcome], None],
    ) -> int:
        if handle not in self.advertised or self.advertised[handle][1] != digest:
            raise TransferError("void handle")
        load_id = len(self.loads) + 1
        self.loads[load_id] = Load(handle, tables, tokens, done)
        return load_id

    def cancel(self, load_id: int) -> None:
        self.loads[load_id].cancelled = True

    def quarantine(self, load_id: int, hold: BlockHold) -> None:
        self.quarantined.append(hold)

    def deliver(self, load_id: int, error: str | None = None, in_doubt: bool = False) -> None:
        """Copies token by token, answers, and lets the source go."""
        load = self.loads[load_id]
        hold, _, released = self.advertised[load.handle]
        source, target = self.source.pools[0].view, self.target.pools[0].view
        nbytes = len(load.tokens) * LAYOUT.token_nbytes
        if error is None:
            for group in range(1, len(self.source.pools) if len(load.tokens) else 1):  # states, whole
                (here,), (there,) = load.tables[group].block_ids, hold.tables[group].block_ids
                self.target.pools[group].view[here] = self.source.pools[group].view[there]
                nbytes += self.source.pools[group].layout.slot_nbytes
            for position in range(load.tokens.start, load.tokens.stop):
                block, offset = divmod(position, BLOCK)
                here, there = load.tables[0].block_ids[block], hold.tables[0].block_ids[block]
                target[here, ..., offset, :] = source[there, ..., offset, :]
        released()
        load.done(LoadOutcome(nbytes, error, in_doubt))


class Pair:
    """One prefill and one decode worker, stepped by hand."""

    def __init__(
        self,
        blocks: int = 64,
        prefill_version: str = "V2",
        decode_version: str = "V2",
        states: bool = False,
        snapshot_tokens: int = 8,
        budget: int = 512,
        **decode: Any,
    ) -> None:
        """states: the model has a recurrent state too; without reuse on V1, which keeps one per request."""
        settings = EngineSettings(tokens_per_block=BLOCK, snapshot_tokens=snapshot_tokens, step_token_budget=budget)
        layouts = (LAYOUT, STATE) if states else (LAYOUT,)

        def manager(version: str) -> KVCacheManager:
            reuse = not states or version == "V2"
            return create_manager(version, layouts, nbytes_of(layouts, blocks), prefix_reuse=reuse)

        self.prefill_manager, self.decode_manager = manager(prefill_version), manager(decode_version)
        self.link = Link(self.prefill_manager, self.decode_manager)
        self.events: dict[int, list[Any]] = {}
        runner: Any = EchoRunner(settings, layouts=layouts)
        self.prefill = PrefillScheduler(runner, self.prefill_manager, self._emit, self.link)
        decode_runner = EchoRunner(settings, layouts=layouts)
        scheduler = GenerationScheduler(decode_runner, self.decode_manager, self._emit, self.link, **decode)  # type: ignore[arg-type]
        self.decode = Bench(decode_runner, self.decode_manager, scheduler, self.events)

    def _emit(self, key: int, event: object) -> None:
        self.events.setdefault(key, []).append(event)

    def add_prefill(self, prompt: Sequence[int], count: int = 8, **request: Any) -> EngineSequence[PrefillLeg]:
        sampling = request.pop("sampling", SamplingParams(max_tokens=count, temperature=0.0))
        leg = Lifecycle(PrefillLeg.QUEUED, PREFILL_TRANSITIONS)
        add = self.prefill.add_in_parts if request.pop("in_parts", False) else self.prefill.add
        worker_request = WorkerRequest("r", tuple(prompt), sampling, **request)
        sequence = EngineSequence(worker_request, leg, self.decode.runner.limits, None)
        add(sequence)
        return sequence

    def prefilled(self, prompt: Sequence[int], count: int = 8, **request: Any) -> PrefillResult:
        sequence = self.add_prefill(prompt, count, **request)
        while self.prefill.step():
            pass
        result = self.events[sequence.key][-1]
        assert isinstance(result, PrefillResult), result
        return result

    def add_decode(
        self, prompt: Sequence[int], result: PrefillResult, count: int = 8, **request: Any
    ) -> EngineSequence[DecodeLeg]:
        """Queued with the handle; the load starts with the next step."""
        sampling = SamplingParams(max_tokens=count, temperature=0.0)
        output = (*request.pop("output_token_ids", ()), result.aux.first_token_id)
        worker_request = WorkerRequest("r", tuple(prompt), sampling, output, **request)
        leg = Lifecycle(DecodeLeg.QUEUED, DECODE_TRANSITIONS)
        sequence = EngineSequence(worker_request, leg, self.decode.runner.limits, None)
        self.decode.scheduler.add_with_handle(sequence, result.handle)
        self.decode.scheduler.step()
        return sequence

    def reserve(self, prompt: Sequence[int], count: int = 8) -> EngineSequence[DecodeLeg]:
        """Queued without a handle; its cache is opened with the next step."""
        sampling = SamplingParams(max_tokens=count, temperature=0.0)
        leg = Lifecycle(DecodeLeg.QUEUED, DECODE_TRANSITIONS)
        sequence = EngineSequence(WorkerRequest("r", tuple(prompt), sampling), leg, self.decode.runner.limits, None)
        self.decode.scheduler.add_reserved(sequence)
        self.decode.scheduler.step()
        return sequence

    def start(self, sequence: EngineSequence[DecodeLeg], result: PrefillResult) -> None:
        request = replace(sequence.request, output_token_ids=(result.aux.first_token_id,))
        self.decode.scheduler.start(sequence.key, request, result.handle, result.aux.usage.cached_tokens)

    def parts(self, sequence: EngineSequence[PrefillLeg]) -> list[HandOffPart]:
        return [event for event in self.events.get(sequence.key, []) if isinstance(event, HandOffPart)]

    def assert_nothing_held(self) -> None:
        for manager in (self.prefill_manager, self.decode_manager):
            counts = manager.counts()
            assert (counts.free, counts.pinned, counts.quarantined) == (counts.total, 0, 0)
            manager.check_integrity()
