"""Routing policies: which of the workers that could take a leg gets it. Pure choices over snapshots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.core import Registry


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One candidate. tokens: of the legs in flight there, prompt and expected output together."""

    name: str
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class RoutingQuery:
    """What is being placed. turn: how many choices this pool has made before."""

    turn: int
    tokens: int


# Candidates are never empty and sorted by name.
Policy = Callable[[Sequence[WorkerLoad], RoutingQuery], WorkerLoad]

POLICIES: Registry[Policy] = Registry("routing policy", "router.prefill_policy, router.decode_policy")


def round_robin(candidates: Sequence[WorkerLoad], query: RoutingQuery) -> WorkerLoad:
    """Each in turn."""
    return candidates[query.turn % len(candidates)]


def least_loaded(candidates: Sequence[WorkerLoad], query: RoutingQuery) -> WorkerLoad:
    """The one with the fewest tokens in flight; equal ones take turns, so that an idle pool is spread too."""
    least = min((load.tokens, load.requests) for load in candidates)
    equal = [load for load in candidates if (load.tokens, load.requests) == least]
    return equal[query.turn % len(equal)]


POLICIES.register("round_robin", round_robin)
POLICIES.register("least_loaded", least_loaded)
