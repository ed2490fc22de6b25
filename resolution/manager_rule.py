"""R2 and R3: the KV cache manager, for the runtime that R1 resolved, refused where the pair cannot be built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.core import Source
from kvferry.resolution.capabilities import MANAGERS, ManagerCapability, TransceiverCapability
from kvferry.resolution.card import CardFacts
from kvferry.resolution.errors import ResolutionError
from kvferry.resolution.obstacle import Obstacle, one_of, routes_for
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
from kvferry.resolution.runtime_rule import RuntimeDecision


@dataclass(frozen=True, slots=True)
class ManagerDecision:
    manager: str
    source: Source
    reason: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ManagerChoice:
    """Everything R2 and R3 look at. runtime None: aggregated serving, where any manager can be driven.

    offered: the routes that errors may recommend.
    """

    request: ResolveRequest
    facts: CardFacts
    runtime: RuntimeDecision | None
    managers: Mapping[str, ManagerCapability]
    offered: tuple[TransceiverCapability, ...]

    def route_obstacles(self, manager: str) -> tuple[Obstacle, ...]:
        """Why the resolved transceiver cannot drive `manager`; empty when it can."""
        if self.runtime is None or manager in self.runtime.capability.managers:
            return ()
        able = one_of(self.runtime.capability.managers)
        why = f"{self.runtime.route} drives {able}, not {manager}"
        remedy = f"set {MANAGER_SETTING} to auto or {able}, or {self.route_remedy(manager)}"
        return (Obstacle(MANAGER_SETTING, why, remedy, because=self.runtime.reason),)

    def route_remedy(self, manager: str) -> str:
        timeout = f"{TIMEOUT_SETTING} to a number and " if self.request.transfer_timeout_ms is None else ""
        routes = one_of(routes_for(self.offered, manager=manager))
        return f"set {timeout}{BACKEND_SETTING} and {RUNTIME_SETTING} to a route that drives {manager}: {routes}"

    def feature_obstacles(self, manager: str) -> tuple[Obstacle, ...]:
        """Features in use that `manager` cannot serve."""
        request, able = self.request, self.managers[manager]
        found: list[Obstacle] = []
        if request.beam_width > 1 and not able.beam_search:
            why = f"{manager} serves no beam search ({BEAM_SETTING} is {request.beam_width})"
            found.append(Obstacle(BEAM_SETTING, why, f"set {BEAM_SETTING} to 1"))
        if request.kv_connector is not None and not able.kv_connector:
            why = f"{manager} serves no external KV connector ({CONNECTOR_SETTING} is {request.kv_connector})"
            found.append(Obstacle(CONNECTOR_SETTING, why, f"leave {CONNECTOR_SETTING} out"))
        if request.speculative == TWO_MODEL and not able.two_model_speculation:
            why = f"{manager} serves no two-model speculative decoding ({SPECULATIVE_SETTING} is {TWO_MODEL})"
            found.append(Obstacle(SPECULATIVE_SETTING, why, f"leave {SPECULATIVE_SETTING} out"))
        return tuple(found)


def choose_manager(choice: ManagerChoice) -> ManagerDecision:
    """A requirement is met or an error; an explicit value is kept unless a feature forbids it; a preference is a
    wish; else V1."""
    if choice.facts.requires_manager is not None:
        return _required(choice, choice.facts.requires_manager)
    if choice.request.manager != AUTO:
        return _explicit(choice, choice.request.manager)
    return _auto(choice)


def _required(choice: ManagerChoice, required: str) -> ManagerDecision:
    requested = choice.request.manager
    subject = f"{choice.facts.architecture} requires KV manager {required}"
    if requested not in (AUTO, required):
        raise ResolutionError(
            f"{subject}, but {MANAGER_SETTING} is {requested}; set {MANAGER_SETTING} to auto or {required}",
            field=MANAGER_SETTING,
        )
    for obstacle in choice.route_obstacles(required):
        remedy = f"{choice.route_remedy(required)}, or {BACKEND_SETTING} to {NONE_BACKEND} for aggregated serving"
        raise ResolutionError(f"{subject}, but {obstacle.explanation}; {remedy}", field=_route_setting(choice.request))
    for obstacle in choice.feature_obstacles(required):
        raise ResolutionError(f"{subject}, but {obstacle.why}; {obstacle.remedy}", field=obstacle.setting)
    source = Source.USER if requested == required else Source.MODEL
    return ManagerDecision(required, source, f"the model requires {required}")


def _route_setting(request: ResolveRequest) -> str:
    """What to change first about a route, when the manager cannot change."""
    if request.runtime != AUTO:
        return RUNTIME_SETTING
    return TIMEOUT_SETTING if request.transfer_timeout_ms is None else BACKEND_SETTING


def _explicit(choice: ManagerChoice, wanted: str) -> ManagerDecision:
    wished = f"{MANAGER_SETTING} is {wanted}"
    features = choice.feature_obstacles(wanted)
    for obstacle in features:
        if obstacle.setting == SPECULATIVE_SETTING:
            remedy = f"set {MANAGER_SETTING} to auto, or {obstacle.remedy}"
            raise ResolutionError(f"{wished}, but {obstacle.why}; {remedy}", field=MANAGER_SETTING)
    if features:
        return _demoted(choice, wanted, wished, features)
    for obstacle in choice.route_obstacles(wanted):
        raise ResolutionError(f"{wished}, but {obstacle.explanation}; {obstacle.remedy}", field=obstacle.setting)
    return ManagerDecision(wanted, Source.USER, wished)


def _auto(choice: ManagerChoice) -> ManagerDecision:
    wish = choice.facts.prefers_manager
    if wish is None:
        manager = _first_possible(choice, MANAGERS)
        return ManagerDecision(manager, Source.DEFAULT, f"the model prefers no manager, {manager} is the default")
    obstacles = (*choice.route_obstacles(wish), *choice.feature_obstacles(wish))
    if obstacles:
        return _demoted(choice, wish, f"the model prefers {wish}", obstacles)
    able = f", which {choice.runtime.route} drives" if choice.runtime else ""
    return ManagerDecision(wish, Source.MODEL, f"the model prefers {wish}{able}")


def _demoted(choice: ManagerChoice, wish: str, wished: str, obstacles: Sequence[Obstacle]) -> ManagerDecision:
    """A route that cannot drive the wish is a reason; a feature that forbids it is a warning too."""
    manager = _first_possible(choice, [name for name in MANAGERS if name != wish])
    reason = f"{wished}, but {'; '.join(obstacle.why for obstacle in obstacles)}: {manager}"
    warnings = tuple(
        f"{wished}, but {obstacle.why}: running {manager} instead"
        for obstacle in obstacles
        if obstacle.setting != MANAGER_SETTING
    )
    return ManagerDecision(manager, Source.DEMOTED, reason, warnings)


def _first_possible(choice: ManagerChoice, managers: Sequence[str]) -> str:
    obstacles: list[Obstacle] = []
    for manager in managers:
        found = (*choice.route_obstacles(manager), *choice.feature_obstacles(manager))
        if not found:
            return manager
        obstacles.extend(found)
    # Only a third-party route that does not drive V1 leads here, with a feature that V1 alone can serve.
    last = obstacles[-1]
    raise ResolutionError(
        f"no KV manager is left: {'; '.join(entry.why for entry in obstacles)}; {last.remedy}", field=last.setting
    )
