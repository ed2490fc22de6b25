"""Continuous batching over real KV managers, with a model whose answers depend on every cached position."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from echo_engine import Bench, expected_output, make_bench

from kvferry.core import (
    DeadlineExceededError,
    DecodeLeg,
    FinishReason,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    SamplingParams,
)
from kvferry.engine import GenerationScheduler, scheduler
from kvferry.kvcache import CacheLostError, create_manager
from kvferry.kvcache.cache_v2 import CacheV2
from kvferry.kvcache.disk_tier import DiskShelf
from kvferry.kvcache.records import Kind

VERSIONS = pytest.mark.parametrize("version", ["V1", "V2"])


@VERSIONS
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17])
def test_lengths_around_blocks(version: str, length: int) -> None:
    bench = make_bench(version=version)
    prompt = list(range(1, length + 1))
    sequence = bench.add(prompt)
    bench.run()
    assert bench.output(sequence.key) == expected_output(prompt, 8)
    assert bench.finish(sequence.key) is FinishReason.LENGTH
    assert bench.manager.counts().free == bench.manager.counts().total


@VERSIONS
def test_many_at_once_equal_each_alone(version: str) -> None:
    bench = make_bench(blocks=200, version=version, step_token_budget=16)
    prompts = [[p + 1] * (3 + 5 * p) for p in range(12)]
    sequences = [bench.add(prompt) for prompt in prompts]
    bench.run()
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert bench.output(sequence.key) == expected_output(prompt, 8)
    assert max(bench.runner.steps) <= 16 + 12
    bench.manager.check_integrity()


@VERSIONS
def test_a_common_prefix_is_computed_once(version: str) -> None:
    bench = make_bench(version=version)
    first = bench.add([5] * 20)
    bench.run()
    computed = sum(bench.runner.steps)
    second = bench.add([5] * 20 + [6, 7])
    bench.run()
    assert bench.output(second.key) == expected_output([5] * 20 + [6, 7], 8)
    assert sum(bench.runner.steps) - computed == 2 + 7  # the suffix, then a token per step after the first
    assert bench.events[second.key][-1].usage.cached_tokens == 20
    assert bench.events[first.key][-1].usage.cached_tokens == 0


def test_scopes_never_share() -> None:
    bench = make_bench()
    bench.add([5] * 20, scope="a")
    bench.run()
    other = bench.add([5] * 20, scope="b")
    bench.run()
    assert bench.events[other.key][-1].usage.cached_tokens == 0


@VERSIONS
def test_a_full_pool_preempts_and_everybody_finishes(version: str) -> None:
    bench = make_bench(blocks=12, version=version)  # 48 tokens; four requests grow to 26 each
    prompts = [[p + 1] * 6 for p in range(4)]
    sequences = [bench.add(prompt, count=20) for prompt in prompts]
    bench.run()
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert bench.output(sequence.key) == expected_output(prompt, 20)
    assert bench.manager.counts().free == bench.manager.counts().total


@pytest.mark.parametrize("host_blocks", [4, 40])
def test_with_a_tier_below_preempted_requests_are_suspended_and_go_on_where_they_were(host_blocks: int) -> None:
    bench = make_bench(blocks=12, host_blocks=host_blocks)
    prompts = [[p + 1] * 6 for p in range(4)]
    sequences = [bench.add(prompt, count=20) for prompt in prompts]
    seen: set[str] = set()
    while bench.scheduler.has_work:
        bench.scheduler.step()
        seen |= bench.scheduler.counts().keys()
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert bench.output(sequence.key) == expected_output(prompt, 20)
    assert "suspended" in seen
    if host_blocks == 40:  # room for all: nothing is computed twice
        assert sum(bench.runner.steps) == 4 * (6 + 19)
    assert bench.manager.counts().free == bench.manager.counts().total
    assert bench.manager.tier_counts()[0].parked == 0
    bench.manager.check_integrity()


def test_a_suspended_request_can_be_cancelled() -> None:
    bench = make_bench(blocks=12, host_blocks=40)
    sequences = [bench.add([p + 1] * 6, count=20) for p in range(4)]
    while "suspended" not in bench.scheduler.counts():
        bench.scheduler.step()
    suspended = [s for s in sequences if s.leg.state is DecodeLeg.SUSPENDED]
    for sequence in suspended:
        bench.scheduler.cancel(sequence.key)
        assert isinstance(bench.error(sequence.key), RequestCancelledError)
    assert bench.manager.tier_counts()[0].parked == 0
    bench.run()
    assert bench.manager.counts().free == bench.manager.counts().total


def test_what_can_never_fit_is_refused_with_the_setting() -> None:
    bench = make_bench(blocks=4)
    with pytest.raises(InvalidRequestError, match=r"kv_cache\.bytes") as caught:
        bench.add([1] * 12, count=12)
    assert caught.value.field == "max_tokens"


def test_a_full_queue_is_refused() -> None:
    bench = make_bench(max_queued=2)
    bench.add([1])
    bench.add([2])
    with pytest.raises(OverloadedError, match=r"max_queued"):
        bench.add([3])


def test_cancel_waiting_and_running() -> None:
    bench = make_bench(max_batch=1)
    running, waiting, kept = bench.add([1] * 5), bench.add([2] * 5), bench.add([3] * 5)
    bench.scheduler.step()
    assert running.leg.state is DecodeLeg.RUNNING
    bench.scheduler.cancel(running.key)
    bench.scheduler.cancel(waiting.key)
    bench.scheduler.cancel(waiting.key)  # a second time changes nothing
    bench.run()
    for sequence in (running, waiting):
        assert isinstance(bench.error(sequence.key), RequestCancelledError)
    assert bench.output(kept.key) == expected_output([3] * 5, 8)
    assert bench.scheduler.counts() == {"cancelled": 2, "finished": 1}
    assert bench.manager.counts().free == bench.manager.counts().total


def test_a_deadline_ends_a_request() -> None:
    bench = make_bench()
    sequence = bench.add([1] * 5, deadline_s=0.01)
    time.sleep(0.02)
    bench.run()
    assert isinstance(bench.error(sequence.key), DeadlineExceededError)


def test_a_failed_step_ends_its_requests_only() -> None:
    bench = make_bench(max_batch=1)
    broken, fine = bench.add([1] * 5), bench.add([2] * 5)
    bench.runner.fail = lambda chunks: chunks[0].sequence is broken
    bench.run()
    assert isinstance(bench.error(broken.key), InternalError)
    assert bench.output(fine.key) == expected_output([2] * 5, 8)
    assert bench.manager.counts().free == bench.manager.counts().total


def test_stop_ids_and_min_tokens() -> None:
    output = expected_output([9, 9], 6)
    bench = make_bench()
    stopping = SamplingParams(max_tokens=6, temperature=0.0, stop_token_ids=(output[2],))
    sequence = bench.add([9, 9], sampling=stopping)
    bench.run()
    assert bench.output(sequence.key) == output[:3]
    assert bench.finish(sequence.key) is FinishReason.STOP
    held_back = bench.sequence([9, 9], sampling=dataclasses.replace(stopping, min_tokens=4))
    assert held_back.suppressed_ids == {output[2]}


def test_max_tokens_one_gives_one() -> None:
    bench = make_bench()
    sequence = bench.add([4, 4, 4], count=1)
    bench.run()
    assert len(bench.output(sequence.key)) == 1
    assert bench.finish(sequence.key) is FinishReason.LENGTH


def test_a_replay_goes_on_where_it_stopped() -> None:
    output = expected_output([7] * 9, 8)
    bench = make_bench()
    sequence = bench.add([7] * 9, output_token_ids=tuple(output[:3]))
    bench.run()
    assert bench.output(sequence.key) == output[3:]
    assert bench.events[sequence.key][-1].usage.completion_tokens == 8


def test_a_long_prompt_does_not_stall_a_stream() -> None:
    bench = make_bench(blocks=300, step_token_budget=16)
    stream = bench.add([1] * 3, count=30)
    bench.scheduler.step()
    bench.add([2] * 400, count=1)
    for step in range(2, 12):
        bench.scheduler.step()
        assert len(bench.output(stream.key)) == step


def test_a_suspended_cache_that_was_lost_is_computed_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench(blocks=12, host_blocks=40)

    def lost(cache: object, token_ids: object) -> None:
        raise CacheLostError("gone")

    monkeypatch.setattr(CacheV2, "_unpark", lost)
    prompts = [[p + 1] * 6 for p in range(4)]
    sequences = [bench.add(prompt, count=20) for prompt in prompts]
    bench.run()
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert bench.output(sequence.key) == expected_output(prompt, 20)
    assert "gone" in caplog.text
    assert bench.manager.tier_counts()[0].parked == 0
    assert bench.manager.counts().free == bench.manager.counts().total
    bench.manager.check_integrity()


class SlowDisk:
    """Every read of a file waits until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.readers: set[str] = set()
        read = DiskShelf._read_file

        def slowly(shelf: DiskShelf, slot: int, kind: Kind, digest: bytes) -> bytes | None:
            self.readers.add(threading.current_thread().name)
            self.go_on.wait(60)
            return read(shelf, slot, kind, digest)

        monkeypatch.setattr(DiskShelf, "_read_file", slowly)
        # What still waits to be written is read from memory, which no disk can slow down.
        monkeypatch.setattr(DiskShelf, "_write_soon", _write_at_once(DiskShelf._write_soon))


def _write_at_once(write_soon: Callable[..., int]) -> Callable[..., int]:
    def write(shelf: DiskShelf, kind: Kind, digest: bytes, row: torch.Tensor) -> int:
        slot = write_soon(shelf, kind, digest, row)
        _, written = shelf._pending.pop(digest)
        written.result()
        return slot

    return write


def step_until(bench: Bench, reached: Callable[[], bool], steps: int = 5_000) -> None:
    for _ in range(steps):
        if reached():
            return
        if not bench.scheduler.step():
            time.sleep(0.001)  # another thread reads
    raise AssertionError(f"not reached: {bench.scheduler.counts()}")


def test_a_resume_from_disk_holds_up_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Three requests have room for two: one is suspended to disk, and its bytes do not come for a long time."""
    bench = make_bench(blocks=12, host_blocks=1, disk_dir=tmp_path)
    disk = SlowDisk(monkeypatch)
    sequences = [bench.add([p + 1] * 6, count=n) for p, n in enumerate([12, 40, 20])]
    step_until(bench, lambda: bool(disk.readers))
    assert bench.manager.tier_counts()[1].parked > 0
    (waiting,) = [s for s in sequences if s.leg.state is DecodeLeg.SUSPENDED]
    others = [s for s in sequences if s is not waiting]
    running = next(s for s in others if s.leg.state is DecodeLeg.RUNNING)
    before = len(bench.output(running.key))
    for _ in range(5):
        bench.scheduler.step()
    assert len(bench.output(running.key)) == before + 5
    assert waiting.leg.state is DecodeLeg.SUSPENDED
    assert disk.readers == {"kv-disk-read_0"}
    disk.go_on.set()
    step_until(bench, lambda: not bench.scheduler.has_work)
    for number, (sequence, count) in enumerate(zip(sequences, [12, 40, 20], strict=True)):
        assert bench.output(sequence.key) == expected_output([number + 1] * 6, count)
    assert bench.manager.tier_counts()[1].parked == 0
    assert bench.manager.counts().free == bench.manager.counts().total
    bench.manager.check_integrity()
    bench.manager.close()


def test_a_prefix_on_disk_is_waited_for_while_others_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench = make_bench(blocks=12, host_blocks=4, disk_dir=tmp_path)
    disk = SlowDisk(monkeypatch)
    prompt = [9] * 16
    for tokens in (prompt, [8] * 40, [7] * 40):  # each pushes out the one before, host tier and all
        bench.add(tokens, count=4)
        bench.run()
    assert not disk.readers
    running = bench.add([1] * 3, count=40)
    bench.scheduler.step()
    late = bench.add(prompt, count=4)
    for step in range(2, 12):
        bench.scheduler.step()
        assert len(bench.output(running.key)) == step
    assert late.leg.state is DecodeLeg.QUEUED
    disk.go_on.set()
    step_until(bench, lambda: not bench.scheduler.has_work)
    assert bench.output(late.key) == expected_output(prompt, 4)
    assert late.cached_tokens == 12
    assert disk.readers == {"kv-disk-read_0"}
    bench.manager.close()


def test_reading_ahead_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often what was read is pushed out again, a request starts."""
    bench = make_bench()
    monkeypatch.setattr(type(bench.manager), "prefetch", lambda *about: False)
    bench.add([1] * 3, count=100)
    bench.scheduler.step()
    late = bench.add([2] * 3, count=4)
    bench.scheduler.step()
    assert late.leg.state is DecodeLeg.QUEUED
    monkeypatch.setattr(scheduler, "READ_AHEAD_S", 0.0)
    time.sleep(0.001)
    bench.scheduler.step()
    assert late.leg.state is DecodeLeg.RUNNING


def test_a_worker_that_checks_its_cache_finds_what_was_written_beyond_a_pool() -> None:
    runner = make_bench(check_cache=True).runner
    manager = create_manager("V2", runner.layouts, 1 << 16, debug=True)
    scheduler = GenerationScheduler(runner, manager, lambda *event: None)
    assert not scheduler.step()
    manager.pools[0].guards[1][0] = 0
    with pytest.raises(AssertionError, match="behind the pool"):
        scheduler.step()
