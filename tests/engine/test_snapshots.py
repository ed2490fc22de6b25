"""Sequences with recurrent states: where snapshots are taken, and that every state is the one of its tokens."""

from __future__ import annotations

import pytest
from echo_engine import BLOCK, expected_output, make_bench

from kvferry.core import ConfigError
from kvferry.engine import EngineSettings
from kvferry.engine.snapshots import SnapshotRule

VERSIONS = pytest.mark.parametrize("version", ["V1", "V2"])


def due(rule: SnapshotRule, prompt: int, stop: int) -> list[int]:
    return [position for position in range(stop + 1) if rule.due(position, prompt)]


def test_snapshots_are_due_every_so_many_tokens_and_at_the_end_of_the_prompt() -> None:
    rule = SnapshotRule(every_tokens=8, tokens_per_block=4)
    assert due(rule, prompt=22, stop=40) == [8, 16, 20, 24, 32, 40]
    assert due(rule, prompt=20, stop=24) == [8, 16, 24], "one token of the prompt is left to compute"
    assert due(rule, prompt=21, stop=24) == [8, 16, 20, 24]
    assert due(rule, prompt=4, stop=8) == [8]
    assert due(rule, prompt=5, stop=8) == [4, 8]
    assert due(rule, prompt=1, stop=8) == [8]


def test_a_distance_that_is_no_multiple_of_the_block_is_rounded_up() -> None:
    assert due(SnapshotRule(9, 4), prompt=1, stop=30) == [12, 24]
    assert due(SnapshotRule(1, 4), prompt=1, stop=9) == [4, 8]


def test_the_next_position_is_always_ahead() -> None:
    rule = SnapshotRule(8, 4)
    for prompt in range(1, 30):
        for position in range(40):
            ahead = rule.next_due(position, prompt)
            assert ahead > position
            assert ahead % 4 == 0
            assert rule.due(ahead, prompt)
            assert not any(rule.due(between, prompt) for between in range(position + 1, ahead))


def test_the_distance_is_checked() -> None:
    with pytest.raises(ConfigError, match="snapshot_tokens must be at least 1, got 0") as caught:
        EngineSettings(snapshot_tokens=0)
    assert caught.value.field == "kv_cache.snapshot_tokens"


@VERSIONS
@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 16, 17, 33])
def test_lengths_around_blocks(version: str, length: int) -> None:
    bench = make_bench(version=version, states=True, snapshot_tokens=8)
    prompt = list(range(1, length + 1))
    for _ in range(2):
        sequence = bench.add(prompt)
        bench.run()
        assert bench.output(sequence.key) == expected_output(prompt, 8)
        reusable = (length - 1) // BLOCK * BLOCK if version == "V2" else 0
    assert bench.events[sequence.key][-1].usage.cached_tokens == reusable
    assert bench.manager.counts().free == bench.manager.counts().total
    bench.manager.check_integrity()


def test_chunks_end_where_a_snapshot_is_due_and_a_common_beginning_is_reused_up_to_one() -> None:
    bench = make_bench(blocks=200, states=True, snapshot_tokens=16)
    common = list(range(1, 40))
    bench.add([*common, 77], count=1)
    bench.run()
    assert bench.runner.steps == [16, 16, 4, 4]  # the prompt's last whole block ends at 36
    forked = bench.add([*common, 88, 89], count=1)
    longer = bench.add(common[:36] + [99] * 5, count=1)
    bench.run()
    for sequence in (forked, longer):
        assert bench.events[sequence.key][-1].usage.cached_tokens == 36
        assert bench.output(sequence.key) == expected_output(list(sequence.request.prompt_token_ids), 1)
    early = bench.add(common[:20] + [5] * 9, count=1)
    bench.run()
    assert bench.events[early.key][-1].usage.cached_tokens == 16
    assert bench.output(early.key) == expected_output(common[:20] + [5] * 9, 1)


def test_an_answer_that_grows_past_a_multiple_can_be_gone_on_from() -> None:
    bench = make_bench(states=True, snapshot_tokens=16)
    prompt = [7] * 10
    first = bench.add(prompt, count=30)
    bench.run()
    turn = prompt + bench.output(first.key) + [3] * 5
    second = bench.add(turn, count=4)
    bench.run()
    assert bench.events[second.key][-1].usage.cached_tokens == 32
    assert bench.output(second.key) == expected_output(turn, 4)


def test_without_reuse_chunks_are_not_cut() -> None:
    bench = make_bench(version="V1", states=True, snapshot_tokens=8)
    bench.add(list(range(1, 41)), count=1)
    bench.run()
    assert bench.runner.steps == [40]


@VERSIONS
def test_many_at_once_equal_each_alone(version: str) -> None:
    bench = make_bench(blocks=400, version=version, states=True, step_token_budget=16, snapshot_tokens=12)
    prompts = [[p + 1] * (3 + 5 * p) for p in range(12)]
    sequences = [bench.add(prompt) for prompt in prompts]
    bench.run()
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert bench.output(sequence.key) == expected_output(prompt, 8)
    bench.manager.check_integrity()


@VERSIONS
def test_more_requests_than_states_take_turns(version: str) -> None:
    bench = make_bench(blocks=32, version=version, states=True)  # two states
    sequences = [bench.add([p + 1] * 6, count=5) for p in range(7)]
    bench.run()
    for p, sequence in enumerate(sequences):
        assert bench.output(sequence.key) == expected_output([p + 1] * 6, 5)
    assert bench.manager.counts().free == bench.manager.counts().total


@VERSIONS
def test_a_state_that_became_free_is_given_on_though_fewer_blocks_are_free_than_before(version: str) -> None:
    bench = make_bench(blocks=32, version=version, states=True)  # two states
    long, short, waiting = (bench.add([p] * 6, count=count) for p, count in ((1, 60), (2, 30), (3, 2)))
    while short.key not in bench.events or not bench.finish(short.key):
        bench.scheduler.step()
        assert waiting.cache is None
    for _ in range(3):
        bench.scheduler.step()
    assert bench.finish(waiting.key) is not None
    assert bench.finish(long.key) is None, "it did not have to end first"
    bench.run()
    assert bench.output(long.key) == expected_output([1] * 6, 60)


@VERSIONS
@pytest.mark.parametrize("host_blocks", [0, 40])
def test_who_must_make_way_ends_with_the_same_answer(version: str, host_blocks: int) -> None:
    """Suspended with its state where there is a tier below, else computed again."""
    if version == "V1" and host_blocks:
        with pytest.raises(ConfigError, match="manager V1 keeps one state per request"):
            make_bench(blocks=40, version="V1", states=True, host_blocks=host_blocks)
        return
    bench = make_bench(blocks=40, version=version, states=True, host_blocks=host_blocks)  # three states, 160 tokens
    prompts = [[p + 1] * 6 for p in range(3)]
    sequences = [bench.add(prompt, count=90) for prompt in prompts]
    seen: set[str] = set()
    while bench.scheduler.has_work:
        bench.scheduler.step()
        seen |= bench.scheduler.counts().keys()
        bench.manager.check_integrity()
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert bench.output(sequence.key) == expected_output(prompt, 90)
    assert ("suspended" in seen) == bool(host_blocks)
    if host_blocks:
        assert sum(bench.runner.steps) == 3 * (6 + 89), "nothing was computed twice"
    else:
        assert sum(bench.runner.steps) > 3 * (6 + 89), "somebody was preempted"
    assert bench.manager.counts().free == bench.manager.counts().total
