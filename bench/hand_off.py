"""What a request waits for between its last prefill step and its first decode step, by schedule and flow.

Between two processes: this one is decode. Clocks are the machine's, which both share.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc.aio

from kvferry.bench.source_process import SourceProcess
from kvferry.core import BlockTable, PeerAddress, RankInfo, TokenRange
from kvferry.router import Flow, Schedule
from kvferry.transceiver import LoadResult, Transceiver, add_transceiver_service
from kvferry.transceiver.control_client import GrpcControlClient

DIGEST = b"b" * 32
PATIENCE_S = 60.0
_STYLES = (
    (Schedule.PREFILL_FIRST, Flow.PULL),
    (Schedule.DECODE_FIRST, Flow.PULL),
    (Schedule.DECODE_FIRST, Flow.PUSH),
)


@dataclass(frozen=True, slots=True)
class HandOffRow:
    """Medians. overhead_ms: of a prompt of one block, from its being computed until decode may step. exposed_ms: the
    same of `tokens`, moved in parts of `part_tokens` as they are computed (prefill_first: in one, at the end).
    calls_ms: of two empty unary calls, which are part of both for prefill_first; with decode_first the first token
    comes with messages of its own, at the same time. exposed_share: of the time to first token, where prefill was
    measured.
    """

    backend: str
    runtime: str
    manager: str
    shape: str
    schedule: str
    flow: str
    tokens: int
    part_tokens: int
    overhead_ms: float
    exposed_ms: float
    calls_ms: float
    exposed_share: float | None


@contextmanager
def serving(transceiver: Callable[[str], Transceiver]) -> Iterator[Transceiver]:
    """`transceiver(endpoint)` behind a control channel, whose loop has a thread of its own. Closes it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="bench-control")
    thread.start()

    async def start() -> tuple[grpc.aio.Server, Transceiver]:
        server = grpc.aio.server()
        made = transceiver(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        add_transceiver_service(server, made)
        await server.start()
        return server, made

    server, made = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield made
    finally:
        made.close()
        asyncio.run_coroutine_threadsafe(server.stop(None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class HandOffs:
    """Hand-offs from `source` to `transceiver`. Blocks `ids` are the same on both sides."""

    def __init__(self, transceiver: Transceiver, source: SourceProcess, writer: RankInfo) -> None:
        self._transceiver = transceiver
        self._source = source
        self._writer = PeerAddress(source.endpoint, writer.incarnation)

    def styles(self) -> list[tuple[Schedule, Flow]]:
        pushes = self._transceiver.push_side is not None
        return [style for style in _STYLES if pushes or style[1] is Flow.PULL]

    def exposed_s(self, schedule: Schedule, flow: Flow, ids: Sequence[int], tokens: int, part_tokens: int) -> float:
        """From the moment the last part is there until all has arrived."""
        parts = [tokens] if schedule is Schedule.PREFILL_FIRST else [*range(part_tokens, tokens, part_tokens), tokens]
        return self._pushed(ids, parts) if flow is Flow.PUSH else self._pulled(ids, parts)

    def calls_s(self) -> float:
        """Two empty unary calls to the other process, one after the other."""
        client = GrpcControlClient()
        try:
            client.heartbeat(self._source.endpoint, "", (), PATIENCE_S).result()  # connects
            started = time.monotonic()
            for _ in range(2):
                client.heartbeat(self._source.endpoint, "", (), PATIENCE_S).result()
            return time.monotonic() - started
        finally:
            client.close()

    def _pulled(self, ids: Sequence[int], stops: Sequence[int]) -> float:
        computed_s = arrived_s = 0.0
        for start, stop in zip([0, *stops], stops, strict=False):
            advertised = self._source.ask("advertise", ids=list(ids), tokens=stop)
            computed_s = advertised["computed_s"]
            waiting = _Waiting()
            handle, table = bytes.fromhex(advertised["handle"]), BlockTable(tuple(ids), ())
            self._transceiver.load(handle, DIGEST, [table], TokenRange(start, stop), waiting.on_done)
            arrived_s = waiting.arrived_s()
        return arrived_s - computed_s

    def _pushed(self, ids: Sequence[int], stops: Sequence[int]) -> float:
        side = self._transceiver.push_side
        assert side is not None
        waiting = _Waiting()
        tokens = TokenRange(0, stops[-1])
        load_id, grant = side.grant(self._writer, DIGEST, [BlockTable(tuple(ids), ())], tokens, waiting.on_done)
        answer = self._source.ask("push", grant=grant.hex(), ids=list(ids), stops=list(stops))
        side.due(load_id)
        return waiting.arrived_s() - float(answer["computed_s"])


class _Waiting:
    def __init__(self) -> None:
        self._done = threading.Event()
        self._result: LoadResult | None = None
        self._at_s = 0.0

    def on_done(self, result: LoadResult) -> None:
        self._at_s, self._result = time.monotonic(), result
        self._done.set()

    def arrived_s(self) -> float:
        """RuntimeError when it did not arrive."""
        if not self._done.wait(PATIENCE_S) or self._result is None or self._result.error:
            raise RuntimeError(f"a hand-off failed: {self._result.error if self._result else 'it never ended'}")
        return self._at_s


def measure_hand_offs(
    hand_offs: HandOffs,
    route: tuple[str, str, str],
    shape: str,
    block_tokens: int,
    tokens: int,
    part_tokens: int,
    rounds: int,
    prefill_s: float | None,
) -> list[HandOffRow]:
    """route: backend, runtime and manager. Styles take turns; the first round pays for what happens once."""
    ids = range(-(-tokens // block_tokens))
    styles = hand_offs.styles()
    overheads: dict[tuple[Schedule, Flow], list[float]] = {style: [] for style in styles}
    exposed: dict[tuple[Schedule, Flow], list[float]] = {style: [] for style in styles}
    calls = []
    for _ in range(rounds + 1):
        calls.append(hand_offs.calls_s())
        for style in styles:
            overheads[style].append(hand_offs.exposed_s(*style, ids[:1], block_tokens, block_tokens))
            exposed[style].append(hand_offs.exposed_s(*style, ids, tokens, part_tokens))
    calls_s = statistics.median(calls[1:])
    rows = []
    for schedule, flow in styles:
        first = schedule is Schedule.PREFILL_FIRST
        on_top_s = calls_s if first else 0.0
        overhead_s = statistics.median(overheads[schedule, flow][1:]) + on_top_s
        exposed_s = statistics.median(exposed[schedule, flow][1:]) + on_top_s
        share = None if prefill_s is None else exposed_s / (prefill_s + exposed_s)
        rows.append(
            HandOffRow(
                *route,
                shape,
                schedule.value,
                flow.value,
                tokens,
                tokens if first else part_tokens,
                overhead_s * 1e3,
                exposed_s * 1e3,
                calls_s * 1e3,
                share,
            )
        )
    return rows
