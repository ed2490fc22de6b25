"""Hand-offs of a sliding window between workers whose blocks differ in size, by the real managers and planner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from rank_memory import RESOLUTION, execute

from kvferry.core import (
    DECODE_TRANSITIONS,
    BlockTable,
    DecodeLeg,
    GroupKind,
    HandOffPart,
    KVLayout,
    Lifecycle,
    ModelLimits,
    OutputDelta,
    RankInfo,
    Role,
    SamplingParams,
    TokenRange,
    WorkerRequest,
)
from kvferry.engine import Chunk, EngineSettings, GenerationScheduler, LoadOutcome, Sampled
from kvferry.engine import Sequence as EngineSequence
from kvferry.kvcache import BlockHold, KVCache, KVCacheManager, KVPool, create_manager
from kvferry.transceiver.planner import RankTables, arrives_in_part, plan_transfer

WINDOW = 10
PROMPT = [5 + i for i in range(116)]


def manager_of(tokens_per_block: int) -> KVCacheManager:
    full = KVLayout(GroupKind.FULL, (0,), 1, 1, tokens_per_block=tokens_per_block)
    windowed = replace(full, kind=GroupKind.WINDOW, layers=(1,), window=WINDOW)
    return create_manager("V2", (full, windowed), 400 * (full.token_nbytes + windowed.token_nbytes))


def rank_of(manager: KVCacheManager) -> RankInfo:
    return RankInfo(
        worker="worker",
        role=Role.DECODE,
        incarnation="life",
        endpoint="here:1",
        model_fingerprint="model",
        resolution=RESOLUTION,
        layouts=tuple(pool.layout for pool in manager.pools),
        pools=tuple(pool.region for pool in manager.pools),
        generations=tuple(pool.generation_region for pool in manager.pools),
        agent_metadata=b"",
        handle_key=b"k",
    )


def compute(cache: KVCache, pools: Sequence[KVPool], tokens: Sequence[int], stop: int) -> None:
    """Writes every token to both groups, and checks that what it looks back to is there."""
    for group, pool in enumerate(pools):
        size, table, first = pool.layout.tokens_per_block, cache.block_table(group), cache.first_block(group)
        held = pool.view[list(table), 0, :, 0, :, 0].transpose(1, 2).flatten(0, 1)  # [position, plane], a copy
        start = first * size
        for position in range(cache.history, stop):
            pool.view[table[position // size - first], 0, :, 0, position % size, 0] = float(tokens[position])
            held[position - start] = float(tokens[position])
            oldest = max(0, position + 1 - WINDOW) if pool.layout.window else 0
            seen = held[oldest - start : position + 1 - start, 1].tolist()
            assert seen == list(tokens[oldest : position + 1]), f"what position {position} looks back to"
    cache.advance(stop)
    cache.commit(tokens)


@dataclass
class Runner:
    settings: EngineSettings
    limits: ModelLimits = field(default_factory=lambda: ModelLimits(1000, 4096))

    def execute(self, chunks: Sequence[Chunk], pools: Sequence[KVPool]) -> list[Sampled | None]:
        results = []
        for chunk in chunks:
            completes = chunk.completes
            compute(chunk.cache, pools, chunk.sequence.tokens, chunk.cache.history + chunk.length)
            results.append(Sampled(7) if completes else None)
        return results


@dataclass
class Link:
    """A loader that copies what the planner says, at once."""

    source: KVCacheManager
    target: KVCacheManager
    holds: dict[bytes, BlockHold]
    done: list[Callable[[], None]] = field(default_factory=list)

    def start(
        self,
        handle: bytes,
        digest: bytes,
        tables: tuple[BlockTable, ...],
        tokens: TokenRange,
        done: Callable[[LoadOutcome], None],
    ) -> int:
        here = rank_of(self.target)
        plan = plan_transfer(
            RankTables(rank_of(self.source), self.holds[handle].tables), RankTables(here, tables), tokens
        )
        execute(plan.copies)
        self.done.append(lambda: done(LoadOutcome(plan.nbytes, in_part=arrives_in_part(plan, here, tokens))))
        return 1

    def cancel(self, load_id: int) -> None: ...

    def quarantine(self, load_id: int, hold: BlockHold) -> None: ...


@pytest.mark.parametrize(
    ("theirs", "ours", "shared", "reused"),
    [(4, 16, 112, 0), (8, 16, 112, 0), (16, 16, 112, 112), (4, 4, 116, 116), (16, 4, 116, 116)],
)
def test_a_block_that_came_in_part_serves_its_own_request_only(
    theirs: int, ours: int, shared: int, reused: int
) -> None:
    """The prompt's window begins at 107, so blocks of 4 or 8 are held from 104 on; a request that goes on from 112
    looks back to 103, which lies in the same block of 16."""
    prefill, decode = manager_of(theirs), manager_of(ours)
    cache = prefill.open("", PROMPT, max_reuse=0)
    for stop in range(1, len(PROMPT) + 1):
        cache.reserve(stop)
        compute(cache, prefill.pools, PROMPT, stop)
    link = Link(prefill, decode, {b"handle": cache.pin()})
    events: dict[int, list[Any]] = {}
    runner: Any = Runner(EngineSettings(tokens_per_block=ours))
    scheduler = GenerationScheduler(runner, decode, lambda key, event: events.setdefault(key, []).append(event), link)

    def sequence(prompt: Sequence[int], output: tuple[int, ...] = ()) -> EngineSequence[DecodeLeg]:
        request = WorkerRequest("r", tuple(prompt), SamplingParams(max_tokens=4, temperature=0.0), output)
        return EngineSequence(request, Lifecycle(DecodeLeg.QUEUED, DECODE_TRANSITIONS), runner.limits, None)

    def finish(key: int) -> OutputDelta:
        while scheduler.step():
            pass
        last = events[key][-1]
        assert isinstance(last, OutputDelta), last
        return last

    loaded = sequence(PROMPT, (7,))
    scheduler.add_with_handle(loaded, b"handle")
    scheduler.step()
    for done in link.done:
        done()
    assert finish(loaded.key).finish_reason is not None
    other = sequence([*PROMPT[:shared], 9, 9, 9])
    scheduler.add(other)
    assert finish(other.key).usage.cached_tokens == reused
    decode.check_integrity()
    assert decode.counts().free == decode.counts().total


@pytest.mark.parametrize("steps", [(30, 61, 99, 116), (64, 116), (8, 16, 24, 105, 113, 116)])
@pytest.mark.parametrize(("theirs", "ours"), [(4, 16), (8, 16), (16, 16), (16, 4)])
def test_a_window_that_came_in_parts_holds_what_is_looked_at(theirs: int, ours: int, steps: tuple[int, ...]) -> None:
    """Each part ends where a step of prefill did, and moves what its window holds then. `compute` checks what positions
    look back to."""
    prefill, decode = manager_of(theirs), manager_of(ours)
    cache = prefill.open("", PROMPT, max_reuse=0)
    link = Link(prefill, decode, {})
    parts = []
    for stop in steps:
        cache.reserve(stop)
        compute(cache, prefill.pools, PROMPT, stop)
        part = HandOffPart(b"%d" % stop, stop)
        link.holds[part.handle] = cache.pin()
        parts.append(part)
    events: dict[int, list[Any]] = {}
    runner: Any = Runner(EngineSettings(tokens_per_block=ours))
    scheduler = GenerationScheduler(runner, decode, lambda key, event: events.setdefault(key, []).append(event), link)
    request = WorkerRequest("r", tuple(PROMPT), SamplingParams(max_tokens=4, temperature=0.0))

    def sequence(asked: WorkerRequest) -> EngineSequence[DecodeLeg]:
        return EngineSequence(asked, Lifecycle(DecodeLeg.QUEUED, DECODE_TRANSITIONS), runner.limits, None)

    loaded = sequence(request)
    scheduler.add_reserved(loaded)
    scheduler.step()
    for part in parts[:-1]:
        scheduler.add_part(loaded.key, part)
        link.done.pop()()
    scheduler.start(loaded.key, replace(request, output_token_ids=(7,)), parts[-1].handle, 0)
    link.done.pop()()
    followers = [sequence(replace(request, prompt_token_ids=(*PROMPT[:shared], 9, 9, 9))) for shared in (50, 112, 116)]
    for follower in (None, *followers):
        if follower is not None:
            scheduler.add(follower)
        while scheduler.step():
            pass
    for key in (loaded.key, *(follower.key for follower in followers)):
        last = events[key][-1]
        assert isinstance(last, OutputDelta), last
        assert last.finish_reason is not None
    decode.check_integrity()
    assert decode.counts().free == decode.counts().total


@pytest.mark.parametrize("theirs", [4, 8, 16])
@pytest.mark.parametrize("ours", [4, 8, 16])
def test_what_is_reused_and_what_is_loaded_fit_together(theirs: int, ours: int) -> None:
    """Prompts that share their beginnings, one after another: only what decode lacks of full attention moves, and of
    the window what the next token looks back to. `compute` checks what every later position sees."""
    prefill, decode = manager_of(theirs), manager_of(ours)
    link = Link(prefill, decode, {})
    events: dict[int, list[Any]] = {}
    runner: Any = Runner(EngineSettings(tokens_per_block=ours))
    scheduler = GenerationScheduler(runner, decode, lambda key, event: events.setdefault(key, []).append(event), link)
    branch = [*PROMPT[:70], *range(300, 340)]
    full, windowed = (pool.layout.token_nbytes for pool in decode.pools)
    for number, (prompt, held) in enumerate(
        [(PROMPT, 0), (PROMPT, 115 // ours * ours), (branch, 70 // ours * ours), (branch, 109 // ours * ours)]
    ):
        cache = prefill.open("", prompt, max_reuse=len(prompt) - 1)
        for stop in range(cache.history + 1, len(prompt) + 1):
            cache.reserve(stop)
            compute(cache, prefill.pools, prompt, stop)
        handle = b"%d" % number
        link.holds[handle] = cache.pin()
        cache.close()
        request = WorkerRequest("r", tuple(prompt), SamplingParams(max_tokens=20, temperature=0.0), (7,))
        loaded = EngineSequence(request, Lifecycle(DecodeLeg.QUEUED, DECODE_TRANSITIONS), runner.limits, None)
        scheduler.add_with_handle(loaded, handle)
        scheduler.step()
        link.done.pop()()
        while scheduler.step():
            pass
        last = events[loaded.key][-1]
        assert isinstance(last, OutputDelta), last
        assert last.finish_reason is not None
        window = WINDOW - 1 + max(theirs, ours)  # in whole blocks
        reused = held if ours <= theirs else 0  # of one that came in part nothing is published
        assert loaded.transferred_bytes <= (len(prompt) - reused) * full + window * windowed
        decode.check_integrity()
    assert decode.counts().free == decode.counts().total
