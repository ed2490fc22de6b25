"""The decisions of a beam search, against searches that look at everything."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from kvferry.core import FinishReason, InvalidRequestError
from kvferry.engine.beams import BeamGroup, BeamParams, Continuation

VOCAB, STOP = 4, 3


def distributions(seed: int) -> list[list[float]]:
    """log P(next | last) of a small Markov chain, one row per last token."""
    rng = random.Random(seed)
    rows = [[rng.random() + 0.05 for _ in range(VOCAB)] for _ in range(VOCAB)]
    return [[math.log(weight / sum(row)) for weight in row] for row in rows]


def search(params: BeamParams, table: list[list[float]]) -> BeamGroup:
    group = BeamGroup(params)
    while not group.done:
        every = [
            Continuation(parent, token, beam.logprob + table[beam.token_ids[-1] if beam.token_ids else 0][token])
            for parent, beam in enumerate(group.running)
            for token in range(VOCAB)
        ]
        every.sort(key=lambda continuation: -continuation.logprob)
        group.extend(every[: params.candidates])
    return group


def every_sequence(length: int, table: list[list[float]], penalty: float) -> list[tuple[float, tuple[int, ...]]]:
    """All that end with STOP or have `length` tokens, best score first."""
    found = {}
    for tokens in itertools.product(range(VOCAB), repeat=length):
        cut = tokens.index(STOP) + 1 if STOP in tokens else length
        sequence = tokens[:cut]
        logprob = sum(table[before][token] for before, token in zip((0, *sequence), sequence, strict=False))
        found[sequence] = logprob / cut**penalty
    return sorted(((score, sequence) for sequence, score in found.items()), reverse=True)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_beam_wide_enough_for_everything_finds_the_best_there_is(seed: int, penalty: float) -> None:
    table = distributions(seed)
    params = BeamParams(64, 3, penalty, stop_token_ids=frozenset({STOP}))
    group = search(params, table)
    best = every_sequence(3, table, penalty)
    assert {beam.token_ids for beam in group.finished} == {sequence for _, sequence in best}
    assert [beam.score for beam in group.finished] == pytest.approx([score for score, _ in best])


def test_a_beam_of_one_is_greedy() -> None:
    table = distributions(1)
    group = search(BeamParams(1, 6), table)
    greedy = [0]
    for _ in range(6):
        greedy.append(max(range(VOCAB), key=lambda token: table[greedy[-1]][token]))
    assert list(group.finished[0].token_ids) == greedy[1:]
    assert group.finished[0].finish_reason is FinishReason.LENGTH


def extend(group: BeamGroup, *given: tuple[int, int, float]) -> Sequence[Continuation]:
    return group.extend([Continuation(*each) for each in given])


def test_survivors_name_their_parents_best_first() -> None:
    group = BeamGroup(BeamParams(2, 10))
    assert extend(group, (0, 5, -1.0), (0, 6, -2.0), (0, 7, -3.0)) == [
        Continuation(0, 5, -1.0),
        Continuation(0, 6, -2.0),
    ]
    kept = extend(group, (1, 8, -2.5), (1, 9, -2.6), (0, 5, -4.0))
    assert [continuation.parent for continuation in kept] == [1, 1]
    assert [beam.token_ids for beam in group.running] == [(6, 8), (6, 9)]


def test_only_the_best_may_finish_and_others_take_their_place() -> None:
    group = BeamGroup(BeamParams(2, 10, stop_token_ids=frozenset({STOP})))
    extend(group, (0, STOP, -1.0), (0, 1, -2.0), (0, STOP, -2.5), (0, 2, -3.0))
    assert [(beam.token_ids, beam.score) for beam in group.finished] == [((STOP,), -1.0)]
    assert [beam.token_ids for beam in group.running] == [(1,), (2,)]
    assert not group.done


def test_it_ends_when_no_running_beam_can_do_better() -> None:
    group = BeamGroup(BeamParams(1, 10, length_penalty=0.0, stop_token_ids=frozenset({STOP})))
    extend(group, (0, 1, -1.0), (0, STOP, -1.1))
    assert not group.done
    extend(group, (0, STOP, -1.2), (0, 1, -1.3))
    assert group.done
    assert group.finished[0].finish_reason is FinishReason.STOP


def test_early_stopping_ends_with_the_last_place_taken() -> None:
    ends = []
    for early in (False, True):
        group = BeamGroup(BeamParams(1, 10, 2.0, early, frozenset({STOP})))
        extend(group, (0, STOP, -1.0), (0, 1, -0.9))
        ends.append(group.done)
    assert ends == [False, True]


@pytest.mark.parametrize("penalty", [-1.0, 2.0])
def test_the_length_penalty_divides(penalty: float) -> None:
    group = search(BeamParams(1, 4, penalty), distributions(2))
    assert group.finished[0].score == pytest.approx(group.finished[0].logprob / 4**penalty)


@pytest.mark.parametrize(
    ("values", "field"),
    [((0, 1), "beam_width"), ((65, 1), "beam_width"), ((2, 0), "max_tokens"), ((2, 1, math.inf), "length_penalty")],
)
def test_parameters_are_checked(values: tuple[int, int], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        BeamParams(*values)
    assert caught.value.field == field


def test_more_stop_tokens_need_more_candidates() -> None:
    assert [BeamParams(4, 1, stop_token_ids=frozenset(range(n))).candidates for n in range(4)] == [8, 8, 12, 16]
