"""Which prefill and decode workers can talk to each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.core import Resolution
from kvferry.resolution.capabilities import V1
from kvferry.resolution.request import NONE_BACKEND


@dataclass(frozen=True, slots=True)
class PairFacts:
    """What decides about a pair. kv_dtype: of the cache, not of the weights."""

    worker: str
    model_fingerprint: str
    kv_dtype: str
    resolution: Resolution


def can_pair(a: PairFacts, b: PairFacts) -> str | None:
    """None when KV can move between `a` and `b`, else a sentence naming both workers and what differs."""
    for facts, other in ((a, b), (b, a)):
        if facts.resolution.backend == NONE_BACKEND:
            return f"{a.worker} and {b.worker} cannot be paired: {facts.worker} has no transceiver (backend NONE)" + (
                "" if other.resolution.backend == NONE_BACKEND else f", {other.worker} has {_route(other)}"
            )
    differences = [
        f"{what} is {mine} on {a.worker} and {theirs} on {b.worker}"
        for what, mine, theirs in _compared(a, b)
        if mine != theirs
    ]
    if not differences:
        return None
    return f"{a.worker} and {b.worker} cannot be paired: {'; '.join(differences)}"


def _route(facts: PairFacts) -> str:
    return facts.resolution.transceiver


def _compared(a: PairFacts, b: PairFacts) -> Iterable[tuple[str, str, str]]:
    yield "the model fingerprint", a.model_fingerprint, b.model_fingerprint
    yield "the KV dtype", a.kv_dtype, b.kv_dtype
    yield "the transceiver backend", a.resolution.backend, b.resolution.backend
    yield "the KV manager", a.resolution.manager, b.resolution.manager
    # Both runtimes speak one protocol over V1's blocks; V2's are driven by one runtime only.
    if {a.resolution.manager, b.resolution.manager} != {V1}:
        yield "the transceiver runtime", a.resolution.runtime or "-", b.resolution.runtime or "-"


def islands(workers: Iterable[PairFacts]) -> list[tuple[PairFacts, ...]]:
    """Workers grouped so that within a group all can be paired, and across groups none; order is kept.

    Aggregated workers pair with nobody, not even with each other, and each make a group of their own.
    """
    groups: list[list[PairFacts]] = []
    for worker in workers:
        home = next((group for group in groups if can_pair(group[0], worker) is None), None)
        if home is None:
            groups.append([worker])
        else:
            home.append(worker)
    return [tuple(group) for group in groups]
