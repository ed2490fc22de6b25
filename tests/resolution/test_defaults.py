from typing import Any

import pytest

from kvferry.resolution import Card, ResolutionError, merge_defaults
from kvferry.resolution.architectures import make_registry
from kvferry.resolution.card import compose

BASE = {"engine": {"max_batch": 64, "threads": 2}, "kv_cache": {"bytes": 1 << 30}, "model": "smollm2"}


def test_base_under_card_under_user_merged_deep() -> None:
    card = Card("A", defaults={"engine": {"max_batch": 16, "step_token_budget": 256}})
    merged = merge_defaults(BASE, card, {"engine": {"step_token_budget": 128}})
    assert merged == {
        "engine": {"max_batch": 16, "threads": 2, "step_token_budget": 128},
        "kv_cache": {"bytes": 1 << 30},
        "model": "smollm2",
    }


def test_nothing_given_is_changed_or_shared() -> None:
    base = {"engine": {"stop": [1]}}
    user: dict[str, Any] = {"kv_cache": {"bytes": 1}}
    merged = merge_defaults(base, Card("A"), user)
    merged["engine"]["stop"].append(2)
    merged["kv_cache"]["bytes"] = 2
    assert base == {"engine": {"stop": [1]}}
    assert user == {"kv_cache": {"bytes": 1}}


def test_an_explicit_null_or_list_replaces_whole() -> None:
    card = Card("A", defaults={"engine": {"threads": 4, "stop": [1, 2]}})
    merged = merge_defaults(BASE, card, {"engine": {"threads": None, "stop": [3]}})
    assert merged["engine"] == {"max_batch": 64, "threads": None, "stop": [3]}


def test_defaults_may_be_a_function_of_the_config() -> None:
    card = Card("A", defaults=lambda config: {"engine": {"max_batch": config["layers"]}})
    assert merge_defaults(BASE, card, {}, {"layers": 3})["engine"]["max_batch"] == 3


def test_a_wrappers_defaults_lie_over_its_backbones() -> None:
    cards = make_registry(
        [
            Card("Text", defaults=lambda config: {"engine": {"max_batch": 8, "threads": config["cores"]}}),
            Card("Vision", backbone="Text", defaults={"engine": {"max_batch": 4}}),
        ]
    )
    merged = merge_defaults({}, compose(cards.get("Vision"), cards), {}, {"cores": 2})
    assert merged == {"engine": {"max_batch": 4, "threads": 2}}


@pytest.mark.parametrize(
    ("defaults", "named"),
    [
        ({"transceiver": {"runtime": "PYTHON"}}, "transceiver"),
        ({"transceiver": None}, "transceiver"),
        ({"transceiver.backend": "UCX"}, "transceiver.backend"),
        ({"kv_cache": {"bytes": 1, "manager": "V2"}}, "kv_cache.manager"),
        (lambda config: {"transceiver": {"backend": "UCX"}}, "transceiver"),
    ],
)
def test_a_default_may_not_choose_the_pair(defaults: Any, named: str) -> None:
    with pytest.raises(ResolutionError, match=f"card A: defaults may not set {named}") as raised:
        merge_defaults(BASE, Card("A", defaults=defaults), {})
    assert raised.value.field == "A.defaults"


def test_a_backbone_may_not_choose_the_pair_for_its_wrapper() -> None:
    cards = make_registry([Card("Text", defaults={"transceiver": {}}), Card("Vision", backbone="Text")])
    with pytest.raises(ResolutionError, match="card Vision"):
        merge_defaults(BASE, compose(cards.get("Vision"), cards), {})


def test_users_may() -> None:
    assert merge_defaults(BASE, Card("A"), {"transceiver": {"backend": "UCX"}})["transceiver"] == {"backend": "UCX"}
