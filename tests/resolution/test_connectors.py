"""External KV connectors by name."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from kvferry.core import ConfigError
from kvferry.resolution import CONNECTOR_ENTRY_POINT_GROUP, connector_registry

THEIRS = EntryPoint("lmcache", "kvferry_lmcache:build", CONNECTOR_ENTRY_POINT_GROUP)


def test_a_package_s_connector_stands_beside_the_built_in_one_unimported() -> None:
    registry = connector_registry([THEIRS])
    assert registry.names() == ["directory", "lmcache"]
    assert registry.get("lmcache") == "kvferry_lmcache:build"


def test_an_unknown_name_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match="known: directory") as caught:
        connector_registry().get("directry")
    assert caught.value.field == "kv_cache.connector"


def test_a_name_is_given_once() -> None:
    with pytest.raises(ConfigError, match="registered twice"):
        connector_registry([THEIRS, THEIRS])
