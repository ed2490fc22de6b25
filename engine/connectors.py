"""Opens the external KV connector that a worker was told to use."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import import_module

from kvferry.core import ConfigError, KVLayout
from kvferry.kvcache import ConnectorParts, KVConnector
from kvferry.resolution import default_connectors

_SETTING = "kv_cache.connector"


def open_connector(
    name: str, address: str, layouts: Sequence[KVLayout], model_fingerprint: str, precision: str
) -> KVConnector:
    """The connector `name`, for blocks of these layouts and this model; close it after the manager. precision: in which
    blocks are computed. Raises ConfigError for an unknown name, a builder that cannot be loaded, or a bad address."""
    path = default_connectors().get(name)
    module, _, attribute = path.partition(":")
    try:
        build = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"KV connector {name}: {path} cannot be imported: {error}", field=_SETTING) from error
    connector = build(
        ConnectorParts(
            address=address,
            namespace=block_namespace(layouts, model_fingerprint, precision),
            block_nbytes=sum(layout.slot_nbytes for layout in layouts),
        )
    )
    if not isinstance(connector, KVConnector):
        raise ConfigError(
            f"KV connector {name}: {path} must build a KVConnector, not {type(connector).__name__}", field=_SETTING
        )
    return connector


def block_namespace(layouts: Sequence[KVLayout], model_fingerprint: str, precision: str) -> str:
    """Equal exactly where equal digests mean equal bytes: same weights, same precision, same layouts in order."""
    parts = [model_fingerprint, precision, *(layout.fingerprint() for layout in layouts)]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:32]
