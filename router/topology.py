"""Who can serve with whom: a pure function of the workers' facts, computed again when they change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from kvferry.core import Role
from kvferry.resolution import PairFacts, can_pair
from kvferry.router.facts import WorkerFacts


@dataclass(frozen=True, slots=True)
class Topology:
    """Ready workers only, names sorted. Workers that cannot talk form islands; a route never leaves one.

    pairs: prefill worker -> the decode workers that can take over from it. alone: workers that can serve a whole
    request: aggregated ones, and decode workers while no prefill worker is ready. problems: why ready workers
    are not used, a sentence each.
    """

    pairs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    alone: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        return bool(self.pairs or self.alone)

    def first_legs(self, avoid: Set[str]) -> list[str]:
        """Who may start a request; workers in `avoid` only if there is nobody else."""
        usable = sorted([*self.pairs, *self.alone])
        better = [name for name in usable if name not in avoid and self._leads_past(name, avoid)]
        return better or [name for name in usable if name not in avoid] or usable

    def decode_legs(self, prefill: str, avoid: Set[str]) -> list[str]:
        """Who may take over from `prefill`."""
        paired = self.pairs.get(prefill, ())
        return [name for name in paired if name not in avoid] or list(paired)

    def _leads_past(self, name: str, avoid: Set[str]) -> bool:
        """Whether a request started on `name` can end without a worker in `avoid`."""
        return name not in self.pairs or not avoid >= set(self.pairs[name])


def build_topology(ready: Sequence[WorkerFacts]) -> Topology:
    """Groups the ready workers. Pairs need compatible resolutions and first contact made by the decode worker."""
    by_role: dict[Role, list[WorkerFacts]] = {role: [] for role in Role}
    for facts in sorted(ready, key=lambda facts: facts.name):
        by_role[facts.role].append(facts)
    prefills, decodes = by_role[Role.PREFILL], by_role[Role.DECODE]
    pairs: dict[str, tuple[str, ...]] = {}
    problems: list[str] = []
    for prefill in prefills:
        usable = []
        for decode in decodes:
            problem = pair_problem(prefill, decode)
            if problem is None:
                usable.append(decode.name)
            else:
                problems.append(problem)
        if usable:
            pairs[prefill.name] = tuple(usable)
    alone = [*by_role[Role.AGGREGATED], *([] if prefills else decodes)]
    return Topology(pairs, tuple(facts.name for facts in alone), tuple(problems))


def pair_problem(prefill: WorkerFacts, decode: WorkerFacts) -> str | None:
    """Why `prefill` cannot hand over to `decode`, naming both; None when it can."""
    refusal = can_pair(_pair_facts(prefill), _pair_facts(decode))
    if refusal is not None:
        return refusal
    if prefill.endpoint in decode.peers_ready:
        return None
    error = decode.peer_errors.get(prefill.endpoint)
    return f"{decode.name} has not made contact with {prefill.name}" + (f": {error}" if error else " yet")


def _pair_facts(facts: WorkerFacts) -> PairFacts:
    return PairFacts(
        worker=facts.name,
        model_fingerprint=facts.model_fingerprint,
        kv_dtype=facts.kv_dtype,
        resolution=facts.resolution,
    )
