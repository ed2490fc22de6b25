"""Hand-offs of a model with recurrent states: one state goes along, whatever decode holds of the prompt already."""

from __future__ import annotations

import pytest
from echo_engine import BLOCK, LAYOUT, STATE, expected_output
from echo_link import Pair

from kvferry.core import DecodeLeg

VERSIONS = pytest.mark.parametrize("version", ["V1", "V2"])


def answer(pair: Pair, prompt: list[int], count: int = 8) -> tuple[list[int], int]:
    """The tokens both workers gave together, and the bytes that went from one to the other."""
    result = pair.prefilled(prompt, count)
    sequence = pair.add_decode(prompt, result, count)
    pair.link.deliver(len(pair.link.loads))
    pair.decode.run()
    pair.assert_nothing_held()
    return [
        result.aux.first_token_id,
        *pair.decode.output(sequence.key),
    ], pair.events[sequence.key][-1].transferred_bytes


@VERSIONS
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1])
def test_decode_goes_on_from_the_loaded_state(version: str, length: int) -> None:
    pair = Pair(prefill_version=version, decode_version=version, states=True)
    prompt = list(range(10, 10 + length))
    tokens, nbytes = answer(pair, prompt)
    assert tokens == expected_output(prompt, 8)
    assert nbytes == length * LAYOUT.token_nbytes + STATE.slot_nbytes
    assert pair.decode.runner.steps == [1] * 7


def test_decode_keeps_the_state_that_a_prompt_of_whole_blocks_ends_with() -> None:
    pair = Pair(states=True, snapshot_tokens=100)
    prompt = [3] * (3 * BLOCK)
    assert answer(pair, prompt)[1] == 3 * BLOCK * LAYOUT.token_nbytes + STATE.slot_nbytes
    tokens, nbytes = answer(pair, prompt)
    assert tokens == expected_output(prompt, 8)
    assert nbytes == 0


def test_the_next_turn_moves_what_follows_decodes_last_block_and_one_state() -> None:
    """Whose state comes with the rest, so that it does not matter where decode took snapshots."""
    pair = Pair(states=True, snapshot_tokens=8)
    prompt = [3] * 10
    first, _ = answer(pair, prompt, count=12)
    turn = [*prompt, *first, 4, 4, 4]  # decode computed up to 21: its last snapshot was at 16
    tokens, nbytes = answer(pair, turn)
    assert tokens == expected_output(turn, 8)
    assert nbytes == (len(turn) - 20) * LAYOUT.token_nbytes + STATE.slot_nbytes


@VERSIONS
@pytest.mark.parametrize("in_doubt", [False, True])
def test_a_failed_load_is_computed_here_from_a_state_of_zeros(version: str, in_doubt: bool) -> None:
    pair = Pair(prefill_version=version, decode_version=version, states=True)
    prompt = list(range(10, 20))
    result = pair.prefilled(prompt)
    sequence = pair.add_decode(prompt, result)
    pair.decode.manager.pools[1].view[:] = 99.0  # what a load that failed half way may leave behind
    pair.link.deliver(1, error="cut off", in_doubt=in_doubt)
    if in_doubt:
        (hold,) = pair.link.quarantined
        assert len(hold.tables[1].block_ids) == 1, "its state may still be written to"
        assert pair.decode_manager.counts().quarantined == len(hold.tables[0].block_ids) + 1
    pair.decode.run()
    assert [result.aux.first_token_id, *pair.decode.output(sequence.key)] == expected_output(prompt, 8)
    for hold in pair.link.quarantined:
        hold.release()
    pair.assert_nothing_held()


@VERSIONS
def test_a_held_state_is_not_reused_before_it_was_read(version: str) -> None:
    pair = Pair(blocks=32, prefill_version=version, decode_version=version, states=True)  # two states on either side
    prompts = [[p] * 6 for p in (1, 2)]
    results = [pair.prefilled(prompt) for prompt in prompts]
    waiting = pair.add_prefill([5] * 6)
    pair.prefill.step()
    assert waiting.cache is None, "both states are pinned"
    for number, (prompt, result) in enumerate(zip(prompts, results, strict=True), start=1):
        sequence = pair.add_decode(prompt, result)
        assert sequence.leg.state is DecodeLeg.LOADING
        pair.link.deliver(number)
        pair.decode.run()
        assert [result.aux.first_token_id, *pair.decode.output(sequence.key)] == expected_output(prompt, 8)
    assert pair.prefill.step()
    assert waiting.cache is not None or pair.events[waiting.key]
