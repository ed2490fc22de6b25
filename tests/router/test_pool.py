from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvferry.core import BlockCounts, NotFoundError, Resolution, Role, Source
from kvferry.router.facts import WorkerFacts, WorkerState
from kvferry.router.pool import RetiredIncarnationError, WorkerPool

ALONE = Resolution("LlamaForCausalLM", "NONE", None, None, "V2", Source.MODEL, "")
FACTS = WorkerFacts(
    name="a",
    role=Role.AGGREGATED,
    incarnation="one",
    endpoint="a:1",
    resolution=ALONE,
    model_fingerprint="m",
    kv_dtype="float32",
    max_batch=4,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def pool(clock: Clock) -> WorkerPool:
    return WorkerPool(lost_after_s=2.5, clock=clock)


def pass_time(pool: WorkerPool, clock: Clock, seconds: float) -> None:
    """As the sweeper would see it pass."""
    for _ in range(round(seconds / 0.25)):
        clock.now += 0.25
        pool.sweep()


def state(pool: WorkerPool) -> WorkerState:
    (member,) = pool.members()
    return member.state


async def test_worker_follows_its_reports(pool: WorkerPool) -> None:
    session = pool.join(replace(FACTS, reported=WorkerState.STARTING))
    assert not pool.topology.usable
    pool.report(session, FACTS)
    assert pool.topology.alone == ("a",)
    pool.report(session, replace(FACTS, reported=WorkerState.UNHEALTHY, reason="quarantine spent"))
    assert not pool.topology.usable
    assert pool.members()[0].reason == "quarantine spent"
    pool.report(session, FACTS)
    assert pool.topology.usable


async def test_silent_worker_is_lost_and_its_legs_with_it(pool: WorkerPool, clock: Clock) -> None:
    session = pool.join(FACTS)
    lease = pool.lease("a", 10)
    ended: list[str] = []
    lease.cancel_with(lambda: ended.append("leg"))
    pass_time(pool, clock, 2.0)
    pool.report(session, FACTS)
    pass_time(pool, clock, 2.0)
    assert state(pool) is WorkerState.READY
    pass_time(pool, clock, 1.0)
    assert state(pool) is WorkerState.LOST
    assert lease.lost_reason == "no report for 2.8 s"
    assert ended == ["leg"]
    late = pool.join(replace(FACTS, incarnation="two"))
    assert late.current
    assert not session.current


async def test_leg_begun_on_a_worker_just_lost_ends_at_once(pool: WorkerPool) -> None:
    session = pool.join(FACTS)
    lease = pool.lease("a", 10)
    pool.leave(session, "gone")
    ended: list[str] = []
    lease.cancel_with(lambda: ended.append("leg"))
    assert ended == ["leg"]


async def test_nobody_is_lost_for_time_this_process_was_stopped(pool: WorkerPool, clock: Clock) -> None:
    pool.join(FACTS)
    clock.now += 60
    pool.sweep()
    assert state(pool) is WorkerState.READY
    pass_time(pool, clock, 3.0)
    assert state(pool) is WorkerState.LOST


async def test_stream_end_loses_the_worker_and_the_same_incarnation_may_return(pool: WorkerPool) -> None:
    first = pool.join(FACTS)
    pool.leave(first, "its stream ended")
    assert state(pool) is WorkerState.LOST
    pool.report(first, FACTS)
    assert state(pool) is WorkerState.LOST
    assert pool.join(FACTS).current
    assert pool.topology.usable


async def test_reconnect_keeps_running_legs(pool: WorkerPool) -> None:
    old = pool.join(FACTS)
    lease = pool.lease("a", 10)
    new = pool.join(FACTS)
    pool.leave(old, "the old stream ended late")
    assert new.current
    assert not old.current
    assert lease.lost_reason is None


async def test_new_incarnation_replaces_the_old_one_for_good(pool: WorkerPool) -> None:
    old = pool.join(FACTS)
    lease = pool.lease("a", 10)
    pool.join(replace(FACTS, incarnation="two", endpoint="a:2"))
    assert lease.lost_reason == "replaced by incarnation two"
    assert old.member.gone.is_set()
    pool.leave(old, "late")
    assert [member.facts.endpoint for member in pool.members()] == ["a:2"]
    assert pool.topology.usable
    with pytest.raises(RetiredIncarnationError, match="two processes use this name"):
        pool.join(FACTS)


async def test_suspect_waits_for_the_next_report(pool: WorkerPool) -> None:
    session = pool.join(FACTS)
    pool.suspect(replace(FACTS, incarnation="zero"), "an earlier life")
    assert pool.topology.usable
    pool.suspect(FACTS, "connection refused")
    assert state(pool) is WorkerState.UNHEALTHY
    assert not pool.topology.usable
    pool.report(session, FACTS)
    assert pool.topology.usable


async def test_drained_worker_stays_drained(pool: WorkerPool) -> None:
    session = pool.join(FACTS)
    lease = pool.lease("a", 10)
    pool.drain("a")
    pool.report(session, FACTS)
    assert state(pool) is WorkerState.DRAINING
    assert not pool.topology.usable
    assert lease.lost_reason is None
    with pytest.raises(NotFoundError, match="there are: a"):
        pool.drain("b")
    pool.leave(session, "it ended")
    with pytest.raises(NotFoundError, match="there are: none"):
        pool.drain("a")


async def test_loads_count_leases(pool: WorkerPool) -> None:
    pool.join(FACTS)
    with pool.lease("a", 10), pool.lease("a", 5):
        (load,) = pool.loads(["a"])
        assert (load.requests, load.tokens) == (2, 15)
    (load,) = pool.loads(["a"])
    assert (load.requests, load.tokens) == (0, 0)


async def test_batch_capacity_sums_ready_workers(pool: WorkerPool) -> None:
    assert pool.batch_capacity([Role.AGGREGATED]) == 0
    pool.join(FACTS)
    pool.join(replace(FACTS, name="b", incarnation="b", max_batch=6))
    assert pool.batch_capacity([Role.AGGREGATED]) == 10
    assert pool.batch_capacity([Role.PREFILL]) == 0
    pool.join(replace(FACTS, name="c", incarnation="c", max_batch=0))
    assert pool.batch_capacity([Role.AGGREGATED]) == 0  # one of unknown size


async def test_only_what_matters_for_routing_wakes_the_waiting(pool: WorkerPool) -> None:
    session = pool.join(FACTS)
    version = pool.version
    waiting = asyncio.create_task(pool.changed(version, 5.0))
    await asyncio.sleep(0)
    pool.report(session, replace(FACTS, blocks=BlockCounts(total=5), requests={"running": 1}))
    await asyncio.sleep(0)
    assert not waiting.done()
    pool.report(session, replace(FACTS, reported=WorkerState.UNHEALTHY))
    await asyncio.wait_for(waiting, 1)
    await pool.changed(version, 5.0)  # already past it
    await pool.changed(pool.version, 0.01)  # gives up


async def test_lost_workers_are_remembered_up_to_a_bound(pool: WorkerPool) -> None:
    for number in range(200):
        session = pool.join(replace(FACTS, name=f"w{number}", incarnation=f"i{number}"))
        pool.leave(session, "gone")
    pool.join(FACTS)
    assert 64 <= len(pool.members()) <= 66
