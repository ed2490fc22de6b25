"""The KV cache manager's books: what a block costs, whether that depends on the pool, what prefixes are found, and how
far a request's blocks lie together.

No model and no KV bytes: pools hold one byte per token, so only bookkeeping is measured. Times are CPU time of this
process, the best of several rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from kvferry.bench.floor import machine
from kvferry.bench.trace import TRACE_BLOCK_TOKENS, TraceRequest, load_trace
from kvferry.core import DType, GroupKind, KVLayout
from kvferry.kvcache import KVCache, KVCacheManager, create_manager

BLOCK_TOKENS = 16
TARGET_US_PER_BLOCK = 2.0
TARGET_POOL_RATIO = 3.0
CORES = ("cpp", "python")
CAPACITIES = (1_000, 4_000, 16_000, 64_000, 256_000)
REQUEST_BLOCKS = 90


@dataclass(frozen=True, slots=True)
class CostRow:
    """One request of `tokens` tokens on an otherwise idle pool. serve: open, reserve, advance, commit and close;
    match: looking its prefix up again."""

    measure: str
    core: str
    tokens: int
    serve_us_per_block: float
    match_us_per_block: float
    target_us_per_block: float


@dataclass(frozen=True, slots=True)
class PoolRow:
    """Requests coming and going in a pool that is always full. ratio: against the small pool of the same core."""

    measure: str
    core: str
    pool_blocks: int
    live_requests: int
    serve_us_per_block: float
    ratio: float
    target_ratio: float


@dataclass(frozen=True, slots=True)
class ShareRow:
    """A group that has used its memory up gets slabs of another, which holds nothing. can_reserve: asking whether that
    could be; move: doing it, and the reservation with it, for each slab. ratio: of move, against the small pool."""

    measure: str
    core: str
    pool_blocks: int
    can_reserve_us: float
    move_us_per_slab: float
    ratio: float
    target_ratio: float


@dataclass(frozen=True, slots=True)
class HitRow:
    """The conversation trace, one request after the other, on a pool of `pool_blocks` blocks of 512 tokens."""

    measure: str
    pool_blocks: int
    hit_ratio: float
    seconds: float


@dataclass(frozen=True, slots=True)
class RunRow:
    """Random requests coming and going for as long as `requests` takes (an hour, at one a second), in a pool that is
    always full. blocks: of a request, on average. first_run_blocks, last_run_blocks: how many of them lie together, and
    so move in one copy, on average over the first and the last tenth of the requests."""

    measure: str
    manager: str
    pool_blocks: int
    live_requests: int
    requests: int
    blocks: float
    first_run_blocks: float
    last_run_blocks: float


Row = CostRow | PoolRow | ShareRow | HitRow | RunRow


def metadata_manager(blocks: int, tokens_per_block: int, core: str, version: str = "V2") -> KVCacheManager:
    """A manager whose pages take a byte per token."""
    layout = KVLayout(GroupKind.MLA, (0,), 1, 1, dtype=DType.FLOAT8, tokens_per_block=tokens_per_block, planes=1)
    return create_manager(version, [layout], blocks * layout.slot_nbytes, core=core)


def serve(manager: KVCacheManager, tokens: Sequence[int]) -> KVCache:
    """A request from its first to its last step, still open."""
    cache = manager.open("", tokens, max_reuse=len(tokens))
    cache.reserve(len(tokens))
    cache.advance(len(tokens))
    cache.commit(tokens)
    return cache


def measure_costs(cores: Iterable[str] = CORES, lengths: Sequence[int] = (10_000, 100_000)) -> Iterator[CostRow]:
    for core in cores:
        for length in lengths:
            yield _cost(core, length, rounds=5)


def _cost(core: str, length: int, rounds: int) -> CostRow:
    blocks = length // BLOCK_TOKENS
    serve_s, match_s = [], []
    for number in range(rounds):
        manager = metadata_manager(2 * blocks, BLOCK_TOKENS, core)
        tokens = [(token * 7 + number) % 50_000 for token in range(length)]
        started = time.process_time()
        serve(manager, tokens).close()
        served = time.process_time()
        matched = manager.match("", tokens)
        match_s.append(time.process_time() - served)
        serve_s.append(served - started)
        assert matched == blocks * BLOCK_TOKENS
    return CostRow("cost", core, length, min(serve_s) / blocks * 1e6, min(match_s) / blocks * 1e6, TARGET_US_PER_BLOCK)


def measure_pools(
    cores: Iterable[str] = CORES, sizes: Sequence[tuple[int, int]] = ((10_000, 100), (1_000_000, 10_000))
) -> Iterator[PoolRow]:
    """sizes: (pool blocks, live requests), the smallest first."""
    for core in cores:
        small: float | None = None
        for blocks, live in sizes:
            cost = _churn_us_per_block(core, blocks, live)
            small = small or cost
            yield PoolRow("pool", core, blocks, live, cost, cost / small, TARGET_POOL_RATIO)


def _churn_us_per_block(core: str, blocks: int, live: int, requests: int = 1_500) -> float:
    """A random live request makes way for a new one, over and over; most find their first ten blocks cached."""
    rng = random.Random(0)
    manager = metadata_manager(blocks, BLOCK_TOKENS, core)
    running = [serve(manager, _tokens(rng)) for _ in range(live)]

    def replace(tokens: list[int]) -> None:
        at = rng.randrange(live)
        running[at].close()
        running[at] = serve(manager, tokens)

    while manager.counts().free > manager.counts().cached:  # until every new block costs an eviction
        replace(_tokens(rng))
    best = float("inf")
    for _ in range(3):
        prompts = [_tokens(rng) for _ in range(requests // 3)]
        started = time.process_time()
        for tokens in prompts:
            replace(tokens)
        best = min(best, time.process_time() - started)
    return best / (requests // 3) / REQUEST_BLOCKS * 1e6


def measure_shares(cores: Iterable[str] = CORES, sizes: Sequence[int] = (10_000, 1_000_000)) -> Iterator[ShareRow]:
    """sizes: pool blocks, the smallest first."""
    for core in cores:
        small: float | None = None
        for blocks in sizes:
            can_reserve, move = _share_us(core, blocks)
            small = small or move
            yield ShareRow("shares", core, blocks, can_reserve, move, move / small, TARGET_POOL_RATIO)


def _share_us(core: str, blocks: int, rounds: int = 20, slabs: int = 8) -> tuple[float, float]:
    full, window = (
        KVLayout(kind, layers, 1, 1, dtype=DType.FLOAT8, tokens_per_block=BLOCK_TOKENS, planes=1, window=tokens)
        for kind, layers, tokens in ((GroupKind.FULL, (0,), None), (GroupKind.WINDOW, (1, 2), BLOCK_TOKENS))
    )
    per_slab = window.slot_nbytes // full.slot_nbytes
    nbytes = blocks * full.slot_nbytes
    manager = create_manager("V2", [full, window], nbytes, core=core, typical_tokens=BLOCK_TOKENS * 4, step_tokens=1)
    hog = manager.open("", [1], max_reuse=0)
    hog.reserve(manager.group_counts()[0].free * BLOCK_TOKENS, ahead=1)
    more = slabs * per_slab * BLOCK_TOKENS
    asking, moving = [], []
    for _ in range(rounds):
        started = time.process_time()
        assert manager.can_reserve(more, ahead=1)
        asked = time.process_time()
        hog.reserve(hog.capacity + more, ahead=1)
        moving.append(time.process_time() - asked)
        asking.append(asked - started)
    assert manager.statistics().moved_shares >= rounds * slabs
    return min(asking) * 1e6, min(moving) / slabs * 1e6


def _tokens(rng: random.Random) -> list[int]:
    shared = [rng.randrange(50)] * (10 * BLOCK_TOKENS)
    return shared + [rng.randrange(50_000) for _ in range((REQUEST_BLOCKS - 10) * BLOCK_TOKENS)]


def replay(trace: Sequence[TraceRequest], blocks: int, core: str = "cpp") -> float:
    """Serves the trace's prompts one after the other; the share of their blocks that was cached."""
    manager = metadata_manager(blocks, TRACE_BLOCK_TOKENS, core)
    found = asked = 0
    for request in trace:
        tokens = array("I")
        for block in request.blocks:
            tokens.extend(array("I", [block]) * TRACE_BLOCK_TOKENS)
        cache = serve(manager, tokens)
        found += cache.reused // TRACE_BLOCK_TOKENS
        asked += len(request.blocks)
        cache.close()
    return found / asked


def measure_hits(capacities: Sequence[int] = CAPACITIES) -> Iterator[HitRow]:
    trace = load_trace()
    for capacity in capacities:
        started = time.monotonic()
        ratio = replay(trace, capacity)
        yield HitRow("hits", capacity, ratio, time.monotonic() - started)


def measure_runs(
    versions: Iterable[str] = ("V1", "V2"),
    shapes: Sequence[tuple[int, int]] = ((4_096, 16),),
    requests: int = 3_600,
) -> Iterator[RunRow]:
    """shapes: (pool blocks, live requests)."""
    for version in versions:
        for blocks, live in shapes:
            yield _runs(version, blocks, live, requests)


def _runs(version: str, pool_blocks: int, live: int, requests: int) -> RunRow:
    """A random live request makes way for a new one of 100 to 4,000 tokens; half begin as another did."""
    rng = random.Random(0)
    manager = metadata_manager(pool_blocks, BLOCK_TOKENS, "cpp", version)
    running: list[KVCache] = []
    blocks, runs = [], []
    for _ in range(requests):
        if len(running) == live:
            running.pop(rng.randrange(live)).close()
        shared = [rng.randrange(50_000, 50_020)] * (BLOCK_TOKENS * rng.randrange(20)) if rng.random() < 0.5 else []
        tokens = shared + [rng.randrange(50_000) for _ in range(rng.randrange(100, 4_000))]
        running.append(serve(manager, tokens))
        table = list(running[-1].block_table(0))
        blocks.append(len(table))
        runs.append(1 + sum(after != before + 1 for before, after in pairwise(table)))
    tenth = max(1, requests // 10)
    first, last = (sum(blocks[part]) / sum(runs[part]) for part in (slice(tenth), slice(-tenth, None)))
    return RunRow("runs", version, pool_blocks, live, requests, sum(blocks) / requests, first, last)


def as_tables(rows: Sequence[Row]) -> Iterator[Table]:
    costs = Table("core", "tokens", "serve", "match", title="cost of one block, µs (target: C++ below 2)")
    pools = Table(
        "core", "pool blocks", "live requests", "serve", "ratio", title="does a block cost more in a large pool?"
    )
    shares = Table(
        "core", "pool blocks", "can reserve", "move a slab", "ratio", title="layer groups that share memory, µs"
    )
    hits = Table("pool blocks", "tokens", "hit ratio", "seconds", title="conversation trace: blocks found cached")
    runs = Table(
        "manager",
        "pool blocks",
        "live",
        "requests",
        "blocks of one",
        "run at first",
        "run at last",
        title="blocks of a request that lie together",
    )
    for row in rows:
        match row:
            case RunRow():
                size = (f"{row.pool_blocks}", f"{row.live_requests}", f"{row.requests}", f"{row.blocks:.0f}")
                runs.add_row(row.manager, *size, f"{row.first_run_blocks:.1f}", f"{row.last_run_blocks:.1f}")
            case CostRow():
                costs.add_row(
                    row.core, f"{row.tokens}", f"{row.serve_us_per_block:.2f}", f"{row.match_us_per_block:.2f}"
                )
            case PoolRow():
                cells = (f"{row.pool_blocks}", f"{row.live_requests}", f"{row.serve_us_per_block:.2f}")
                pools.add_row(row.core, *cells, f"{row.ratio:.2f}x")
            case ShareRow():
                times = (f"{row.can_reserve_us:.1f}", f"{row.move_us_per_slab:.1f}")
                shares.add_row(row.core, f"{row.pool_blocks}", *times, f"{row.ratio:.2f}x")
            case HitRow():
                tokens = f"{row.pool_blocks * TRACE_BLOCK_TOKENS / 1e6:.1f} M"
                hits.add_row(f"{row.pool_blocks}", tokens, f"{row.hit_ratio:.1%}", f"{row.seconds:.1f}")
    yield from (costs, pools, shares, hits, runs)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kvferry.bench.kvcache", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args(arguments)
    rows: list[Row] = [*measure_costs(), *measure_pools(), *measure_shares(), *measure_hits(), *measure_runs()]
    if options.json:
        report: dict[str, Any] = {"machine": machine(1), "rows": [asdict(row) for row in rows]}
        print(json.dumps(report))
        return
    for table in as_tables(rows):
        Console().print(table)


if __name__ == "__main__":
    main()
