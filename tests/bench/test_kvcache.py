"""The KV cache benchmark: what it finds in the conversation trace, against an independent simulation."""

from __future__ import annotations

import heapq
import json

import pytest

from kvferry.bench import kvcache
from kvferry.bench.trace import TRACE_BLOCK_TOKENS, TraceRequest, load_trace


@pytest.fixture(scope="module")
def trace() -> list[TraceRequest]:
    return load_trace()


def exact_lru_hits(trace: list[TraceRequest], capacity: int) -> int:
    """Hits of a prefix cache that always gives up the least recently used block, the deepest of equals. Prefixes
    are numbered as a trie; a heap entry counts only while it is the newest of its prefix."""
    numbers: dict[tuple[int, int], int] = {}
    used: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for now, request in enumerate(trace):
        path, parent = [], -1
        for block in request.blocks:
            parent = numbers.setdefault((parent, block), len(numbers))
            path.append(parent)
        found = next((n for n, prefix in enumerate(path) if prefix not in used), len(path))
        hits += found
        for prefix in path[:found]:
            used[prefix] = now
        while len(used) + len(path) - found > capacity:
            when, _, prefix = heapq.heappop(heap)
            if used.get(prefix) == when:
                del used[prefix]
        for depth, prefix in enumerate(path):
            used[prefix] = now
            heapq.heappush(heap, (now, -depth, prefix))
    return hits


@pytest.mark.parametrize("capacity", [1_000, 7_000, 30_000])
def test_the_trace_hits_what_an_exact_lru_hits(trace: list[TraceRequest], capacity: int) -> None:
    asked = sum(len(request.blocks) for request in trace)
    assert round(kvcache.replay(trace, capacity) * asked) == exact_lru_hits(trace, capacity)


def test_with_room_for_all_the_trace_hits_every_block_it_repeats(trace: list[TraceRequest]) -> None:
    seen: set[int] = set()
    repeated = 0
    for request in trace:
        repeated += sum(block in seen for block in request.blocks)
        seen.update(request.blocks)
    asked = sum(len(request.blocks) for request in trace)
    assert kvcache.replay(trace, len(seen)) == repeated / asked > 0.3


def test_both_cores_hit_alike(trace: list[TraceRequest]) -> None:
    assert kvcache.replay(trace[:1500], 2_000, "python") == kvcache.replay(trace[:1500], 2_000, "cpp")


def test_trace_blocks_cover_their_prompts(trace: list[TraceRequest]) -> None:
    assert len(trace) == 12_031
    for request in trace:
        assert 0 <= len(request.blocks) * TRACE_BLOCK_TOKENS - request.prompt_tokens < TRACE_BLOCK_TOKENS


def test_costs_and_pools_are_measured_per_core() -> None:
    costs = list(kvcache.measure_costs(("cpp",), lengths=(160,)))
    assert [(row.core, row.tokens) for row in costs] == [("cpp", 160)]
    assert costs[0].serve_us_per_block > 0
    pools = list(kvcache.measure_pools(("python",), sizes=((300, 2), (600, 4))))
    assert [(row.pool_blocks, row.live_requests) for row in pools] == [(300, 2), (600, 4)]
    assert pools[0].ratio == 1.0


@pytest.mark.parametrize("core", kvcache.CORES)
def test_what_changing_hands_costs_does_not_grow_with_the_pool(core: str) -> None:
    small, large = kvcache.measure_shares((core,), sizes=(2_000, 100_000))
    assert (small.pool_blocks, large.pool_blocks, small.ratio) == (2_000, 100_000, 1.0)
    # Fifty times as many blocks: whatever looked through them would cost about that much more.
    assert large.ratio < 10
    assert large.can_reserve_us < 10 * small.can_reserve_us


def test_runs_are_as_long_as_the_blocks_lie_together() -> None:
    one, many = kvcache.measure_runs(("V1", "V2"), shapes=((1_024, 3),), requests=60)
    assert (one.manager, many.manager, one.requests, one.live_requests) == ("V1", "V2", 60, 3)
    for row in (one, many):
        assert 1 < row.last_run_blocks < row.first_run_blocks <= row.blocks * 2
        assert 7 < row.blocks < 270


def test_a_fresh_pool_gives_one_run() -> None:
    (row,) = kvcache.measure_runs(("V2",), shapes=((1_024, 1),), requests=1)
    assert row.first_run_blocks == row.last_run_blocks == row.blocks


def test_the_report_is_one_json_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    short = [TraceRequest(0, 1024, 1, (1, 2)), TraceRequest(1, 1024, 1, (1, 3))]
    monkeypatch.setattr(kvcache, "load_trace", lambda: short)
    monkeypatch.setattr(kvcache, "measure_costs", lambda: [])
    monkeypatch.setattr(kvcache, "measure_pools", lambda: [])
    monkeypatch.setattr(kvcache, "measure_shares", lambda: [])
    monkeypatch.setattr(kvcache, "measure_runs", lambda: [])
    kvcache.main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert {row["hit_ratio"] for row in report["rows"]} == {0.25}
    assert report["machine"]["processor"]
