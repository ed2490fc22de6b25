"""External KV connectors by name, kvferry's own and those of installed packages: lazy paths, nothing is imported."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from kvferry.core import Registry
from kvferry.resolution.request import CONNECTOR_SETTING

CONNECTOR_ENTRY_POINT_GROUP = "kvferry.kv_connectors"
"""Entry points of this group are named after a connector and give its ConnectorBuilder."""

_BUILTIN = {"directory": "kvferry.kvcache.directory_connector:DirectoryConnector"}


def connector_registry(third_party: Iterable[EntryPoint] = ()) -> Registry[str]:
    """Name -> lazy path of the builder, `module:attribute`. Raises ConfigError for a name that is taken."""
    registry: Registry[str] = Registry("KV connector", CONNECTOR_SETTING)
    for name, path in _BUILTIN.items():
        registry.register(name, path)
    for entry_point in third_party:
        registry.register(entry_point.name, entry_point.value)
    return registry


@cache
def default_connectors() -> Registry[str]:
    """The built-in ones and those of installed packages."""
    return connector_registry(entry_points(group=CONNECTOR_ENTRY_POINT_GROUP))
