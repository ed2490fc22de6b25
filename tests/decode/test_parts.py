"""Decode first: room is reserved, and the prompt's KV loaded part by part while it is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from echo_engine import BLOCK, LAYOUT, EchoRunner, expected_output
from echo_link import Link, Pair

from kvferry.core import (
    PREFILL_TRANSITIONS,
    DecodeLeg,
    GroupKind,
    HandOffPart,
    Lifecycle,
    PrefillLeg,
    RequestCancelledError,
    SamplingParams,
    TransferError,
    WorkerRequest,
)
from kvferry.engine import EngineSettings, Sequence
from kvferry.kvcache import create_manager
from kvferry.prefill import PrefillResult, PrefillScheduler

PROMPT = list(range(10, 60))  # 50 tokens: computed as 18, 18, 14
STOPS = [16, 36]  # whole blocks of 4


def prefilled_in_parts(pair: Pair, prompt: list[int] = PROMPT) -> tuple[Sequence[PrefillLeg], PrefillResult]:
    sequence = pair.add_prefill(prompt, in_parts=True)
    while pair.prefill.step():
        pass
    result = pair.events[sequence.key][-1]
    assert isinstance(result, PrefillResult)
    return sequence, result


def assert_answer(pair: Pair, key: int, result: PrefillResult, prompt: list[int] = PROMPT) -> None:
    assert [result.aux.first_token_id, *pair.decode.output(key)] == expected_output(prompt, 8)


@pytest.mark.parametrize("version", ["V1", "V2"])
def test_parts_are_loaded_while_the_rest_is_computed(version: str) -> None:
    pair = Pair(prefill_version=version, decode_version=version, budget=18)
    decode = pair.reserve(PROMPT)
    assert decode.leg.state is DecodeLeg.RESERVED
    prefill = pair.add_prefill(PROMPT, in_parts=True)
    for number, stop in enumerate(STOPS, 1):
        assert pair.prefill.step()
        part = pair.parts(prefill)[-1]
        assert (part.stop, prefill.leg.state) == (stop, PrefillLeg.RUNNING)
        pair.decode.scheduler.add_part(decode.key, part)
        assert decode.leg.state is DecodeLeg.LOADING
        pair.link.deliver(number)
    assert [(load.tokens.start, load.tokens.stop) for load in pair.link.loads.values()] == [(0, 16), (16, 36)]
    assert pair.prefill_manager.counts().pinned == 0  # decode has them all
    pair.prefill.step()
    result = pair.events[prefill.key][-1]
    pair.start(decode, result)
    assert (pair.link.loads[3].tokens.start, pair.link.loads[3].tokens.stop) == (36, 50)
    pair.link.deliver(3)
    pair.decode.run()
    assert_answer(pair, decode.key, result)
    assert pair.decode.runner.steps == [1] * 7  # nothing of the prompt was computed here
    assert pair.events[decode.key][-1].transferred_bytes == len(PROMPT) * LAYOUT.token_nbytes
    pair.assert_nothing_held()


def test_parts_that_come_at_once_are_loaded_one_by_one() -> None:
    pair = Pair(budget=18)
    prefill, result = prefilled_in_parts(pair)
    decode = pair.reserve(PROMPT)
    for part in pair.parts(prefill):
        pair.decode.scheduler.add_part(decode.key, part)
    pair.start(decode, result)
    for load_id in (1, 2, 3):
        assert len(pair.link.loads) == load_id
        pair.link.deliver(load_id)
    pair.decode.run()
    assert_answer(pair, decode.key, result)
    pair.assert_nothing_held()


def test_what_decode_holds_already_is_not_loaded_again() -> None:
    pair = Pair(budget=18)
    first = pair.add_decode(PROMPT[:12], pair.prefilled(PROMPT[:12]))
    pair.link.deliver(1)
    pair.decode.run()
    prefill, result = prefilled_in_parts(pair)
    decode = pair.reserve(PROMPT)
    for number, part in enumerate(pair.parts(prefill), 2):
        pair.decode.scheduler.add_part(decode.key, part)
        pair.link.deliver(number)
    pair.start(decode, result)
    pair.link.deliver(len(pair.link.loads))
    pair.decode.run()
    moved = [load.tokens for load in list(pair.link.loads.values())[1:]]
    assert sum(map(len, moved)) == len(PROMPT) - 12
    assert pair.events[decode.key][-1].transferred_bytes == 38 * LAYOUT.token_nbytes
    assert_answer(pair, decode.key, result)
    assert first.leg.state is DecodeLeg.FINISHED
    pair.assert_nothing_held()


def test_a_full_hit_moves_nothing() -> None:
    pair = Pair()
    prompt = [3] * (2 * BLOCK)
    for moved in (2 * BLOCK, 0):
        decode = pair.reserve(prompt)
        _, result = prefilled_in_parts(pair, prompt)
        pair.start(decode, result)
        load_id = len(pair.link.loads)
        assert len(pair.link.loads[load_id].tokens) == moved
        pair.link.deliver(load_id)
        pair.decode.run()
        assert_answer(pair, decode.key, result, prompt)
    pair.assert_nothing_held()


def test_parts_and_the_start_wait_for_room() -> None:
    pair = Pair(blocks=16, budget=18)
    blocker = pair.decode.add([1] * 40, count=20)
    pair.decode.scheduler.step()
    prefill, result = prefilled_in_parts(pair)
    decode = pair.reserve(PROMPT)
    assert decode.leg.state is DecodeLeg.QUEUED
    for part in pair.parts(prefill):
        pair.decode.scheduler.add_part(decode.key, part)
    pair.start(decode, result)
    assert pair.link.loads == {}
    for load_id in (1, 2, 3):
        for _ in range(40):
            pair.decode.scheduler.step()
        pair.link.deliver(load_id)
    pair.decode.run()
    assert blocker.leg.state is DecodeLeg.FINISHED
    assert_answer(pair, decode.key, result)
    pair.assert_nothing_held()


@pytest.mark.parametrize("in_doubt", [False, True])
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_part_that_fails_is_computed_here_once_the_first_token_is_known(failing: int, in_doubt: bool) -> None:
    pair = Pair(budget=18)
    prefill, result = prefilled_in_parts(pair)
    decode = pair.reserve(PROMPT)
    steps = [lambda part=part: pair.decode.scheduler.add_part(decode.key, part) for part in pair.parts(prefill)]
    for number, step in enumerate([*steps, lambda: pair.start(decode, result)], 1):
        step()
        failed = number >= failing
        assert len(pair.link.loads[number].tokens) == (0 if number > failing else [16, 20, 14][number - 1])
        pair.link.deliver(number, error="peer lost" if number == failing else None, in_doubt=in_doubt)
        assert (decode.cache is None) == failed
    pair.decode.run()
    assert_answer(pair, decode.key, result)
    assert sum(pair.decode.runner.steps) == len(PROMPT) + 7
    assert len(pair.link.quarantined) == in_doubt
    for hold in pair.link.quarantined:
        hold.release()
    pair.assert_nothing_held()


def test_a_part_that_fails_ends_the_request_when_told_so() -> None:
    pair = Pair(budget=18, recompute=False)
    prefill, _ = prefilled_in_parts(pair)
    decode = pair.reserve(PROMPT)
    pair.decode.scheduler.add_part(decode.key, pair.parts(prefill)[0])
    pair.link.deliver(1, error="peer lost")
    error = pair.decode.error(decode.key)
    assert isinstance(error, TransferError)
    assert "peer lost" in error.message
    pair.decode.scheduler.add_part(decode.key, pair.parts(prefill)[1])  # too late
    assert len(pair.link.loads) == 1
    pair.prefill.abandon("r")
    pair.assert_nothing_held()


def test_a_void_part_is_not_loaded() -> None:
    pair = Pair(recompute=False)
    decode = pair.reserve(PROMPT)
    pair.decode.scheduler.add_part(decode.key, HandOffPart(b"forged", 8))
    assert isinstance(pair.decode.error(decode.key), TransferError)
    pair.assert_nothing_held()


@pytest.mark.parametrize("loading", [False, True])
def test_cancel_between_parts_and_while_one_is_loading(loading: bool) -> None:
    pair = Pair(budget=18)
    prefill, _ = prefilled_in_parts(pair)
    decode = pair.reserve(PROMPT)
    pair.decode.scheduler.add_part(decode.key, pair.parts(prefill)[0])
    if not loading:
        pair.link.deliver(1)
    free = pair.decode_manager.counts().free
    pair.decode.scheduler.cancel(decode.key)
    assert isinstance(pair.decode.error(decode.key), RequestCancelledError)
    if loading:
        assert pair.link.loads[1].cancelled
        assert pair.decode_manager.counts().free == free  # still being written to
        pair.link.deliver(1, error="cancelled")
    pair.decode.scheduler.add_part(decode.key, pair.parts(prefill)[1])
    pair.prefill.abandon("r")
    assert pair.decode.scheduler.counts() == {"cancelled": 1}
    assert pair.prefill.counts() == {"held": 0, "released": 1}
    pair.assert_nothing_held()


def test_cancel_before_there_is_room() -> None:
    pair = Pair(blocks=16)
    pair.decode.add([1] * 40, count=20)
    pair.decode.scheduler.step()
    decode = pair.reserve(PROMPT)
    pair.decode.scheduler.cancel(decode.key)
    assert isinstance(pair.decode.error(decode.key), RequestCancelledError)
    pair.decode.run()
    pair.assert_nothing_held()


class TestPrefill:
    def test_parts_of_a_window_end_where_the_step_did(self) -> None:
        layout = replace(LAYOUT, kind=GroupKind.WINDOW, window=100)
        settings = EngineSettings(tokens_per_block=BLOCK, step_token_budget=18)
        manager = create_manager("V2", (layout,), 64 * layout.slot_nbytes)
        events: list[object] = []
        runner: Any = EchoRunner(settings, layouts=(layout,))
        link = Link(manager, manager)
        scheduler = PrefillScheduler(runner, manager, lambda _, event: events.append(event), link)
        request = WorkerRequest("r", tuple(PROMPT), SamplingParams(max_tokens=2, temperature=0.0))
        leg = Lifecycle(PrefillLeg.QUEUED, PREFILL_TRANSITIONS)
        scheduler.add_in_parts(Sequence(request, leg, runner.limits, None))
        while scheduler.step():
            pass
        assert [event.stop for event in events if isinstance(event, HandOffPart)] == [18, 36]

    def test_cancel_in_the_middle_withdraws_the_parts(self) -> None:
        pair = Pair(budget=18)
        sequence = pair.add_prefill(PROMPT, in_parts=True)
        pair.prefill.step()
        assert pair.prefill_manager.counts().pinned == 5
        pair.prefill.cancel(sequence.key)
        pair.assert_nothing_held()

    def test_ended_at_the_first_token_withdraws_the_parts(self) -> None:
        pair = Pair(budget=18)
        sequence = pair.add_prefill(PROMPT, count=1, in_parts=True)
        while pair.prefill.step():
            pass
        assert [part.stop for part in pair.parts(sequence)] == STOPS
        assert pair.events[sequence.key][-1].handle == b""
        pair.assert_nothing_held()

    def test_states_are_handed_off_whole(self) -> None:
        pair = Pair(states=True, budget=18)
        sequence, result = prefilled_in_parts(pair)
        assert pair.parts(sequence) == []
        assert result.handle

    def test_a_prompt_of_one_step_has_no_parts(self) -> None:
        pair = Pair()
        sequence, result = prefilled_in_parts(pair)
        assert pair.parts(sequence) == []
        assert result.handle

    def test_a_part_that_cannot_be_advertised_fails_the_request(self) -> None:
        pair = Pair(budget=18)

        def closed(*_: object) -> bytes:
            raise TransferError("the transceiver is closed")

        pair.link.advertise = closed  # type: ignore[method-assign]
        sequence = pair.add_prefill(PROMPT, in_parts=True)
        pair.prefill.step()
        assert isinstance(pair.events[sequence.key][-1], TransferError)
        pair.assert_nothing_held()
