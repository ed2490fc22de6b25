"""One request in, one resolution out, in the fixed order: card, backend, runtime, manager, prefix reuse, library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvferry.core import Resolution
from kvferry.resolution.architectures import card_named, find_card, original_architecture
from kvferry.resolution.backend import EffectiveBackend, effective_backend
from kvferry.resolution.capabilities import MANAGERS, RUNTIMES, TransceiverCapability
from kvferry.resolution.card import UNVALIDATED, CardFacts, Config, evaluate
from kvferry.resolution.catalog import Catalog, default_catalog
from kvferry.resolution.errors import ResolutionError
from kvferry.resolution.manager_rule import ManagerChoice, ManagerDecision, choose_manager
from kvferry.resolution.request import (
    AUTO,
    BACKEND_SETTING,
    BEAM_SETTING,
    CONNECTOR_SETTING,
    MANAGER_SETTING,
    NONE_BACKEND,
    RUNTIME_SETTING,
    SPECULATIVE_SETTING,
    TIMEOUT_SETTING,
    TWO_MODEL,
    ResolveRequest,
)
from kvferry.resolution.reuse import PrefixReuse, choose_prefix_reuse
from kvferry.resolution.runtime_rule import RuntimeChoice, RuntimeDecision, choose_runtime


def resolve(request: ResolveRequest, catalog: Catalog | None = None) -> Resolution:
    """The pair `request` runs with, and why. Raises ResolutionError when that cannot be had, naming the setting.

    Says nothing about whether this version can launch the pair: `check_buildable` does.
    """
    catalog = catalog or default_catalog()
    request = checked(request)
    facts = evaluate(card_named(request.architecture, catalog.cards), request.config)
    backend = effective_backend(request.backend, request.environ)
    transceiver = _usable_transceiver(backend, catalog)
    offered = catalog.offered()
    runtime = choose_runtime(RuntimeChoice(request, facts, transceiver, offered)) if transceiver else None
    managers = {name: catalog.managers.get(name) for name in catalog.managers}
    manager = choose_manager(ManagerChoice(request, facts, runtime, managers, offered))
    reuse = choose_prefix_reuse(request.prefix_reuse, facts, managers[manager.manager])
    if transceiver and runtime:
        _check_library(transceiver, runtime, request.missing_libraries)
    return _resolution(facts, backend, runtime, manager, reuse)


def prefix_reuse_enabled(config: Config, manager: str, requested: bool | None, catalog: Catalog | None = None) -> bool:
    """Whether a worker that runs `manager` reuses cached prefixes of this model. requested None: left at its default;
    `resolve` warned where the answer may surprise. Raises ResolutionError when reuse is asked for and cannot be had."""
    catalog = catalog or default_catalog()
    facts = evaluate(find_card(config, catalog.cards), config)
    return choose_prefix_reuse(requested, facts, catalog.managers.get(manager)).enabled


def checked(request: ResolveRequest) -> ResolveRequest:
    """`request` with its choices spelled as the rules spell them. Raises ResolutionError naming field and limit."""
    if not isinstance(request.config, Mapping):
        raise ResolutionError(f"config must be a mapping, not {type(request.config).__name__}", field="config")
    _check_at_least_one(TIMEOUT_SETTING, request.transfer_timeout_ms, " or null")
    _check_at_least_one(BEAM_SETTING, request.beam_width, "")
    if request.kv_connector == "":
        raise ResolutionError(
            f"{CONNECTOR_SETTING} is empty; name a connector or leave it out", field=CONNECTOR_SETTING
        )
    if request.speculative not in (None, TWO_MODEL):
        raise ResolutionError(
            f"{SPECULATIVE_SETTING} is {request.speculative!r}; known: {TWO_MODEL}", field=SPECULATIVE_SETTING
        )
    return replace(
        request,
        architecture=request.architecture or original_architecture(request.config),
        runtime=_choice(RUNTIME_SETTING, request.runtime, RUNTIMES),
        manager=_choice(MANAGER_SETTING, request.manager, MANAGERS),
    )


def _check_at_least_one(setting: str, value: object, otherwise: str) -> None:
    if value is None and otherwise:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ResolutionError(
            f"{setting} must be a whole number of at least 1{otherwise}, got {value!r}", field=setting
        )


def _choice(setting: str, value: str, choices: tuple[str, ...]) -> str:
    for choice in (AUTO, *choices):
        if value.strip().upper() == choice.upper():
            return choice
    raise ResolutionError(f"{setting} is {value!r}; known: {', '.join((AUTO, *choices))}", field=setting)


def _usable_transceiver(backend: EffectiveBackend, catalog: Catalog) -> TransceiverCapability | None:
    transceiver = catalog.transceiver(backend.name)
    if transceiver is not None and transceiver.refused:
        chosen = f" (chosen by {backend.variable}=1)" if backend.variable else ""
        raise ResolutionError(
            f"{BACKEND_SETTING} {backend.name}{chosen} cannot be used: {transceiver.refused}; set {BACKEND_SETTING} "
            f"to NIXL, or to {NONE_BACKEND} for aggregated serving",
            field=BACKEND_SETTING,
        )
    return transceiver


def _check_library(transceiver: TransceiverCapability, runtime: RuntimeDecision, missing: frozenset[str]) -> None:
    # A runtime without an implementation loads nothing: what is wrong with it is not its library.
    if not runtime.capability.implementation:
        return
    for library, install in (
        (transceiver.library, transceiver.install),
        (transceiver.system_library, transceiver.system_install),
    ):
        if library in missing:
            raise ResolutionError(
                f"{BACKEND_SETTING} {transceiver.backend} needs the library {library!r}, which is not "
                f"installed; install it with: {install}, or change {BACKEND_SETTING}",
                field=BACKEND_SETTING,
            )


def _resolution(
    facts: CardFacts,
    backend: EffectiveBackend,
    runtime: RuntimeDecision | None,
    manager: ManagerDecision,
    reuse: PrefixReuse,
) -> Resolution:
    warnings = [*backend.warnings, *(runtime.warnings if runtime else ()), *manager.warnings, *reuse.warnings]
    if runtime and facts.disaggregation == UNVALIDATED:
        warnings.append(f"{facts.architecture} is not validated for disaggregated serving")
    chosen = f"{backend.variable}=1 chose {backend.name}; " if backend.variable else ""
    return Resolution(
        architecture=facts.architecture,
        backend=backend.name,
        runtime=runtime.runtime if runtime else None,
        runtime_source=runtime.source if runtime else None,
        manager=manager.manager,
        manager_source=manager.source,
        reason=f"{chosen}{runtime.reason if runtime else 'aggregated serving, no transceiver'}; {manager.reason}",
        warnings=tuple(warnings),
        disaggregation=facts.disaggregation,
    )
