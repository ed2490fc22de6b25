"""Settings a model brings along, merged under the user's and over kvferry's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.resolution.card import Card, Config, merged, value_for
from kvferry.resolution.errors import ResolutionError
from kvferry.resolution.request import MANAGER_SETTING

_FORBIDDEN = {"transceiver": "prefers_runtime", MANAGER_SETTING: "prefers_manager"}


def card_defaults(card: Card, config: Config) -> Mapping[str, Any]:
    """The card's default settings. Raises ResolutionError when they choose a transceiver or a manager: a preference
    passes through the rules' checks, a default would go round them."""
    defaults = value_for(card, "defaults", card.defaults, config)
    for path in _paths(defaults):
        for forbidden, instead in _FORBIDDEN.items():
            if path == forbidden or path.startswith(forbidden + "."):
                raise ResolutionError(
                    f"card {card.architecture}: defaults may not set {path} (use {instead})",
                    field=f"{card.architecture}.defaults",
                )
    return defaults


def _paths(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Every key, dotted, sections themselves included."""
    paths: list[str] = []
    for key, value in settings.items():
        path = f"{prefix}{key}"
        paths.append(path)
        if isinstance(value, Mapping):
            paths.extend(_paths(value, f"{path}."))
    return paths


def merge_defaults(
    base: Mapping[str, Any], card: Card, user: Mapping[str, Any], config: Config | None = None
) -> dict[str, Any]:
    """Settings in effect: kvferry's own < the card's < the user's, merged deep. `card` is a composed one."""
    return merged(merged(base, card_defaults(card, config or {})), user)
