"""A prefill and a decode scheduler and the KV between them, with every way a load can end."""

from __future__ import annotations

import pytest
from echo_engine import BLOCK, LAYOUT, expected_output
from echo_link import Pair

from kvferry.core import (
    DecodeLeg,
    FinishReason,
    PrefillLeg,
    RequestCancelledError,
    SamplingParams,
    TransferError,
    UnavailableError,
)


@pytest.mark.parametrize("versions", [("V2", "V2"), ("V1", "V1")])
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1])
def test_decode_goes_on_from_loaded_kv(versions: tuple[str, str], length: int) -> None:
    pair = Pair(prefill_version=versions[0], decode_version=versions[1])
    prompt = list(range(10, 10 + length))
    result = pair.prefilled(prompt)
    assert pair.prefill.counts()["held"] == 1
    sequence = pair.add_decode(prompt, result)
    assert sequence.leg.state is DecodeLeg.LOADING
    pair.link.deliver(1)
    pair.decode.run()
    assert [result.aux.first_token_id, *pair.decode.output(sequence.key)] == expected_output(prompt, 8)
    assert pair.decode.runner.steps == [1] * 7  # nothing of the prompt was computed here
    assert pair.events[sequence.key][-1].transferred_bytes == length * LAYOUT.token_nbytes
    pair.assert_nothing_held()


def test_only_what_decode_lacks_is_loaded() -> None:
    pair = Pair()
    prompt = [3] * 10
    first = pair.add_decode(prompt, pair.prefilled(prompt))
    pair.link.deliver(1)
    pair.decode.run()
    longer = prompt + [4] * 6
    result = pair.prefilled(longer)
    assert result.aux.usage.cached_tokens == 8
    second = pair.add_decode(longer, result)
    assert pair.link.loads[2].tokens.start == 8
    pair.link.deliver(2)
    pair.decode.run()
    assert [result.aux.first_token_id, *pair.decode.output(second.key)] == expected_output(longer, 8)
    assert pair.decode.finish(first.key) is FinishReason.LENGTH
    pair.assert_nothing_held()


def test_a_full_hit_loads_nothing_and_still_releases_prefill() -> None:
    pair = Pair()
    prompt = [3] * (2 * BLOCK)
    for load_id in (1, 2):
        result = pair.prefilled(prompt)
        sequence = pair.add_decode(prompt, result)
        assert len(pair.link.loads[load_id].tokens) == (2 * BLOCK if load_id == 1 else 0)
        pair.link.deliver(load_id)
        pair.decode.run()
        assert [result.aux.first_token_id, *pair.decode.output(sequence.key)] == expected_output(prompt, 8)
    pair.assert_nothing_held()


def test_ended_at_the_first_token_means_no_transfer() -> None:
    pair = Pair()
    result = pair.prefilled([1, 2, 3], count=1)
    assert (result.finish_reason, result.handle) == (FinishReason.LENGTH, b"")
    first = expected_output([1, 2, 3], 1)[0]
    result = pair.prefilled([1, 2, 3], sampling=SamplingParams(max_tokens=9, temperature=0, stop_token_ids=(first,)))
    assert (result.finish_reason, result.handle) == (FinishReason.STOP, b"")
    pair.assert_nothing_held()


def test_a_failed_load_is_computed_here() -> None:
    pair = Pair()
    prompt = [8] * 11
    result = pair.prefilled(prompt)
    sequence = pair.add_decode(prompt, result)
    pair.link.deliver(1, error="peer lost")
    pair.decode.run()
    assert [result.aux.first_token_id, *pair.decode.output(sequence.key)] == expected_output(prompt, 8)
    assert pair.decode.runner.steps[0] == 12
    pair.assert_nothing_held()


def test_a_failed_load_fails_the_request_when_told_so() -> None:
    pair = Pair(recompute=False)
    sequence = pair.add_decode([8] * 11, pair.prefilled([8] * 11))
    pair.link.deliver(1, error="peer lost")
    error = pair.decode.error(sequence.key)
    assert isinstance(error, TransferError)
    assert "peer lost" in error.message
    pair.assert_nothing_held()


def test_a_void_handle_is_not_loaded() -> None:
    pair = Pair(recompute=False)
    result = pair.prefilled([8] * 11)
    sequence = pair.add_decode([9] * 11, result)  # another prompt under this handle
    assert isinstance(pair.decode.error(sequence.key), TransferError)
    assert pair.link.loads == {}


@pytest.mark.parametrize("in_doubt", [False, True])
def test_cancel_while_loading_keeps_the_pages_until_the_load_ends(in_doubt: bool) -> None:
    pair = Pair()
    sequence = pair.add_decode([8] * 11, pair.prefilled([8] * 11))
    before = pair.decode_manager.counts().free
    pair.decode.scheduler.cancel(sequence.key)
    assert isinstance(pair.decode.error(sequence.key), RequestCancelledError)
    assert pair.link.loads[1].cancelled
    assert pair.decode_manager.counts().free == before  # still being written to
    pair.link.deliver(1, error="cancelled", in_doubt=in_doubt)
    if in_doubt:
        assert pair.decode_manager.counts().quarantined == 3
        pair.link.quarantined[0].release()
    pair.assert_nothing_held()
    assert pair.decode.scheduler.counts() == {"cancelled": 1}


def test_a_load_in_doubt_is_computed_elsewhere_than_in_its_pages() -> None:
    pair = Pair()
    prompt = [8] * 11
    result = pair.prefilled(prompt)
    sequence = pair.add_decode(prompt, result)
    doubtful = set(pair.link.loads[1].tables[0].block_ids)
    pair.link.deliver(1, error="timed out", in_doubt=True)
    pair.decode.scheduler.step()
    assert sequence.cache is not None
    assert doubtful.isdisjoint(sequence.cache.block_table(0))
    pair.decode.run()
    assert [result.aux.first_token_id, *pair.decode.output(sequence.key)] == expected_output(prompt, 8)
    assert pair.decode_manager.counts().quarantined == 3
    pair.link.quarantined[0].release()
    pair.assert_nothing_held()


def test_loads_wait_for_room_and_all_finish() -> None:
    pair = Pair(blocks=16)
    prompts = [[p + 1] * 12 for p in range(3)]
    results = [pair.prefilled(prompt, count=20) for prompt in prompts]
    sequences = [pair.add_decode(p, r, count=20) for p, r in zip(prompts, results, strict=True)]
    done: set[int] = set()
    for _ in range(400):
        for load_id in pair.link.loads.keys() - done:
            pair.link.deliver(load_id)
            done.add(load_id)
        pair.decode.scheduler.step()
    for prompt, result, sequence in zip(prompts, results, sequences, strict=True):
        assert [result.aux.first_token_id, *pair.decode.output(sequence.key)] == expected_output(prompt, 20)
    pair.assert_nothing_held()


def test_cancel_in_the_middle_of_a_prompt_gives_prefill_back() -> None:
    pair = Pair(blocks=100)
    sequence = pair.add_prefill([2] * 200)
    pair.prefill.step()  # the first step computes 64 tokens
    assert sequence.leg.state is PrefillLeg.RUNNING
    pair.prefill.cancel(sequence.key)
    assert isinstance(pair.events[sequence.key][-1], RequestCancelledError)
    pair.assert_nothing_held()


def test_a_request_whose_answer_got_lost_is_given_up_in_every_state() -> None:
    pair = Pair(blocks=100)
    pair.prefilled([1] * 9)
    pair.add_prefill([2] * 200)
    pair.prefill.step()
    assert pair.prefill.counts() == {"running": 1, "held": 1}
    pair.prefill.abandon("another")
    assert pair.prefill.counts() == {"running": 1, "held": 1}
    pair.prefill.abandon("r")
    pair.prefill.abandon("r")
    assert pair.prefill.counts() == {"held": 0, "released": 1, "cancelled": 1}
    pair.assert_nothing_held()


def test_a_transceiver_that_cannot_advertise_fails_the_request_alone() -> None:
    pair = Pair()

    def closed(*_: object) -> bytes:
        raise TransferError("the transceiver is closed")

    pair.link.advertise = closed  # type: ignore[method-assign]
    sequence = pair.add_prefill([1] * 9)
    while pair.prefill.step():
        pass
    assert isinstance(pair.events[sequence.key][-1], TransferError)
    assert pair.prefill.counts() == {"failed": 1, "held": 0}
    pair.assert_nothing_held()


def test_a_spent_quarantine_refuses_hand_offs_until_it_is_quiet() -> None:
    pair = Pair(blocks=16, max_quarantined=0.2)
    doubtful = pair.add_decode([8] * 11, pair.prefilled([8] * 11))
    pair.link.deliver(1, error="timed out", in_doubt=True)
    pair.decode.run()
    assert pair.decode.finish(doubtful.key) is FinishReason.LENGTH
    assert pair.decode.scheduler.problem == ""  # 3 of 16 blocks
    another = pair.add_decode([9] * 11, pair.prefilled([9] * 11))
    pair.link.deliver(2, error="timed out", in_doubt=True)
    pair.decode.run()
    assert pair.decode.finish(another.key) is FinishReason.LENGTH
    assert "6 of 16 blocks are in quarantine" in pair.decode.scheduler.problem
    with pytest.raises(UnavailableError, match=r"transceiver\.max_quarantined"):
        pair.add_decode([7] * 11, pair.prefilled([7] * 11))
    for hold in pair.link.quarantined:
        hold.release()
    assert pair.decode.scheduler.problem == ""
    pair.add_decode([7] * 11, pair.prefilled([7] * 11))
    pair.link.deliver(3)
    pair.decode.run()
