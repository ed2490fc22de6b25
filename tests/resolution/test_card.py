from typing import Any

import pytest

from kvferry.core import ConfigError
from kvferry.resolution import Card, Catalog, ResolutionError, ResolveRequest, resolve
from kvferry.resolution.architectures import make_registry
from kvferry.resolution.card import compose, evaluate
from kvferry.resolution.defaults import card_defaults


def facts_of(*cards: Card, config: dict[str, Any] | None = None) -> Any:
    return evaluate(compose(cards[0], make_registry(cards)), config or {})


def test_a_bare_card_says_nothing() -> None:
    facts = facts_of(Card("A"))
    assert (facts.prefers_runtime, facts.prefers_manager, facts.requires_manager) == (None, None, None)
    assert (facts.disaggregation, facts.prefix_reuse_opt_in, facts.recurrent_state) == ("validated", False, False)


def test_a_wrapper_inherits_everything_it_leaves_unset() -> None:
    backbone = Card(
        "Text",
        prefers_runtime="PYTHON",
        prefers_manager="V2",
        requires_manager="V2",
        disaggregation="unvalidated",
        prefix_reuse_opt_in=True,
        recurrent_state=True,
        implementation="module:Text",
        defaults={"engine": {"max_batch": 8}},
    )
    wrapper = compose(Card("Vision", backbone="Text"), make_registry([backbone]))
    facts = evaluate(wrapper, {})
    assert (facts.architecture, facts.prefers_runtime, facts.prefers_manager) == ("Vision", "PYTHON", "V2")
    assert (facts.requires_manager, facts.disaggregation) == ("V2", "unvalidated")
    assert facts.prefix_reuse_opt_in
    assert facts.recurrent_state
    assert card_defaults(wrapper, {}) == {"engine": {"max_batch": 8}}
    assert wrapper.implementation is None


def test_a_wrapper_keeps_what_it_sets_itself_and_can_opt_out() -> None:
    backbone = Card("Text", prefers_runtime="PYTHON", prefers_manager="V2", prefix_reuse_opt_in=True)
    wrapper = Card("Vision", backbone="Text", prefers_runtime="CPP", prefers_manager="none", prefix_reuse_opt_in=False)
    facts = facts_of(wrapper, backbone)
    assert (facts.prefers_runtime, facts.prefers_manager, facts.prefix_reuse_opt_in) == ("CPP", None, False)


def test_a_wrapper_of_a_wrapper() -> None:
    cards = (
        Card("Omni", backbone="Vision"),
        Card("Vision", backbone="Text", prefers_runtime="CPP"),
        Card("Text", prefers_runtime="PYTHON", prefers_manager="V2"),
    )
    facts = facts_of(*cards)
    assert (facts.prefers_runtime, facts.prefers_manager) == ("CPP", "V2")


def test_a_circle_of_backbones_is_an_error() -> None:
    cards = [Card("A", backbone="B"), Card("B", backbone="A")]
    with pytest.raises(ResolutionError, match="A -> B -> A"):
        compose(cards[0], make_registry(cards))


def test_a_missing_backbone_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'Gone'"):
        facts_of(Card("A", backbone="Gone"))


@pytest.mark.parametrize(
    ("card", "field"),
    [
        (Card("Odd", prefers_runtime="RUST"), "prefers_runtime"),
        (Card("Odd", prefers_runtime="python"), "prefers_runtime"),
        (Card("Odd", prefers_manager="V3"), "prefers_manager"),
        (Card("Odd", requires_manager="PYTHON"), "requires_manager"),
        (Card("Odd", prefers_manager=lambda config: "V9"), "prefers_manager"),
        (Card("Odd", disaggregation="maybe"), "disaggregation"),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"runtime": "CPP", "manager": "V1"}, {"backend": "NONE"}])
def test_an_unknown_value_names_the_card_whatever_the_user_set(
    card: Card, field: str, settings: dict[str, Any]
) -> None:
    catalog = Catalog(cards=make_registry([card]))
    with pytest.raises(ResolutionError, match=f"card Odd: {field}") as raised:
        resolve(ResolveRequest("Odd", **settings), catalog)
    assert raised.value.field == f"Odd.{field}"


def test_a_value_may_be_a_function_of_the_config() -> None:
    card = Card("A", prefers_runtime=lambda config: "CPP" if config.get("legacy") else "PYTHON")
    assert facts_of(card, config={"legacy": True}).prefers_runtime == "CPP"
    assert facts_of(card).prefers_runtime == "PYTHON"


def test_an_inherited_function_is_given_the_outer_config() -> None:
    seen: list[Any] = []

    def wish(config: Any) -> str:
        seen.append(dict(config))
        return "V2"

    cards = (Card("Vision", backbone="Text"), Card("Text", prefers_manager=wish))
    outer = {"architectures": ["Vision"], "vision_config": {"depth": 2}}
    assert facts_of(*cards, config=outer).prefers_manager == "V2"
    assert seen == [outer]


def test_a_function_that_fails_names_the_card() -> None:
    card = Card("A", prefers_manager=lambda config: str(config["absent"]))
    with pytest.raises(ResolutionError, match="card A: prefers_manager cannot be told"):
        facts_of(card)
