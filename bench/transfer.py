"""KV transfers between two real processes, over every route, beside a memcpy of the same bytes and the bare agent.

One run interleaves them: memcpy, bare, transfer, and again. Every figure is a median.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from kvferry.bench.floor import machine
from kvferry.bench.hand_off import HandOffRow, HandOffs, measure_hand_offs, serving
from kvferry.bench.source_process import SourceProcess
from kvferry.bench.transfer_shapes import SHAPES, Shape, make_pool, place, route_resolution
from kvferry.bench.transfer_source import BARE, bare_agent
from kvferry.core import BlockTable, RankInfo, Role, SamplingParams, TokenRange, new_incarnation
from kvferry.engine import LLM
from kvferry.transceiver import Agent, Direction, LoadResult, OpState, Transceiver, create_transceiver, pool_memory
from kvferry.transceiver.planner import RankTables, plan_transfer

ROUTES = ("NIXL/PYTHON", "NIXL/CPP", "SHM/PYTHON", "SHM/CPP", "UCX/CPP", "MOONCAKE/PYTHON")
IDLE_S = 2.0
SETTLE_S = 4.0
"""A target keeps an eye on a new peer for a while."""
PATIENCE_S = 60.0
PART_TOKENS = 512
"""What a prefill step computes of a prompt: `engine.step_token_budget`'s default."""
_TTFT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class TransferRow:
    """memcpy_fraction: of a single-thread memcpy of the same bytes. bare_fraction: of the agent alone with the same
    descriptors (`bare_agent`). times_mooncake: this over Mooncake's own engine with the same descriptors, where its
    route was measured in the same run. overhead_ms: advertise, plus load from call to
    callback, less what the agent alone takes. ttft_share: of prefill plus transfer, where prefill was measured.
    """

    backend: str
    runtime: str
    manager: str
    shape: str
    tokens: int
    nbytes: int
    gbytes_per_s: float
    memcpy_fraction: float
    overhead_ms: float
    ttft_share: float | None
    placement: str
    copies: int
    bare_fraction: float
    memcpy_gbytes_per_s: float
    load_ms: float
    times_mooncake: float | None = None

    @property
    def bare_gbytes_per_s(self) -> float:
        return self.gbytes_per_s / self.bare_fraction


@dataclass(frozen=True, slots=True)
class IdleRow:
    """What the source process uses of a core when nothing is open."""

    route: str
    core_share: float


class Bench:
    """One route and one shape: this process is decode."""

    def __init__(self, route: str, shape_name: str, shape: Shape, source: SourceProcess) -> None:
        self.route = route
        self.shape_name, self.shape = shape_name, shape
        self._source = source
        self._resolution = route_resolution(route)
        self._memory = pool_memory(self._resolution)
        self._pool = make_pool(shape.layout, shape.blocks, self._memory.allocate if self._memory else None)
        self._private = make_pool(shape.layout, shape.blocks, None).buffer
        self._stack = ExitStack()
        self._transceiver = self._stack.enter_context(serving(self._create))
        self._rank = self._transceiver.connect(source.endpoint)
        self._bare = self._connect_bare()

    def close(self) -> None:
        self._stack.close()
        self._bare.close()
        if self._memory is not None:
            self._memory.close()

    def measure(self, tokens: int, placement: str, rounds: int, prefill_s: float | None) -> TransferRow:
        blocks = self.shape.layout.blocks_for(tokens)
        ours = place(placement, blocks, self.shape.blocks, seed=1)
        theirs = place(placement, blocks, self.shape.blocks, seed=2)
        copies = self._plan(self._transceiver.local, self._rank, ours, theirs, tokens)
        nbytes = int(copies[:, 2].sum())
        samples = [self._round(copies, nbytes, ours, theirs, tokens) for _ in range(rounds + 1)][1:]
        memcpy_s, bare_s, load_s, overhead_s = (statistics.median(column) for column in zip(*samples, strict=True))
        self._check(ours, theirs)
        return TransferRow(
            backend=self._resolution.backend,
            runtime=self._resolution.runtime or "",
            manager=self._resolution.manager,
            shape=self.shape_name,
            tokens=tokens,
            nbytes=nbytes,
            gbytes_per_s=nbytes / load_s / 1e9,
            memcpy_fraction=memcpy_s / load_s,
            overhead_ms=overhead_s * 1e3,
            ttft_share=None if prefill_s is None else load_s / (prefill_s + load_s),
            placement=placement,
            copies=len(copies),
            bare_fraction=bare_s / load_s,
            memcpy_gbytes_per_s=nbytes / memcpy_s / 1e9,
            load_ms=load_s * 1e3,
        )

    def hand_offs(self, tokens: int, rounds: int, prefill_s: float | None) -> list[HandOffRow]:
        """Of every schedule and flow the route has."""
        resolution = self._resolution
        block_tokens = self.shape.layout.tokens_per_block
        return measure_hand_offs(
            HandOffs(self._transceiver, self._source, self._rank),
            (resolution.backend, resolution.runtime or "", resolution.manager),
            self.shape_name,
            block_tokens,
            tokens,
            min(PART_TOKENS, tokens),
            rounds,
            prefill_s,
        )

    def idle(self) -> IdleRow:
        time.sleep(SETTLE_S)
        before, started = self._source.ask("cpu")["seconds"], time.monotonic()
        time.sleep(IDLE_S)
        used = self._source.ask("cpu")["seconds"] - before
        return IdleRow(self.route, used / (time.monotonic() - started))

    # -- one round ----------------------------------------------------------------------------------------

    def _round(
        self, copies: np.ndarray, nbytes: int, ours: Sequence[int], theirs: Sequence[int], tokens: int
    ) -> tuple[float, float, float, float]:
        """Seconds of memcpy, bare transfer, load, and what the hand-off costs beyond the bytes."""
        memcpy_s = _timed_memcpy(self._pool.region.addr, self._private.data_ptr(), nbytes)
        bare_s = self._timed_bare(copies)
        advertised = self._source.ask("advertise", ids=list(theirs), tokens=tokens)
        load_s = self._timed_load(bytes.fromhex(advertised["handle"]), ours, tokens)
        return memcpy_s, bare_s, load_s, advertised["seconds"] + load_s - bare_s

    def _timed_load(self, handle: bytes, ids: Sequence[int], tokens: int) -> float:
        done, results, ended = threading.Event(), list[LoadResult](), [0.0]

        def on_done(result: LoadResult) -> None:
            ended[0] = time.perf_counter()
            results.append(result)
            done.set()

        started = time.perf_counter()
        self._transceiver.load(handle, b"b" * 32, [BlockTable(tuple(ids), ())], TokenRange(0, tokens), on_done)
        if not done.wait(PATIENCE_S) or results[0].error:
            raise RuntimeError(f"{self.route}: {results[0].error if results else 'a load never ended'}")
        return ended[0] - started

    def _timed_bare(self, copies: np.ndarray) -> float:
        self._source.ask("look")
        started = time.perf_counter()
        operation = self._bare.submit(Direction.READ, BARE, copies)
        while (state := operation.poll()) is OpState.SUBMITTED and time.perf_counter() - started < PATIENCE_S:
            time.sleep(0)
        seconds = time.perf_counter() - started
        self._source.ask("rest")
        if state is not OpState.DONE:
            raise RuntimeError(f"the bare agent: {operation.error}")
        operation.release()
        return seconds

    def _check(self, ours: Sequence[int], theirs: Sequence[int]) -> None:
        """The bytes that arrived are the source's: its pool holds its own offsets."""
        slot = self.shape.layout.slot_nbytes
        for mine, other in ((ours[0], theirs[0]), (ours[-1], theirs[-1])):
            found = self._pool.buffer[mine * slot : (mine + 1) * slot].view(torch.int64)
            if int(found[0]) != other * slot // 8 or int(found[-1]) != (other + 1) * slot // 8 - 1:
                raise RuntimeError(f"{self.route}: block {mine} does not hold what block {other} held")

    # -- setting up ---------------------------------------------------------------------------------------

    def _create(self, endpoint: str) -> Transceiver:
        return create_transceiver(
            resolution=self._resolution,
            worker="bench-decode",
            role=Role.DECODE,
            incarnation=new_incarnation(),
            model_fingerprint=self.shape_name,
            pools=[self._pool],
            endpoint=endpoint,
            transfer_timeout_ms=60_000,
            memory=self._memory,
        )

    def _connect_bare(self) -> Agent:
        agent = bare_agent(self.route, "bare-destination", self._memory)
        agent.register(self._pool.region)
        agent.load_peer(BARE, bytes.fromhex(self._source.ask("bare")["metadata"]))
        return agent

    def _plan(
        self, local: RankInfo, remote: RankInfo, ours: Sequence[int], theirs: Sequence[int], tokens: int
    ) -> np.ndarray:
        tables = [(BlockTable(tuple(ids), ()),) for ids in (ours, theirs)]
        return plan_transfer(RankTables(remote, tables[1]), RankTables(local, tables[0]), TokenRange(0, tokens)).copies


@contextmanager
def _bench(route: str, shape_name: str) -> Iterator[Bench]:
    with SourceProcess(route, shape_name) as source:
        bench = Bench(route, shape_name, SHAPES.get(shape_name), source)
        try:
            yield bench
        finally:
            bench.close()


def measure(
    routes: Sequence[str], shapes: Sequence[str], rounds: int, prefill_s: dict[int, float]
) -> tuple[list[TransferRow], list[HandOffRow], list[IdleRow]]:
    """prefill_s: seconds by prompt length, for SmolLM2's share of the time to first token. Hand-offs are measured of
    SmolLM2 at 2048 tokens, or the longest prompt below."""
    rows, hand_offs, idle = [], [], []
    for shape_name in shapes:
        for route in routes:
            with _bench(route, shape_name) as bench:
                for tokens in bench.shape.tokens:
                    computed = prefill_s.get(tokens) if shape_name == "smollm2" else None
                    rows += [bench.measure(tokens, entry, rounds, computed) for entry in bench.shape.placements]
                if shape_name == "smollm2":
                    longest = max(tokens for tokens in bench.shape.tokens if tokens <= _TTFT_TOKENS)
                    hand_offs += bench.hand_offs(longest, rounds, prefill_s.get(longest))
                if shape_name == shapes[0]:
                    idle.append(bench.idle())
    return compare_to_mooncake(rows), hand_offs, idle


def compare_to_mooncake(rows: Sequence[TransferRow]) -> list[TransferRow]:
    """The same rows, each beside Mooncake's engine on the same copies where there is such a row."""
    engine = {
        (row.shape, row.tokens, row.placement): row.bare_gbytes_per_s for row in rows if row.backend == "MOONCAKE"
    }
    compared = []
    for row in rows:
        speed = engine.get((row.shape, row.tokens, row.placement))
        compared.append(replace(row, times_mooncake=row.gbytes_per_s / speed if speed else None))
    return compared


def measure_prefill(threads: int) -> dict[int, float]:
    """Seconds from prompt to first token on one worker, by prompt length: what a transfer is a share of."""
    model = LLM("smollm2", threads=threads, prefix_reuse=False)
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    lengths = [tokens for tokens in SHAPES.get("smollm2").tokens if tokens <= _TTFT_TOKENS]
    seconds = {}
    for tokens in (lengths[0], *lengths):  # the first run pays for everything that happens once
        started = time.perf_counter()
        model.generate([{"prompt_token_ids": list(range(1000, 1000 + tokens))}], sampling)
        seconds[tokens] = time.perf_counter() - started
    return seconds


def _timed_memcpy(destination: int, source: int, nbytes: int) -> float:
    started = time.perf_counter()
    ctypes.memmove(destination, source, nbytes)
    return time.perf_counter() - started


def as_table(rows: Sequence[TransferRow]) -> Table:
    table = Table(title="KV transfers between two processes: medians")
    speeds = ("GB/s", "of memcpy", "of bare", "x Mooncake", "+ms", "TTFT")
    for name in ("route", "shape", "tokens", "MB", "blocks", "copies", *speeds):
        table.add_column(name, justify="left" if name in ("route", "shape", "blocks") else "right")
    for row in rows:
        table.add_row(
            f"{row.backend}/{row.runtime}",
            row.shape,
            str(row.tokens),
            f"{row.nbytes / 1e6:.1f}",
            row.placement,
            str(row.copies),
            f"{row.gbytes_per_s:.2f}",
            f"{row.memcpy_fraction:.2f}",
            f"{row.bare_fraction:.2f}",
            "" if row.times_mooncake is None else f"{row.times_mooncake:.1f}",
            f"{row.overhead_ms:.2f}",
            "" if row.ttft_share is None else f"{row.ttft_share:.2%}",
        )
    return table


def hand_off_table(rows: Sequence[HandOffRow]) -> Table:
    table = Table(title="From the last prefill step to the first decode step: medians")
    for name in ("route", "schedule", "flow", "tokens", "in parts of", "one block, ms", "all, ms", "of TTFT"):
        table.add_column(name, justify="left" if name in ("route", "schedule", "flow") else "right")
    for row in rows:
        table.add_row(
            f"{row.backend}/{row.runtime}",
            row.schedule,
            row.flow,
            str(row.tokens),
            str(row.part_tokens),
            f"{row.overhead_ms:.2f}",
            f"{row.exposed_ms:.2f}",
            "" if row.exposed_share is None else f"{row.exposed_share:.2%}",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kvferry.bench.transfer", description=__doc__)
    parser.add_argument("--route", action="append", choices=ROUTES, help="may be repeated; all by default")
    parser.add_argument("--shape", action="append", choices=SHAPES.names(), help="may be repeated; all by default")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2, help="of the prefill that the TTFT share is taken of")
    parser.add_argument("--no-prefill", action="store_true", help="leave the TTFT share out")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    prefill_s = {} if options.no_prefill else measure_prefill(options.threads)
    rows, hand_offs, idle = measure(options.route or ROUTES, options.shape or SHAPES.names(), options.rounds, prefill_s)
    if options.json:
        facts = {**machine(options.threads), "idle": {row.route: row.core_share for row in idle}}
        found = {"rows": [asdict(row) for row in rows], "hand_offs": [asdict(row) for row in hand_offs]}
        print(json.dumps({"machine": facts, **found}))
        return
    console = Console(width=140)
    console.print(as_table(rows))
    if hand_offs:
        console.print(hand_off_table(hand_offs))
    for row in idle:
        console.print(f"idle {row.route}: {row.core_share:.2%} of a core")


if __name__ == "__main__":
    main()
