"""Who runs with what, and why: architecture cards, declared capabilities, the rules, who can be paired. No torch."""

from kvferry.resolution.architectures import CARDS, card_named, example_config, find_card, original_architecture
from kvferry.resolution.backend import EffectiveBackend, effective_backend
from kvferry.resolution.buildable import (
    BuildGap,
    build_gaps,
    check_buildable,
    probe_libraries,
    required_implementation,
)
from kvferry.resolution.capabilities import ManagerCapability, RuntimeCapability, TransceiverCapability
from kvferry.resolution.card import Card, CardFacts
from kvferry.resolution.catalog import ENTRY_POINT_GROUP, Catalog, default_catalog
from kvferry.resolution.checkpoint import KNOWN_MODELS, KnownModel, read_config
from kvferry.resolution.connectors import CONNECTOR_ENTRY_POINT_GROUP, connector_registry, default_connectors
from kvferry.resolution.defaults import merge_defaults
from kvferry.resolution.errors import ResolutionError
from kvferry.resolution.pairing import PairFacts, can_pair, islands
from kvferry.resolution.report import failed_resolution_dict, resolution_dict, worker_info_labels
from kvferry.resolution.request import ResolveRequest
from kvferry.resolution.resolver import prefix_reuse_enabled, resolve

__all__ = [
    "CARDS",
    "CONNECTOR_ENTRY_POINT_GROUP",
    "ENTRY_POINT_GROUP",
    "KNOWN_MODELS",
    "BuildGap",
    "Card",
    "CardFacts",
    "Catalog",
    "EffectiveBackend",
    "KnownModel",
    "ManagerCapability",
    "PairFacts",
    "ResolutionError",
    "ResolveRequest",
    "RuntimeCapability",
    "TransceiverCapability",
    "build_gaps",
    "can_pair",
    "card_named",
    "check_buildable",
    "connector_registry",
    "default_catalog",
    "default_connectors",
    "effective_backend",
    "example_config",
    "failed_resolution_dict",
    "find_card",
    "islands",
    "merge_defaults",
    "original_architecture",
    "prefix_reuse_enabled",
    "probe_libraries",
    "read_config",
    "required_implementation",
    "resolution_dict",
    "resolve",
    "worker_info_labels",
]
