"""While bytes move between the pools and the host tier, those who need none of them go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest
from echo_engine import Bench, expected_output, make_bench
from manual_copier import ManualCopier

from kvferry.core import DecodeLeg
from kvferry.engine.sequence import Sequence as EngineSequence
from kvferry.kvcache import BackgroundCopier, RowCopy

PROMPTS = ([1] * 5, [2] * 6, [3] * 8)
COUNTS = (12, 30, 24)


class HeldCopier(BackgroundCopier):
    """Copies nothing before it is let go."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.go_on = threading.Event()
        self.asked = 0

    def submit(self, copies: Sequence[RowCopy]) -> Future[None]:
        self.asked += 1
        self._caller.submit(lambda: self.go_on.wait(30))
        return super().submit(copies)


def finish(bench: Bench, steps: int = 5_000) -> None:
    for _ in range(steps):
        if not bench.scheduler.has_work:
            return
        bench.scheduler.step()
    raise AssertionError(f"not reached: {bench.scheduler.counts()}")


def step_until(bench: Bench, reached: Callable[[], bool], steps: int = 500) -> None:
    for _ in range(steps):
        if reached():
            return
        bench.scheduler.step()
    raise AssertionError(f"not reached: {bench.scheduler.counts()}")


def assert_whole(bench: Bench, sequences: Sequence[EngineSequence[DecodeLeg]]) -> None:
    for prompt, sequence, count in zip(PROMPTS, sequences, COUNTS, strict=False):
        assert bench.output(sequence.key) == expected_output(prompt, count)
    while bench.manager.poll(1.0):
        pass
    bench.manager.check_integrity()
    assert bench.manager.counts().free == bench.manager.counts().total
    assert bench.manager.counts().pinned == 0
    assert bench.manager.tier_counts()[0].parked == 0
    bench.manager.close()


def test_who_has_room_goes_on_while_a_suspended_request_is_copied_down() -> None:
    copier = HeldCopier()
    bench = make_bench(blocks=12, host_blocks=12, copier=copier)
    sequences = [bench.add(prompt, count=count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)]
    step_until(bench, lambda: copier.asked > 0)
    assert [s.leg.state for s in sequences].count(DecodeLeg.SUSPENDED) == 1
    assert bench.manager.releasing
    before = [len(bench.output(s.key)) for s in sequences]
    for _ in range(8):
        assert bench.scheduler.step(), "there is something to wait for"
    after = [len(bench.output(s.key)) for s in sequences]
    assert max(now - then for now, then in zip(after, before, strict=True)) >= 2
    # Nobody else had to make way because the pages of the first were not free yet.
    assert bench.manager.statistics().suspensions == 1
    copier.go_on.set()
    finish(bench)
    assert bench.manager.statistics().suspensions == bench.manager.statistics().resumptions > 0
    assert_whole(bench, sequences)


def test_others_go_on_while_a_suspended_request_is_copied_up() -> None:
    copier = ManualCopier()
    bench = make_bench(blocks=12, host_blocks=12, copier=copier)
    sequences = [bench.add(prompt, count=count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)]
    pool = bench.manager.pools[0].buffer.data_ptr()

    def copied_up() -> bool:
        """Makes every copy but those to the pool."""
        up = [copy for copy in copier.waiting if copy.copies[0].target.data_ptr() == pool]
        for copy in copier.waiting[::-1]:
            if copy not in up:
                copy.make()
        return bool(up)

    step_until(bench, copied_up)
    (waiting,) = [s for s in sequences if s.leg.state is DecodeLeg.SUSPENDED]
    assert waiting.cache is not None
    assert waiting.cache.resuming
    assert waiting.cache.suspended
    running = [s for s in sequences if s.leg.state is DecodeLeg.RUNNING]
    before = len(bench.output(running[0].key))
    for _ in range(4):
        bench.scheduler.step()
    assert len(bench.output(running[0].key)) == before + 4
    assert waiting.leg.state is DecodeLeg.SUSPENDED
    copier.waiting[0].make()
    bench.scheduler.step()
    assert waiting.leg.state is DecodeLeg.RUNNING
    while bench.scheduler.has_work:
        copied_up()
        for copy in copier.waiting[::-1]:
            copy.make()
        bench.scheduler.step()
    assert_whole(bench, sequences)


def test_others_go_on_while_a_prefix_is_copied_up() -> None:
    copier = HeldCopier()
    bench = make_bench(blocks=16, host_blocks=40, copier=copier)
    copier.go_on.set()
    prompt = [9] * 16
    for tokens in (prompt, [8] * 56):  # pushes the first out
        bench.add(tokens, count=4)
        bench.run()
    running = bench.add([1] * 3, count=40)
    bench.scheduler.step()
    while bench.manager.poll(1.0):
        pass
    copier.go_on.clear()
    late = bench.add(prompt, count=4)
    for _ in range(10):
        before = len(bench.output(running.key))
        bench.scheduler.step()
        assert len(bench.output(running.key)) == before + 1
    assert late.leg.state is DecodeLeg.QUEUED
    assert bench.manager.match("", prompt) == 16, "what is on its way can be found"
    copier.go_on.set()
    finish(bench)
    assert bench.output(late.key) == expected_output(prompt, 4)
    assert late.cached_tokens == 12
    assert bench.manager.statistics().restored_tokens == 8, "its first block was still in the pool"
    assert_whole(bench, [])


def test_a_request_cancelled_while_it_is_copied_leaves_nothing() -> None:
    copier = HeldCopier()
    bench = make_bench(blocks=12, host_blocks=12, copier=copier)
    sequences = [bench.add(prompt, count=count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)]
    step_until(bench, lambda: copier.asked > 0)
    (waiting,) = [s for s in sequences if s.leg.state is DecodeLeg.SUSPENDED]
    bench.scheduler.cancel(waiting.key)
    bench.scheduler.step()
    assert bench.manager.tier_counts()[0].free < 12, "a slot that is still written has no other owner"
    copier.go_on.set()
    finish(bench)
    assert waiting.leg.state is DecodeLeg.CANCELLED
    assert_whole(bench, [])


def test_closing_waits_for_what_is_copied() -> None:
    copier = HeldCopier()
    bench = make_bench(blocks=12, host_blocks=12, copier=copier)
    for prompt, count in zip(PROMPTS, COUNTS, strict=True):
        bench.add(prompt, count=count)
    step_until(bench, lambda: copier.asked > 0)
    bench.scheduler.close()
    threading.Timer(0.05, copier.go_on.set).start()
    bench.manager.close()
    assert bench.manager.counts().free == bench.manager.counts().total
    assert bench.manager.tier_counts()[0].parked == 0


@pytest.mark.parametrize("version", ["V2"])
def test_what_is_written_ahead_costs_eviction_no_copy(version: str) -> None:
    copier = ManualCopier()
    bench = make_bench(blocks=16, host_blocks=40, version=version, copier=copier)
    for number in range(4):
        bench.add([10 + number] * 30, count=2)
        while bench.scheduler.has_work:
            bench.scheduler.step()
            while copier.waiting:
                copier.waiting[0].make()
                bench.manager.poll()
    counted = bench.manager.statistics()
    assert counted.copied_ahead + counted.copied_at_once == counted.evicted_blocks > 0
    assert counted.copied_ahead > 0
    assert bench.manager.match("", [10] * 30) == 28
    bench.manager.close()
