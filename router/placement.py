"""Finds a worker for a leg: the policy's choice among those that can take it, or a bounded wait for one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from kvferry.core import UnavailableError
from kvferry.router.job import Deadline, Progress
from kvferry.router.policies import POLICIES, RoutingQuery
from kvferry.router.pool import Lease, WorkerPool


class Placer:
    """One role's policy over the pool, with its count of turns."""

    def __init__(self, pool: WorkerPool, policy: str) -> None:
        """Raises ConfigError listing the policies when there is none of this name."""
        self._pool = pool
        self._policy = POLICIES.get(policy)
        self._turns = count()

    def place(self, candidates: list[str], tokens: int) -> Lease | None:
        """A place on one of `candidates`, counted as `tokens` in flight; None when there are none."""
        if not candidates:
            return None
        query = RoutingQuery(turn=next(self._turns), tokens=tokens)
        return self._pool.lease(self._policy(self._pool.loads(candidates), query).name, tokens)


class Placement:
    """Places the legs of jobs. wait_s: how long one may wait while nobody can take it."""

    def __init__(self, pool: WorkerPool, prefill_policy: str, decode_policy: str, wait_s: float) -> None:
        self._pool = pool
        self._first = Placer(pool, prefill_policy)
        self._decode = Placer(pool, decode_policy)
        self._wait_s = wait_s

    async def first(self, progress: Progress) -> Lease:
        """Who starts: a prefill worker with a successor, or one that serves the whole request.

        Raises UnavailableError saying why nobody can.
        """

        def attempt() -> Lease | None:
            names = self._pool.topology.first_legs(progress.avoid)
            return self._first.place(names, progress.context_tokens)

        return await self._wait_for(attempt, progress.job.deadline, "serve this request")

    def successor_now(self, progress: Progress, prefill: str) -> Lease | None:
        """Who takes over from `prefill`, if somebody can at once."""
        names = self._pool.topology.decode_legs(prefill, progress.avoid)
        return self._decode.place(names, len(progress.job.prompt_token_ids) + progress.job.max_tokens)

    async def successor(self, progress: Progress, prefill: str) -> Lease:
        """The same, with a wait. Raises UnavailableError saying why nobody can."""

        def attempt() -> Lease | None:
            return self.successor_now(progress, prefill)

        return await self._wait_for(attempt, progress.job.deadline, f"take over from {prefill}")

    async def _wait_for(self, attempt: Callable[[], Lease | None], deadline: Deadline, purpose: str) -> Lease:
        patience = Deadline.after(self._wait_s)
        while (lease := attempt()) is None:
            left_s = min(patience.at - patience.clock(), deadline.left_s())
            if left_s <= 0:
                raise UnavailableError(
                    f"no worker can {purpose}, and none came within {self._wait_s:g} s (router.worker_wait_s): "
                    f"{self._why()}"
                )
            await self._pool.changed(self._pool.version, left_s)
        return lease

    def _why(self) -> str:
        problems = list(self._pool.topology.problems)
        for member in self._pool.members():
            facts = member.facts
            detail = f" ({member.reason})" if member.reason else ""
            problems.append(f"{facts.name} ({facts.role.value}) is {member.state.value}{detail}")
        return "; ".join(problems) or "no worker has joined"
