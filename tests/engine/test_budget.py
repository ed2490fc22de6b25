"""Planning a step: pure values."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.budget import MIN_CHUNK_TOKENS, StepBudget, plan_chunks


@dataclass
class Item:
    uncomputed: int


def test_decoding_sequences_always_run() -> None:
    items = [Item(1000), Item(1), Item(300), Item(1)]
    assert plan_chunks(items, 100) == [98, 1, 0, 1]


def test_prompts_share_first_come_first_served() -> None:
    assert plan_chunks([Item(40), Item(40), Item(40)], 100) == [40, 40, 20]


def test_a_prompt_progresses_even_when_streams_fill_the_budget() -> None:
    assert plan_chunks([Item(1)] * 64 + [Item(500)], 32) == [1] * 64 + [MIN_CHUNK_TOKENS]


@given(st.lists(st.integers(1, 3000), max_size=40), st.integers(1, 2000))
def test_a_plan_never_overshoots_and_never_starves(lengths: list[int], budget: int) -> None:
    plan = plan_chunks([Item(length) for length in lengths], budget)
    assert all(0 <= chunk <= length for chunk, length in zip(plan, lengths, strict=True))
    decoding = sum(length == 1 for length in lengths)
    assert sum(plan) <= max(budget, decoding + MIN_CHUNK_TOKENS)
    assert all(chunk == 1 for chunk, length in zip(plan, lengths, strict=True) if length == 1)
    assert not lengths or sum(plan) > 0


def test_a_chunk_is_no_longer_than_it_may_be_and_what_it_leaves_goes_to_the_next() -> None:
    assert plan_chunks([Item(40), Item(1), Item(40), Item(40)], 64, [16, 3, 24, 24]) == [16, 1, 24, 23]


def test_the_budget_follows_a_slow_machine_down_at_once() -> None:
    budget = StepBudget(512, 250.0)
    budget.observe(64, 1.0)  # 15.6 ms per token: 12.8 affordable, the least is taken
    assert budget.tokens == MIN_CHUNK_TOKENS


def test_the_budget_grows_to_what_the_limit_affords() -> None:
    budget = StepBudget(512, 250.0)
    for _ in range(30):
        budget.observe(budget.tokens, budget.tokens * 0.001)  # 1 ms per token: 200 fit into .8 of 250 ms
    assert 180 <= budget.tokens <= 200


def test_the_budget_keeps_its_upper_bound() -> None:
    budget = StepBudget(128, 250.0)
    for _ in range(30):
        budget.observe(budget.tokens, 1e-6)
    assert budget.tokens == 128


def test_a_decode_step_says_nothing_about_prompts() -> None:
    budget = StepBudget(512, 250.0)
    before = budget.tokens
    budget.observe(4, 0.2)
    assert budget.tokens == before


def steady(tokens_per_s: float = 1000.0) -> StepBudget:
    budget = StepBudget(512, 250.0)
    for _ in range(30):
        budget.observe(budget.tokens, budget.tokens / tokens_per_s)
    return budget


def test_a_step_that_was_held_up_once_or_twice_changes_nothing() -> None:
    budget = steady()
    before = budget.tokens
    for _ in range(2):
        budget.observe(before, 4 * before * 0.001)
    assert budget.tokens == before


def test_a_machine_that_stays_slow_is_followed() -> None:
    budget = steady()
    for _ in range(3):
        budget.observe(budget.tokens, budget.tokens * 0.004)
    assert budget.tokens == 50  # at 4 ms per token


def test_the_rest_of_a_prompt_says_nothing_about_whole_chunks() -> None:
    budget = steady()
    before = budget.tokens
    for _ in range(9):
        budget.observe(20, 0.060)
    assert budget.tokens == before


def test_a_short_chunk_that_takes_too_long_counts() -> None:
    budget = steady()
    for _ in range(3):
        budget.observe(20, 0.400)
    assert budget.tokens == MIN_CHUNK_TOKENS


def test_where_steps_are_long_without_prompts_too_a_chunk_may_take_twice_as_long() -> None:
    budget = StepBudget(512, 250.0)
    for _ in range(30):
        budget.observe(4, 0.5)
        budget.observe(budget.tokens, budget.tokens * 0.008)
    assert 95 <= budget.tokens <= 100  # .8 of 1 s; .8 of 250 ms would be 25
