from __future__ import annotations

import pytest

from kvferry.core import ConfigError
from kvferry.router.policies import POLICIES, RoutingQuery, WorkerLoad, least_loaded, round_robin


def _loads(*tokens: int) -> list[WorkerLoad]:
    return [WorkerLoad(f"w{index}", requests=count, tokens=count) for index, count in enumerate(tokens)]


def test_round_robin_takes_turns() -> None:
    loads = _loads(9, 0, 5)
    assert [round_robin(loads, RoutingQuery(turn, 1)).name for turn in range(5)] == ["w0", "w1", "w2", "w0", "w1"]


@pytest.mark.parametrize(("tokens", "expected"), [((3, 1, 2), "w1"), ((0, 1, 2), "w0"), ((5, 5, 4), "w2")])
def test_least_loaded_counts_tokens(tokens: tuple[int, ...], expected: str) -> None:
    assert {least_loaded(_loads(*tokens), RoutingQuery(turn, 1)).name for turn in range(4)} == {expected}


def test_least_loaded_spreads_over_equals() -> None:
    assert [least_loaded(_loads(2, 7, 2), RoutingQuery(turn, 1)).name for turn in range(4)] == ["w0", "w2"] * 2


def test_fewer_requests_decide_between_equal_tokens() -> None:
    loads = [WorkerLoad("a", requests=4, tokens=8), WorkerLoad("b", requests=1, tokens=8)]
    assert least_loaded(loads, RoutingQuery(0, 1)).name == "b"


def test_unknown_policy_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match="least_loaded, round_robin") as caught:
        POLICIES.get("random")
    assert "router.prefill_policy" in caught.value.field
