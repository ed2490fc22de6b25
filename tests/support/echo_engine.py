"""A model whose KV is its tokens: what it says next depends on every position it reads back from the pool.

A lost, stale or foreign block changes the answer, so scheduling can be tested without weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.core import (
    DECODE_TRANSITIONS,
    DecodeLeg,
    FinishReason,
    KVFerryError,
    KVLayout,
    Lifecycle,
    ModelLimits,
    OutputDelta,
    SamplingParams,
    WorkerRequest,
)
from kvferry.core.layout import GroupKind
from kvferry.engine import Chunk, EngineSettings, GenerationScheduler, Sampled
from kvferry.engine import Sequence as EngineSequence
from kvferry.kvcache import Copier, KVCacheManager, KVPool, create_manager
from kvferry.kvcache.pool import slot_counts

BLOCK = 4
VOCAB = 1000
LAYOUT = KVLayout(GroupKind.FULL, layers=(0,), kv_heads=1, head_dim=1, tokens_per_block=BLOCK)
STATE = KVLayout(GroupKind.SSM, layers=(1,), kv_heads=1, head_dim=1, tokens_per_block=1, planes=1)


def next_token(tokens: Sequence[int]) -> int:
    digest = hashlib.sha256(str(list(tokens)).encode()).digest()
    return 1 + int.from_bytes(digest[:4], "big") % (VOCAB - 1)


def next_state(state: int, tokens: Sequence[int]) -> int:
    """What a recurrence over `tokens` makes of a state; small enough to be exact in float32."""
    for token in tokens:
        state = (31 * state + token) % 65_521
    return state


def expected_output(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class EchoRunner:
    """Stands where ModelRunner does. `fail` makes a step raise, and so does a state that is not that of its tokens."""

    settings: EngineSettings
    limits: ModelLimits = field(default_factory=lambda: ModelLimits(VOCAB, 4096))
    layouts: tuple[KVLayout, ...] = (LAYOUT,)
    fail: Callable[[Sequence[Chunk]], bool] = lambda chunks: False
    steps: list[int] = field(default_factory=list)

    def pin(self) -> None:
        """Any core will do."""

    def settle_pages(self) -> None:
        """One rank: nobody else to tell."""

    def execute(self, chunks: Sequence[Chunk], pools: Sequence[KVPool]) -> list[Sampled | None]:
        if self.fail(chunks):
            raise RuntimeError("injected")
        self.steps.append(sum(chunk.length for chunk in chunks))
        return [self._run(chunk, *pools) for chunk in chunks]

    def _run(self, chunk: Chunk, pool: KVPool, states: KVPool | None = None) -> Sampled | None:
        sequence, cache = chunk.sequence, chunk.cache
        table = list(cache.block_table(0))
        completes = chunk.completes
        for position in range(cache.history, cache.history + chunk.length):
            slot, offset = table[position // BLOCK], position % BLOCK
            pool.view[slot, 0, :, 0, offset, 0] = float(sequence.tokens[position])
        if states is not None:
            (slot,) = cache.block_table(1)
            stop, state = cache.history + chunk.length, int(states.view[slot].item())
            assert state == next_state(0, sequence.tokens[: cache.history])
            states.view[slot] = float(next_state(state, sequence.tokens[cache.history : stop]))
        cache.advance(cache.history + chunk.length)
        cache.commit(sequence.tokens)
        if not completes:
            return None
        read = [
            int(pool.view[table[position // BLOCK], 0, 1, 0, position % BLOCK, 0]) for position in range(cache.history)
        ]
        return Sampled(next_token(read))


@dataclass
class Bench:
    """A scheduler, its runner and manager, and what it emitted per sequence."""

    runner: EchoRunner
    manager: KVCacheManager
    scheduler: GenerationScheduler
    events: dict[int, list[Any]]

    def sequence(self, prompt: Sequence[int], count: int = 8, **request: Any) -> EngineSequence[DecodeLeg]:
        sampling = request.pop("sampling", SamplingParams(max_tokens=count, temperature=0.0))
        worker_request = WorkerRequest("r", tuple(prompt), sampling, **request)
        return EngineSequence(worker_request, Lifecycle(DecodeLeg.QUEUED, DECODE_TRANSITIONS), self.runner.limits, None)

    def add(self, prompt: Sequence[int], count: int = 8, **request: Any) -> EngineSequence[DecodeLeg]:
        sequence = self.sequence(prompt, count, **request)
        self.scheduler.add(sequence)
        return sequence

    def run(self, steps: int = 2000) -> None:
        for _ in range(steps):
            if not self.scheduler.step() and not self.scheduler.has_work:
                return
        raise AssertionError(f"still at work after {steps} steps: {self.scheduler.counts()}")

    def output(self, key: int) -> list[int]:
        return [token for event in self.events[key] if isinstance(event, OutputDelta) for token in event.token_ids]

    def finish(self, key: int) -> FinishReason | None:
        last = self.events[key][-1]
        return last.finish_reason if isinstance(last, OutputDelta) else None

    def error(self, key: int) -> KVFerryError:
        last = self.events[key][-1]
        assert isinstance(last, KVFerryError)
        return last


def nbytes_of(layouts: Sequence[KVLayout], blocks: int) -> int:
    return sum(slots * layout.slot_nbytes for slots, layout in zip(slot_counts(layouts, blocks), layouts, strict=True))


def make_bench(
    blocks: int = 64,
    version: str = "V2",
    host_blocks: int = 0,
    states: bool = False,
    disk_dir: Path | None = None,
    copier: Copier | None = None,
    **settings: Any,
) -> Bench:
    """states: the model has a recurrent state too; without reuse on V1, which keeps one per request. disk_dir: of a
    tier below the host's; close the manager. copier: see `CacheOptions`."""
    layouts = (LAYOUT, STATE) if states else (LAYOUT,)
    runner = EchoRunner(EngineSettings(tokens_per_block=BLOCK, **settings), layouts=layouts)
    manager = create_manager(
        version,
        layouts,
        nbytes_of(layouts, blocks),
        host_bytes=nbytes_of(layouts, host_blocks) if host_blocks else 0,
        disk_bytes=1 << 20 if disk_dir else 0,
        disk_dir=disk_dir,
        prefix_reuse=not states or version == "V2",
        copier=copier,
    )
    events: dict[int, list[Any]] = {}
    scheduler = GenerationScheduler(
        runner,  # type: ignore[arg-type]
        manager,
        lambda key, event: events.setdefault(key, []).append(event),
    )
    return Bench(runner, manager, scheduler, events)
