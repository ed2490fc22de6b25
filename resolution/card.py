"""An architecture's card: what a model prefers, requires and brings along, before anyone asks whether it can be had."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kvferry.core import Registry
from kvferry.resolution.capabilities import MANAGERS, RUNTIMES
from kvferry.resolution.errors import ResolutionError

Config = Mapping[str, Any]
T = TypeVar("T")

NO_PREFERENCE = "none"
VALIDATED = "validated"
UNVALIDATED = "unvalidated"

Wish = str | Callable[[Config], str] | None
"""A value, ``"none"`` or a function of the config giving either. None: the card does not say (ask its backbone)."""

Fact = bool | Callable[[Config], bool] | None
"""The same for yes-or-no facts."""

Defaults = Mapping[str, Any] | Callable[[Config], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Card:
    """One architecture. A wrapper names its `backbone` and inherits whatever it leaves unset, defaults included;
    only what executes it (`implementation`) and the `example` config of ``--arch`` are always its own.

    prefix_reuse_opt_in: reuse is off unless asked for. recurrent_state: some layers keep a state instead of KV.
    defaults: settings the model brings, under the user's and over kvferry's own.
    """

    architecture: str
    prefers_runtime: Wish = None
    prefers_manager: Wish = None
    requires_manager: Wish = None
    disaggregation: str | None = None
    prefix_reuse_opt_in: bool | None = None
    recurrent_state: Fact = None
    defaults: Defaults = field(default_factory=dict)
    backbone: str | None = None
    implementation: str | None = None
    example: Config = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CardFacts:
    """A card evaluated for one config: every value checked and known."""

    architecture: str
    prefers_runtime: str | None
    prefers_manager: str | None
    requires_manager: str | None
    disaggregation: str
    prefix_reuse_opt_in: bool
    recurrent_state: bool


def compose(card: Card, cards: Registry[Card]) -> Card:
    """`card` with everything it leaves unset taken from its backbone, the backbone's backbone and so on."""
    seen = [card.architecture]
    composed = card
    name = card.backbone
    while name is not None:
        if name in seen:
            raise ResolutionError(
                f"card {card.architecture}: its backbones form a circle: {' -> '.join([*seen, name])}"
            )
        seen.append(name)
        backbone = cards.get(name)
        composed = _under(composed, backbone)
        name = backbone.backbone
    return composed


def _under(card: Card, backbone: Card) -> Card:
    inherited = {
        name: getattr(backbone, name)
        for name in (
            "prefers_runtime",
            "prefers_manager",
            "requires_manager",
            "disaggregation",
            "prefix_reuse_opt_in",
            "recurrent_state",
        )
        if getattr(card, name) is None
    }
    return replace(card, defaults=_stacked(backbone.defaults, card.defaults), **inherited)


def _stacked(lower: Defaults, upper: Defaults) -> Defaults:
    if not callable(lower) and not callable(upper):
        return merged(lower, upper)

    def stacked(config: Config) -> Mapping[str, Any]:
        return merged(*(layer(config) if callable(layer) else layer for layer in (lower, upper)))

    return stacked


def merged(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """A new mapping: `upper` over `lower`, mappings merged key by key, everything else replaced whole."""
    result: dict[str, Any] = deepcopy(dict(lower))
    for key, value in upper.items():
        below = result.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            result[key] = merged(below, value)
        else:
            result[key] = deepcopy(dict(value) if isinstance(value, Mapping) else value)
    return result


def evaluate(card: Card, config: Config) -> CardFacts:
    """Facts of a composed card. Raises ResolutionError naming the card when a value is unknown."""
    disaggregation = card.disaggregation or VALIDATED
    if disaggregation not in (VALIDATED, UNVALIDATED):
        raise _unknown(card, "disaggregation", disaggregation, (VALIDATED, UNVALIDATED))
    return CardFacts(
        architecture=card.architecture,
        prefers_runtime=_wish(card, "prefers_runtime", config, RUNTIMES),
        prefers_manager=_wish(card, "prefers_manager", config, MANAGERS),
        requires_manager=_wish(card, "requires_manager", config, MANAGERS),
        disaggregation=disaggregation,
        prefix_reuse_opt_in=bool(card.prefix_reuse_opt_in),
        recurrent_state=bool(value_for(card, "recurrent_state", card.recurrent_state, config)),
    )


def _wish(card: Card, name: str, config: Config, choices: tuple[str, ...]) -> str | None:
    value = value_for(card, name, getattr(card, name), config)
    if value is None or value == NO_PREFERENCE:
        return None
    if value not in choices:
        raise _unknown(card, name, value, choices)
    return str(value)


def value_for(card: Card, name: str, value: T | Callable[[Config], T], config: Config) -> T:
    if not callable(value):
        return value
    try:
        return value(config)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ResolutionError(
            f"card {card.architecture}: {name} cannot be told from this config.json: {type(error).__name__}: {error}",
            field=f"{card.architecture}.{name}",
        ) from error


def _unknown(card: Card, name: str, value: object, choices: tuple[str, ...]) -> ResolutionError:
    known = ", ".join((*choices, NO_PREFERENCE) if name != "disaggregation" else choices)
    return ResolutionError(
        f"card {card.architecture}: {name} is {value!r}; known: {known}", field=f"{card.architecture}.{name}"
    )
