"""Workers of several ranks: every rank pulls its share, and all of them end a load alike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kvferry.core import BlockTable, PeerAddress, Role, TokenRange
from kvferry.transceiver.base import CancelOutcome, LoadResult
from kvferry.transceiver.faulty import Fault, Target
from kvferry.transceiver.ranked import agree

Wait = Callable[..., None]


def assert_same(source: Any, given: Sequence[int], destination: Any, taken: Sequence[int]) -> None:
    """Every head of every layer on every rank of the destination is what any rank of the source has of it that pulled
    or was pulled from: replicas on the source hold different random bytes, so any one of them will do."""
    for rank, pool in enumerate(destination.pools):
        for layer in pool.layout.layers:
            for head in pool.layout.heads:
                for plane in range(2):
                    holders = [
                        number
                        for number, held in enumerate(source.pools)
                        if layer in held.layout.layers and head in held.layout.heads
                    ]
                    mine = torch.stack([destination.head(rank, block, layer, plane, head) for block in taken])
                    theirs = [
                        torch.stack([source.head(number, block, layer, plane, head) for block in given])
                        for number in holders
                    ]
                    assert any(torch.equal(mine, each) for each in theirs), (rank, layer, head, plane)


SIZES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]
CASES = [(source, destination) for source in SIZES for destination in SIZES]


@pytest.mark.parametrize(("source_sizes", "destination_sizes"), CASES)
def test_every_rank_gets_its_share(
    source_sizes: tuple[int, int], destination_sizes: tuple[int, int], mortal_world: Any, eventually: Wait
) -> None:
    source = mortal_world.ranked(Role.PREFILL, "p", *source_sizes)
    destination = mortal_world.ranked(Role.DECODE, "d", *destination_sizes)
    met = destination.transceiver.connect("p")
    assert len(met.ranks) == len(source.pools)
    handle, hold = source.advertise([3, 1, 7], 12)
    load = destination.load(handle, [5, 6, 2], TokenRange(0, 12))
    result = load.wait()
    assert result.error is None
    assert_same(source, [3, 1, 7], destination, [5, 6, 2])
    # Each of four ranks needs one of two heads, so every head goes to two of them.
    copies = max(1, destination_sizes[0] // 2)
    # blocks x layers x planes x kv heads x tokens x bytes of a row
    assert result.nbytes == copies * 3 * 4 * 2 * 2 * 4 * 16
    eventually(hold.released.is_set)
    assert len(load.results) == 1
    again = destination.load(handle, [5, 6, 2], TokenRange(0, 12)).wait()
    assert again.error == "the transfer handle was used already"


def test_an_empty_range_only_tells_the_source(mortal_world: Any, eventually: Wait) -> None:
    source, destination = (mortal_world.ranked(role, role.value, 2, 1) for role in (Role.PREFILL, Role.DECODE))
    handle, hold = source.advertise([3, 1], 8)
    before = [pool.buffer.clone() for pool in destination.pools]
    result = destination.load(handle, [5, 6], TokenRange(8, 8)).wait()
    assert (result.error, result.nbytes) == (None, 0)
    eventually(hold.released.is_set)
    for pool, bytes_before in zip(destination.pools, before, strict=True):
        assert torch.equal(pool.buffer, bytes_before)


def test_the_source_keeps_its_blocks_until_the_last_rank_has_read_them(mortal_world: Any, eventually: Wait) -> None:
    source, destination = (mortal_world.ranked(role, role.value, 2, 1) for role in (Role.PREFILL, Role.DECODE))
    destination.transceiver.connect("prefill")
    destination.agents[1].inject(Fault.DELAY, Target.OPERATION, delay_s=0.5)
    handle, hold = source.advertise([3], 4)
    load = destination.load(handle, [5], TokenRange(0, 4))
    assert not load.done.wait(0.3)
    assert not hold.released.is_set(), "rank 0 is done, rank 1 is not"
    assert load.wait().error is None
    eventually(hold.released.is_set)
    assert_same(source, [3], destination, [5])


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_rank_that_fails_fails_the_load_on_all(rank: int, mortal_world: Any, eventually: Wait) -> None:
    """After which every rank's memory is at rest, the source has its blocks back, and the next load works."""
    source, destination = (mortal_world.ranked(role, role.value, 2, 2) for role in (Role.PREFILL, Role.DECODE))
    destination.transceiver.connect("prefill")
    destination.agents[rank].inject(Fault.DROP, Target.OPERATION)
    handle, hold = source.advertise([3], 4)
    load = destination.load(handle, [5], TokenRange(0, 4))
    result = load.wait()
    assert result.error is not None
    assert not result.in_doubt
    eventually(hold.released.is_set)
    assert len(load.results) == 1
    handle, hold = source.advertise([4], 4)
    assert destination.load(handle, [6], TokenRange(0, 4)).wait().error is None
    assert_same(source, [4], destination, [6])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_cancel_is_one_on_every_rank_and_the_next_load_works(rank: int, mortal_world: Any, eventually: Wait) -> None:
    source, destination = (mortal_world.ranked(role, role.value, 2, 1) for role in (Role.PREFILL, Role.DECODE))
    destination.transceiver.connect("prefill")
    destination.agents[rank].inject(Fault.DELAY, Target.OPERATION, delay_s=0.5)
    handle, hold = source.advertise([3], 4)
    load = destination.load(handle, [5], TokenRange(0, 4))
    eventually(lambda: destination.transceiver.stats().open_loads > 0)
    assert destination.transceiver.cancel_load(load.load_id) in (
        CancelOutcome.IN_FLIGHT,
        CancelOutcome.CANCELLED_BEFORE_ADVERTISE,
    )
    result = load.wait()
    assert result.error == "cancelled"
    assert not result.in_doubt
    eventually(hold.released.is_set)
    handle, hold = source.advertise([4], 4)
    assert destination.load(handle, [6], TokenRange(0, 4)).wait().error is None
    assert_same(source, [4], destination, [6])


def test_reused_blocks_of_any_rank_void_the_load(mortal_world: Any, eventually: Wait) -> None:
    source, destination = (mortal_world.ranked(role, role.value, 2, 1) for role in (Role.PREFILL, Role.DECODE))
    handle, _ = source.advertise([3], 4)
    source.pools[1].generations[3] += 1
    result = destination.load(handle, [5], TokenRange(0, 4)).wait()
    assert result.error is not None
    assert "reused before they had been read" in result.error


def test_a_load_in_doubt_is_quiet_when_every_rank_is(mortal_world: Any, eventually: Wait) -> None:
    source = mortal_world.ranked(Role.PREFILL, "p", 2, 1)
    destination = mortal_world.ranked(Role.DECODE, "d", 2, 1, transfer_timeout_s=0.3, grace_s=0.2)
    destination.transceiver.connect("p")
    destination.agents[1].inject(Fault.BLACK_HOLE, Target.OPERATION)
    destination.agents[1].fail_fences(1)
    handle, _ = source.advertise([3], 4)
    load = destination.load(handle, [5], TokenRange(0, 4))
    result = load.wait()
    assert result.error is not None
    assert result.in_doubt
    quiet: list[int] = []
    destination.transceiver.when_quiet(load.load_id, lambda: quiet.append(1))
    assert not quiet, "rank 1 may still be written to"
    eventually(lambda: bool(quiet))
    assert quiet == [1]


def test_other_ranks_are_woken_for_readers(mortal_world: Any, eventually: Wait) -> None:
    source = mortal_world.ranked(Role.PREFILL, "p", 2, 1)
    destination = mortal_world.ranked(Role.DECODE, "d", 1, 1)
    destination.transceiver.connect("p")
    assert source.others[0].attended
    source.others[0].attended.clear()
    source.advertise([3], 4)
    assert source.others[0].attended


def test_pages_that_are_pushed_to_stay_in_doubt_as_without_ranks(mortal_world: Any, fake_hold: Any) -> None:
    times = {"transfer_timeout_s": 0.2, "grace_s": 0.1, "heartbeat_s": 0.1}
    source = mortal_world.ranked(Role.PREFILL, "p", 1, 1, **times)
    destination = mortal_world.ranked(Role.DECODE, "d", 1, 1, **times)
    results: list[LoadResult] = []
    done, quiet = threading.Event(), threading.Event()

    def on_done(result: LoadResult) -> None:
        results.append(result)
        done.set()

    writer = PeerAddress("p", source.transceiver.local.incarnation)
    granting, writing = destination.transceiver.push_side, source.transceiver.push_side
    tokens = TokenRange(0, 8)
    load_id, grant = granting.grant(writer, b"d" * 32, (BlockTable((3, 4), ()),), tokens, on_done)
    push_id, _ = writing.open_push(grant, b"d" * 32, lambda _: None)
    generations = tuple(source.pools[0].generations[[5, 6]].tolist())
    hold = fake_hold((BlockTable((5, 6), generations),))
    source.transceiver.connect("d")
    source.agents[0].inject(Fault.BLOCK)
    writing.push(push_id, hold, tokens, hold.release)
    granting.due(load_id)
    assert done.wait(5)
    assert results[0].in_doubt is True
    destination.transceiver.when_quiet(load_id, quiet.set)
    assert not quiet.wait(0.3)
    source.agents[0].unblock()
    assert quiet.wait(5)
    assert hold.released.wait(5)


def test_workers_of_several_ranks_are_pulled_from(mortal_world: Any) -> None:
    assert mortal_world.ranked(Role.PREFILL, "p", 2, 1).transceiver.push_side is None


@pytest.mark.parametrize(
    ("errors", "cancelled", "expected"),
    [
        ([None, None], False, None),
        ([None, "boom"], False, "boom"),
        (["cancelled", "boom"], True, "cancelled"),
        ([None, "boom"], True, "cancelled"),
        (["first", "second"], False, "first"),
    ],
)
def test_ranks_agree_on_the_worst(errors: list[str | None], cancelled: bool, expected: str | None) -> None:
    results: list[Any] = [
        LoadResult(n, nbytes=10, seconds=0.1 * n, copies=2, error=error, in_doubt=error == "boom")
        for n, error in enumerate(errors, 1)
    ]
    agreed = agree(9, results, cancelled)
    assert (agreed.transfer_id, agreed.error) == (9, expected)
    assert agreed.nbytes == (20 if expected is None else 0)
    assert agreed.in_doubt == ("boom" in errors)
    assert agreed.seconds == pytest.approx(0.2)
