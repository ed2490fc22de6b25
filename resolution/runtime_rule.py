"""R1: the transceiver runtime, decided before anything else and refused where it cannot be built.

Pure functions from settings, card facts and declared capabilities to a decision with its source and reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core import Source
from kvferry.resolution.capabilities import RUNTIMES, RuntimeCapability, TransceiverCapability
from kvferry.resolution.card import CardFacts
from kvferry.resolution.errors import ResolutionError
from kvferry.resolution.obstacle import Obstacle, one_of, routes_for
from kvferry.resolution.request import AUTO, BACKEND_SETTING, RUNTIME_SETTING, TIMEOUT_SETTING, ResolveRequest


@dataclass(frozen=True, slots=True)
class RuntimeDecision:
    """backend/capability: the route that was resolved."""

    backend: str
    capability: RuntimeCapability
    source: Source
    reason: str
    warnings: tuple[str, ...] = ()

    @property
    def runtime(self) -> str:
        return self.capability.runtime

    @property
    def route(self) -> str:
        return f"{self.backend}/{self.runtime}"


@dataclass(frozen=True, slots=True)
class RuntimeChoice:
    """Everything R1 looks at. offered: the routes that errors may recommend."""

    request: ResolveRequest
    facts: CardFacts
    transceiver: TransceiverCapability
    offered: tuple[TransceiverCapability, ...]

    def candidate(self, runtime: str) -> RuntimeCapability | Obstacle:
        """`runtime` if the backend can run it now, else why not."""
        backend = self.transceiver.backend
        capability = self.transceiver.runtime(runtime)
        if capability is None:
            able = one_of(entry.runtime for entry in self.transceiver.runtimes)
            elsewhere = one_of(routes_for(self.offered, runtime=runtime))
            remedy = f"set {RUNTIME_SETTING} to auto or {able}"
            if elsewhere:
                remedy += f", or {BACKEND_SETTING} to one that runs it: {elsewhere}"
            return Obstacle(RUNTIME_SETTING, f"backend {backend} cannot run {runtime} (it runs {able})", remedy)
        if capability.needs_finite_timeout and self.request.transfer_timeout_ms is None:
            why = f"{runtime} on {backend} needs a finite timeout and {TIMEOUT_SETTING} is null"
            return Obstacle(TIMEOUT_SETTING, why, f"set {TIMEOUT_SETTING} to a number of milliseconds")
        return capability


def choose_runtime(choice: RuntimeChoice) -> RuntimeDecision:
    """An explicit value is kept or refused, a preference is a wish, else PYTHON where it can run, else CPP."""
    if choice.request.runtime != AUTO:
        return _explicit(choice, choice.request.runtime)
    wish = choice.facts.prefers_runtime
    obstacles: list[Obstacle] = []
    for runtime in RUNTIMES if wish is None else (wish, *(name for name in RUNTIMES if name != wish)):
        found = choice.candidate(runtime)
        if isinstance(found, RuntimeCapability):
            return _auto(choice, found, obstacles)
        obstacles.append(found)
    # Every backend runs something, so only a timeout of null on a backend without CPP leads here.
    blocking = next((entry for entry in obstacles if entry.setting == TIMEOUT_SETTING), obstacles[0])
    raise ResolutionError(
        f"no runtime is left: {'; '.join(entry.why for entry in obstacles)}; {blocking.remedy}", field=blocking.setting
    )


def _explicit(choice: RuntimeChoice, runtime: str) -> RuntimeDecision:
    found = choice.candidate(runtime)
    if isinstance(found, Obstacle):
        raise ResolutionError(f"{RUNTIME_SETTING} is {runtime}, but {found.why}; {found.remedy}", field=found.setting)
    return RuntimeDecision(choice.transceiver.backend, found, Source.USER, f"{RUNTIME_SETTING} is {runtime}")


def _auto(choice: RuntimeChoice, capability: RuntimeCapability, obstacles: Sequence[Obstacle]) -> RuntimeDecision:
    wish, runtime, backend = choice.facts.prefers_runtime, capability.runtime, choice.transceiver.backend
    stood_in_the_way = "; ".join(obstacle.why for obstacle in obstacles)
    if wish is None:
        because = f" as {stood_in_the_way}" if obstacles else ""
        reason = f"the model prefers no runtime, {runtime} is the default on {backend}{because}"
        return RuntimeDecision(backend, capability, Source.DEFAULT, reason)
    if wish == runtime:
        return RuntimeDecision(backend, capability, Source.MODEL, f"the model prefers {wish}, which {backend} can run")
    reason = f"the model prefers {wish}, but {stood_in_the_way}: {runtime}"
    warning = f"{choice.facts.architecture} prefers {wish}, but {stood_in_the_way}: running {runtime} instead"
    return RuntimeDecision(backend, capability, Source.DEMOTED, reason, (warning,))
