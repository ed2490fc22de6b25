"""Choosing tokens: filters, penalties, random numbers, log probabilities."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from kvferry.core import SamplingParams
from kvferry.engine.sampler import RowRequest, _largest, sample, uniform


def one(logits: list[float], position: int = 5, **params: object) -> int:
    row = RowRequest(SamplingParams(**params), position)  # type: ignore[arg-type]
    return sample(torch.tensor([logits]), [row])[0].token_id


def frequencies(logits: list[float], draws: int = 4000, **params: object) -> list[float]:
    counts = Counter(one(logits, position, seed=11, **params) for position in range(draws))
    return [counts[token] / draws for token in range(len(logits))]


def test_uniform_is_a_pure_function_of_seed_and_position() -> None:
    # Worked out once; a change of these numbers changes every seeded answer.
    assert [uniform(7, position) for position in (0, 1)] == [uniform(7, 0), uniform(7, 1)]
    values = [uniform(seed, position) for seed in range(50) for position in range(50)]
    assert all(0.0 <= value < 1.0 for value in values)
    assert len(set(values)) == len(values)
    assert abs(sum(values) / len(values) - 0.5) < 0.02


def test_greedy_takes_the_largest() -> None:
    assert one([0.1, 3.0, 2.9], temperature=0.0) == 1


@pytest.mark.parametrize("vocab", [64 * 37, 64 * 37 + 5])
def test_greedy_takes_the_first_of_equals_wherever_they_lie(vocab: int) -> None:
    rows = [RowRequest(SamplingParams(temperature=0.0), 0)] * 5
    logits = torch.zeros(5, vocab)
    for row, places in enumerate(((0, vocab - 1), (63, 64), (130, 140), (vocab - 1, vocab - 2), ())):
        logits[row, list(places)] = 3.0
    logits[4] = float("-inf")
    assert [sampled.token_id for sampled in sample(logits, rows)] == [0, 63, 130, vocab - 2, 0]


def test_frequencies_follow_the_softmax() -> None:
    logits = [0.0, 1.0, 2.0]
    expected = torch.softmax(torch.tensor(logits), 0).tolist()
    assert frequencies(logits) == pytest.approx(expected, abs=0.03)


def test_temperature_sharpens() -> None:
    expected = torch.softmax(torch.tensor([0.0, 1.0, 2.0]) / 0.5, 0).tolist()
    assert frequencies([0.0, 1.0, 2.0], temperature=0.5) == pytest.approx(expected, abs=0.03)


def test_tiny_temperature_is_greedy_and_finite() -> None:
    assert one([5.0, 80.0, 79.0], temperature=1e-6, seed=3) == 1


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {3, 2}),
        ({"top_p": 0.6}, {3}),  # softmax: .64 .24 .09 .03
        ({"top_p": 0.7}, {3, 2}),
        ({"top_k": 3, "top_p": 0.7}, {3, 2}),  # of what top_k left: .66 .24 .09
        ({"min_p": 0.2}, {3, 2}),  # at least a fifth of .64
        ({"top_k": 1}, {3}),
    ],
)
def test_filters_keep_exactly_the_allowed(params: dict[str, float], allowed: set[int]) -> None:
    seen = {token for token, share in enumerate(frequencies([0.0, 1.0, 2.0, 3.0], 1500, **params)) if share > 0}
    assert seen == allowed


def test_top_p_over_a_nucleus_wider_than_the_sorted_candidates() -> None:
    vocab = 5000  # uniform: the nucleus of .9 is 4500 tokens
    row = [RowRequest(SamplingParams(top_p=0.9, seed=1), position) for position in range(300)]
    chosen = {sampled.token_id for sampled in sample(torch.zeros(300, vocab), row)}
    assert len(chosen) > 250
    assert max(chosen) > 1024


def test_a_batch_equals_its_rows_one_by_one() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=5),
        SamplingParams(seed=3, top_p=0.5),
        SamplingParams(seed=4, min_p=0.1),
        SamplingParams(seed=5, temperature=0.3, frequency_penalty=1.0),
    ]
    rows = [RowRequest(choice, 9, (1, 2), (3, 3, 4)) for choice in params]
    together = [sampled.token_id for sampled in sample(logits.clone(), rows)]
    alone = [sample(logits[i : i + 1].clone(), [row])[0].token_id for i, row in enumerate(rows)]
    assert together == alone


def test_penalties_follow_their_formulas() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    sampling = SamplingParams(
        temperature=0.0, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={3: 4.0}
    )
    sample(logits, [RowRequest(sampling, 3, prompt_ids=(0,), output_ids=(1, 1))])
    # 0: 2/2; 1: -2*2 - .5 - .25*2; 2: untouched; 3: biased
    assert logits[0].tolist() == pytest.approx([1.0, -5.0, 1.0, 4.5])


def test_suppressed_ids_are_never_chosen() -> None:
    row = RowRequest(SamplingParams(temperature=0.0), 1, suppressed=frozenset({0}))
    assert sample(torch.tensor([[9.0, 1.0, 2.0]]), [row])[0].token_id == 2


def test_logprobs_are_the_models_before_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    expected = torch.log_softmax(logits[0], 0).tolist()
    sampled = sample(logits.clone(), [RowRequest(SamplingParams(temperature=0.5, seed=1, logprobs=2), 1)])[0]
    assert sampled.logprob is not None
    assert sampled.logprob.logprob == pytest.approx(expected[sampled.token_id], abs=1e-6)
    assert [token for token, _ in sampled.logprob.top] == [2, 1]
    assert [value for _, value in sampled.logprob.top] == pytest.approx([expected[2], expected[1]], abs=1e-6)


def test_logprobs_zero_gives_only_the_chosen_one() -> None:
    sampled = sample(torch.tensor([[0.0, 1.0]]), [RowRequest(SamplingParams(temperature=0.0, logprobs=0), 1)])[0]
    assert sampled.logprob is not None
    assert sampled.logprob.top == ()
    assert sampled.logprob.logprob == pytest.approx(math.log(math.e / (1 + math.e)))


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).repeat(500, 1)
    rows = [RowRequest(SamplingParams(seed=4), position) for position in range(500)]
    assert {sampled.token_id for sampled in sample(logits, rows)} == {1, 3}


MIXTURE = [
    {"temperature": 0.0, "logprobs": 3},
    {"top_k": 7, "top_p": 0.8, "logprobs": 0},
    {"top_k": 300, "min_p": 0.01},
    {"top_p": 0.6},
    {"top_p": 0.999, "logprobs": 5},
    {"temperature": 1.7},
    {"temperature": 0.3, "min_p": 0.1},
]


def test_a_row_is_sampled_alike_in_any_batch() -> None:
    logits = torch.randn(len(MIXTURE) * 9, 64 * 40, generator=torch.Generator().manual_seed(5)) * 2
    rows = [RowRequest(SamplingParams(seed=n, **MIXTURE[n % len(MIXTURE)]), n) for n in range(len(logits))]  # type: ignore[arg-type]
    together = sample(logits.clone(), rows)
    for index, row in enumerate(rows):
        alone = sample(logits[index : index + 1].clone(), [row])[0]
        assert alone.token_id == together[index].token_id
        assert (alone.logprob is None) == (together[index].logprob is None)


@pytest.mark.parametrize("count", [1, 5, 10, 11, 200])
@pytest.mark.parametrize("vocab", [64 * 40, 64 * 40 + 1, 210])
def test_the_largest_in_two_steps(count: int, vocab: int) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(count))
    values, ids = _largest(logits, count)
    expected = logits.topk(count)
    assert torch.equal(values, expected.values)
    assert torch.equal(ids, expected.indices)


@pytest.mark.parametrize("params", [{}, {"top_k": 100}, {"top_p": 1 - 1e-9}])
def test_suppressed_tokens_at_the_end_are_never_hit(params: dict[str, object]) -> None:
    """Rounding puts a point near 1 past the end: then the last token that has a chance is taken."""
    for position in range(300):
        logits = torch.zeros(1, 130)
        row = RowRequest(SamplingParams(seed=3, **params), position, suppressed=frozenset(range(5, 130)))  # type: ignore[arg-type]
        assert sample(logits, [row])[0].token_id < 5
