"""Pushes: room is granted, each part is written as it comes, and nothing else ever is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvferry.core import PeerAddress, Role, TokenRange, TransferError
from kvferry.transceiver import CancelOutcome, FailureClass
from kvferry.transceiver.faulty import Fault, Target

Eventually = Callable[..., None]
BLOCK = 4
NBYTES = 2 * 2 * 2 * 4 * 4  # of a token: layers, K and V, heads, dim, fp32


@pytest.fixture
def pair(push_world: Any) -> tuple[Any, Any]:
    return push_world.worker(Role.PREFILL, "p:1"), push_world.worker(Role.DECODE, "d:1")


def timed_pair(world: Any, **times: float) -> tuple[Any, Any]:
    return world.worker(Role.PREFILL, "p:1", **times), world.worker(Role.DECODE, "d:1", **times)


def moved(prefill: Any, decode: Any, there: list[int], here: list[int]) -> bool:
    return torch.equal(decode.blocks(here), prefill.blocks(there))


class TestMoving:
    def test_parts_arrive_in_order_and_all_of_it_is_done(self, pair: tuple[Any, Any]) -> None:
        prefill, decode = pair
        others = decode.blocks([0, 1, 2, 7])
        grant, load = decode.grant(prefill, [3, 4, 6], TokenRange(0, 11))
        push = prefill.open_push(grant)
        first = push.part([20], TokenRange(0, 4))
        assert first.released.wait(10)
        assert moved(prefill, decode, [20], [3])
        assert not load.done.is_set()
        second = push.part([20, 9, 5], TokenRange(4, 11))
        result = load.wait()
        assert (result.error, result.nbytes, result.in_part) == (None, 11 * NBYTES, False)
        assert second.released.wait(5)
        assert moved(prefill, decode, [9], [4])
        rows = 3 * 4 * 4  # of a head's first three tokens
        heads = decode.blocks([6]).view(1, 8, -1)[:, :, :rows]
        assert torch.equal(heads, prefill.blocks([5]).view(1, 8, -1)[:, :, :rows])
        assert torch.equal(decode.blocks([0, 1, 2, 7]), others)
        assert push.failures == []
        assert (decode.transceiver.stats().loads, decode.transceiver.stats().nbytes) == (1, 11 * NBYTES)
        assert prefill.transceiver.stats().handed_off == 1

    def test_only_what_was_granted_moves(self, pair: tuple[Any, Any]) -> None:
        prefill, decode = pair
        before = decode.blocks([3])
        grant, load = decode.grant(prefill, [3, 4], TokenRange(4, 8))
        push = prefill.open_push(grant)
        push.part([20, 21], TokenRange(4, 8))
        assert load.wait().nbytes == 4 * NBYTES
        assert torch.equal(decode.blocks([3]), before)
        assert moved(prefill, decode, [21], [4])

    def test_parts_may_come_before_the_destination_has_agreed(self, pair: tuple[Any, Any]) -> None:
        prefill, decode = pair
        grant, load = decode.grant(prefill, [3, 4], TokenRange(0, 8))
        push = prefill.open_push(grant)
        holds = [push.part([20], TokenRange(0, 4)), push.part([20, 21], TokenRange(4, 8))]
        assert load.wait().error is None
        assert all(hold.released.wait(5) for hold in holds)
        assert moved(prefill, decode, [20, 21], [3, 4])

    def test_many_at_once(self, pair: tuple[Any, Any]) -> None:
        prefill, decode = pair
        grants = [decode.grant(prefill, [block], TokenRange(0, 4)) for block in range(30)]
        for block, (grant, _) in enumerate(grants):
            prefill.open_push(grant).part([31 - block], TokenRange(0, 4))
        assert [load.wait().error for _, load in grants] == [None] * 30
        assert moved(prefill, decode, [31 - block for block in range(30)], list(range(30)))


def test_where_writes_may_land_late_nothing_is_pushed(world: Any) -> None:
    worker = world.worker(Role.PREFILL, "p:1")
    assert (worker.transceiver.push_side is None) == (world.backend == "mooncake")


class TestGrants:
    def test_malformed(self, pair: tuple[Any, Any]) -> None:
        prefill, _ = pair
        with pytest.raises(TransferError, match="malformed"):
            prefill.open_push(b"\xff\xff\xff")

    def test_forged(self, pair: tuple[Any, Any], eventually: Eventually) -> None:
        prefill, decode = pair
        before = decode.blocks([3])
        grant, load = decode.grant(prefill, [3], TokenRange(0, 4))
        forged = bytearray(grant)
        forged[-1] ^= 1
        push = prefill.open_push(bytes(forged))
        hold = push.part([20], TokenRange(0, 4))
        eventually(lambda: push.failures)
        assert "not made by the worker it names" in push.failures[0]
        assert hold.released.wait(5)
        assert torch.equal(decode.blocks([3]), before)
        good = prefill.open_push(grant)
        good.part([20], TokenRange(0, 4))
        assert load.wait().error is None

    def test_made_for_another_prompt(self, pair: tuple[Any, Any], eventually: Eventually) -> None:
        prefill, decode = pair
        grant, _ = decode.grant(prefill, [3], TokenRange(0, 4))
        push = prefill.open_push(grant, b"x" * 32)
        eventually(lambda: push.failures)
        assert "another prompt" in push.failures[0]

    def test_made_for_another_worker(self, pair: tuple[Any, Any], push_world: Any, eventually: Eventually) -> None:
        prefill, decode = pair
        other = push_world.worker(Role.PREFILL, "p:2")
        before = decode.blocks([3])
        grant, load = decode.grant(prefill, [3], TokenRange(0, 4))
        push = other.open_push(grant)
        push.part([20], TokenRange(0, 4))
        eventually(lambda: push.failures)
        assert "made for another worker" in push.failures[0]
        assert torch.equal(decode.blocks([3]), before)
        good = prefill.open_push(grant)
        good.part([20], TokenRange(0, 4))
        assert load.wait().error is None

    def test_used_twice(self, pair: tuple[Any, Any], eventually: Eventually) -> None:
        """By the same worker, which refuses it, and by one that has forgotten, which the destination refuses."""
        prefill, decode = pair
        grant, load = decode.grant(prefill, [3], TokenRange(0, 4))
        prefill.open_push(grant).part([20], TokenRange(0, 4))
        assert load.wait().error is None
        with pytest.raises(TransferError, match="used already"):
            prefill.open_push(grant)
        prefill.transceiver._push.pushes._ended.clear()
        before = decode.blocks([3])
        again = prefill.open_push(grant)
        again.part([21], TokenRange(0, 4))
        eventually(lambda: again.failures)
        assert "void" in again.failures[0]
        assert torch.equal(decode.blocks([3]), before)

    def test_opened_twice(self, pair: tuple[Any, Any], eventually: Eventually) -> None:
        """A grant that is being written to has one writer."""
        prefill, decode = pair
        grant, load = decode.grant(prefill, [3, 4], TokenRange(0, 8))
        push = prefill.open_push(grant)
        assert push.part([20], TokenRange(0, 4)).released.wait(10)
        local = prefill.transceiver.local
        with pytest.raises(TransferError, match="used already"):
            decode.transceiver.answer_open_push(local.incarnation, grant, prefill.transceiver._push.pushes._process)
        push.part([20, 21], TokenRange(4, 8))
        assert load.wait().error is None

    def test_of_pages_that_have_another_owner(self, pair: tuple[Any, Any], eventually: Eventually) -> None:
        prefill, decode = pair
        before = decode.blocks([3])
        grant, _ = decode.grant(prefill, [3], TokenRange(0, 4))
        decode.pool.generations[3] += 1
        push = prefill.open_push(grant)
        push.part([20], TokenRange(0, 4))
        eventually(lambda: push.failures)
        assert "stale" in push.failures[0]
        assert torch.equal(decode.blocks([3]), before)

    def test_taken_back_before_it_was_used(self, pair: tuple[Any, Any], eventually: Eventually) -> None:
        prefill, decode = pair
        before = decode.blocks([3])
        grant, load = decode.grant(prefill, [3], TokenRange(0, 4))
        assert decode.transceiver.cancel_load(load.load_id) is CancelOutcome.CANCELLED_BEFORE_ADVERTISE
        result = load.wait(1.0)
        assert (result.error, result.in_doubt) == ("cancelled", False)
        push = prefill.open_push(grant)
        hold = push.part([20], TokenRange(0, 4))
        eventually(lambda: push.failures)
        assert "void" in push.failures[0]
        assert hold.released.wait(5)
        assert torch.equal(decode.blocks([3]), before)

    def test_of_a_destination_that_has_restarted(
        self, mortal_world: Any, mortal_pair: Any, eventually: Eventually
    ) -> None:
        prefill, decode = mortal_pair
        grant, _ = decode.grant(prefill, [3], TokenRange(0, 4))
        mortal_world.kill(decode)
        reborn = mortal_world.worker(Role.DECODE, "d:1")
        before = reborn.blocks([3])
        push = prefill.open_push(grant)
        push.part([20], TokenRange(0, 4))
        eventually(lambda: push.failures)
        assert "restarted" in push.failures[0]
        assert torch.equal(reborn.blocks([3]), before)

    def test_part_that_does_not_follow(self, pair: tuple[Any, Any], eventually: Eventually) -> None:
        prefill, decode = pair
        grant, load = decode.grant(prefill, [3, 4], TokenRange(0, 8))
        push = prefill.open_push(grant)
        hold = push.part([20, 21], TokenRange(4, 8))
        assert "gave up" in load.wait().error
        assert "does not follow" in push.failures[0]
        assert hold.released.wait(5)

    def test_writer_that_wrote_less_than_it_says(self, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        prefill, decode = pair
        grant, load = decode.grant(prefill, [3, 4], TokenRange(0, 8))
        push = prefill.open_push(grant)
        assert push.part([20], TokenRange(0, 4)).released.wait(10)
        prefill.transceiver._push.pushes._open[push.push_id].nbytes -= 1
        push.part([20, 21], TokenRange(4, 8))
        assert f"wrote {8 * NBYTES - 1} bytes" in load.wait().error
        assert decode.transceiver.stats().failures == {FailureClass.PLAN: 1}


class TestEnds:
    def test_writer_gives_up_between_parts(self, pair: tuple[Any, Any]) -> None:
        prefill, decode = pair
        grant, load = decode.grant(prefill, [3, 4], TokenRange(0, 8))
        push = prefill.open_push(grant)
        assert push.part([20], TokenRange(0, 4)).released.wait(10)
        push.give_up()
        result = load.wait(3.0)
        assert (result.error, result.in_doubt) == ("the writer gave up", False)
        assert push.failures == ["cancelled"]
        assert push.part([20, 21], TokenRange(4, 8)).released.wait(5)  # too late

    def test_destination_cancels_between_parts(self, pair: tuple[Any, Any], eventually: Eventually) -> None:
        """Its pages are quiet when the writer has said so, and no part is written afterwards."""
        prefill, decode = pair
        grant, load = decode.grant(prefill, [3, 4], TokenRange(0, 8))
        push = prefill.open_push(grant)
        assert push.part([20], TokenRange(0, 4)).released.wait(10)
        assert decode.transceiver.cancel_load(load.load_id) is CancelOutcome.IN_FLIGHT
        result = load.wait(3.0)
        assert (result.error, result.in_doubt) == ("cancelled", False)
        before = decode.blocks([4])
        assert push.part([20, 21], TokenRange(4, 8)).released.wait(5)
        assert torch.equal(decode.blocks([4]), before)
        eventually(lambda: push.failures == ["cancelled"])

    def test_due_and_nothing_comes(self, push_world: Any) -> None:
        """The writer lives and writes nothing: a deadline, then its word that it never will."""
        prefill, decode = timed_pair(push_world, transfer_timeout_s=0.3)
        grant, load = decode.grant(prefill, [3, 4], TokenRange(0, 8))
        push = prefill.open_push(grant)
        assert push.part([20], TokenRange(0, 4)).released.wait(10)
        threading.Event().wait(0.5)
        assert not load.done.is_set()  # it may compute for as long as it likes
        decode.pushing.due(load.load_id)
        result = load.wait(5.0)
        assert (result.error, result.in_doubt) == ("the push did not finish in time", False)

    def test_due_and_the_writer_never_began(self, push_world: Any, eventually: Eventually) -> None:
        prefill, decode = timed_pair(push_world, heartbeat_s=0.1)
        grant, load = decode.grant(prefill, [3], TokenRange(0, 4))
        decode.pushing.due(load.load_id)
        result = load.wait(5.0)
        assert (result.error, result.in_doubt) == ("the writer knows nothing of the push", False)
        late = prefill.open_push(grant)
        eventually(lambda: late.failures)
        assert "void" in late.failures[0]

    def test_either_side_closes(self, pair: tuple[Any, Any]) -> None:
        prefill, decode = pair
        grant, load = decode.grant(prefill, [3, 4], TokenRange(0, 8))
        push = prefill.open_push(grant)
        assert push.part([20], TokenRange(0, 4)).released.wait(10)
        prefill.transceiver.close()
        assert push.failures == ["the transceiver was closed"]
        decode.transceiver.close()
        assert load.wait(1.0).in_doubt is True  # nobody has said that the pages are at rest


class TestFaults:
    def test_done_that_is_lost_is_found_out(self, push_world: Any) -> None:
        prefill, decode = timed_pair(push_world, heartbeat_s=0.1)
        prefill.agent.inject(Fault.DROP, Target.NOTIFICATION)
        grant, load = decode.grant(prefill, [3], TokenRange(0, 4))
        prefill.open_push(grant).part([20], TokenRange(0, 4))
        decode.pushing.due(load.load_id)
        result = load.wait(5.0)
        assert (result.error, result.nbytes) == (None, 4 * NBYTES)
        assert moved(prefill, decode, [20], [3])

    def test_done_that_comes_twice_counts_once(self, pair: tuple[Any, Any], eventually: Eventually) -> None:
        prefill, decode = pair
        prefill.agent.inject(Fault.DUPLICATE, Target.NOTIFICATION)
        grant, load = decode.grant(prefill, [3], TokenRange(0, 4))
        prefill.open_push(grant).part([20], TokenRange(0, 4))
        assert load.wait().error is None
        # A later grant of the same pages is not taken for done.
        _, second = decode.grant(prefill, [3], TokenRange(0, 4))
        threading.Event().wait(0.3)
        assert not second.done.is_set()
        assert len(load.results) == 1

    def test_part_in_a_black_hole_is_cut_off_on_both_sides(self, push_world: Any, eventually: Eventually) -> None:
        prefill, decode = timed_pair(push_world, transfer_timeout_s=0.3, heartbeat_s=0.1)
        before = decode.blocks([4])
        grant, load = decode.grant(prefill, [3, 4], TokenRange(0, 8))
        push = prefill.open_push(grant)
        assert push.part([20], TokenRange(0, 4)).released.wait(10)
        prefill.agent.inject(Fault.BLACK_HOLE)
        hold = push.part([20, 21], TokenRange(4, 8))
        result = load.wait(10.0)
        assert (result.error, result.in_doubt) == ("the writer gave up", False)
        assert hold.released.wait(5)
        assert prefill.agent.land_late_writes() == 0
        assert (prefill.transceiver.stats().fences, decode.transceiver.stats().fences) == (1, 1)
        assert torch.equal(decode.blocks([4]), before)
        # The path comes back for the next one.
        grant, load = decode.grant(prefill, [3, 4], TokenRange(0, 8))
        prefill.open_push(grant).part([20, 21], TokenRange(0, 8))
        assert load.wait().error is None
        assert moved(prefill, decode, [20, 21], [3, 4])

    def test_destination_that_has_fenced_somebody_is_met_anew(self, push_world: Any, eventually: Eventually) -> None:
        prefill, decode = timed_pair(push_world, transfer_timeout_s=0.3)
        other = push_world.worker(Role.PREFILL, "p:2")
        grant, load = decode.grant(prefill, [3], TokenRange(0, 4))
        prefill.open_push(grant).part([20], TokenRange(0, 4))
        assert load.wait().error is None
        decode.transceiver.connect("p:2")
        decode.agent.inject(Fault.BLACK_HOLE)
        handle, _ = other.advertise([5], 4)
        assert decode.load(handle, [7], TokenRange(0, 4)).wait().error is not None
        assert decode.transceiver.stats().fences == 1
        grant, load = decode.grant(prefill, [3, 4], TokenRange(0, 8))
        push = prefill.open_push(grant)
        push.part([21, 22], TokenRange(0, 8))
        assert load.wait().error is None
        assert moved(prefill, decode, [21, 22], [3, 4])
        assert prefill.transceiver.stats().fences == 0

    def test_error_of_the_backend(self, push_world: Any) -> None:
        prefill, decode = timed_pair(push_world, heartbeat_s=0.1)
        grant, load = decode.grant(prefill, [3], TokenRange(0, 4))
        push = prefill.open_push(grant)
        prefill.transceiver.connect("d:1")
        prefill.agent.inject(Fault.DROP)
        hold = push.part([20], TokenRange(0, 4))
        result = load.wait(10.0)
        assert (result.error, result.in_doubt) == ("the writer gave up", False)
        assert hold.released.wait(5)
        assert "fails on command" in push.failures[0]

    def test_pages_stay_in_doubt_until_a_blocked_writer_is_at_rest(
        self, push_world: Any, eventually: Eventually
    ) -> None:
        """Neither the deadline nor anything else but the writer's word makes them quiet; they get what it writes."""
        prefill, decode = timed_pair(push_world, transfer_timeout_s=0.2, grace_s=0.1, heartbeat_s=0.1)
        grant, load = decode.grant(prefill, [3, 4], TokenRange(0, 8))
        push = prefill.open_push(grant)
        assert push.part([20], TokenRange(0, 4)).released.wait(10)
        prefill.agent.inject(Fault.BLOCK)
        hold = push.part([20, 21], TokenRange(4, 8))
        decode.pushing.due(load.load_id)
        result = load.wait(5.0)
        assert (result.in_doubt, decode.transceiver.stats().in_doubt) == (True, 1)
        quiet = threading.Event()
        decode.transceiver.when_quiet(load.load_id, quiet.set)
        assert not quiet.wait(0.5)
        assert not hold.released.is_set()
        prefill.agent.unblock()
        assert quiet.wait(10)
        assert hold.released.wait(5)
        after = decode.blocks([3, 4])
        threading.Event().wait(0.2)
        assert torch.equal(decode.blocks([3, 4]), after)
        assert decode.transceiver.stats().in_doubt == 0
        assert len(load.results) == 1

    def test_pages_stay_in_doubt_while_the_path_cannot_be_cut(self, push_world: Any) -> None:
        prefill, decode = timed_pair(push_world, transfer_timeout_s=0.3, heartbeat_s=0.1)
        decode.agent.fail_fences(1)
        grant, load = decode.grant(prefill, [3], TokenRange(0, 4))
        push = prefill.open_push(grant)
        prefill.transceiver.connect("d:1")
        prefill.agent.inject(Fault.BLACK_HOLE)
        push.part([20], TokenRange(0, 4))
        decode.pushing.due(load.load_id)
        result = load.wait(10.0)
        assert result.error is not None
        quiet = threading.Event()
        decode.transceiver.when_quiet(load.load_id, quiet.set)
        assert quiet.wait(10)
        assert decode.transceiver.stats().fences == 1

    def test_pushes_beside_a_black_hole_go_on(self, push_world: Any) -> None:
        prefill, decode = timed_pair(push_world, transfer_timeout_s=5.0)
        prefill.transceiver.connect("d:1")
        grants = [decode.grant(prefill, [block], TokenRange(0, 4)) for block in range(4)]
        prefill.agent.inject(Fault.BLACK_HOLE)
        for block, (grant, _) in enumerate(grants):
            prefill.open_push(grant).part([20 + block], TokenRange(0, 4))
        assert [load.wait(3.0).error for _, load in grants[1:]] == [None] * 3
        assert not grants[0][1].done.is_set()

    def test_writer_that_vanished_is_not_believed_dead(self, mortal_world: Any) -> None:
        """Nobody answers at its address, and its process, which is this one, lives: silence proves nothing."""
        prefill, decode = timed_pair(mortal_world, transfer_timeout_s=0.2, grace_s=0.1, heartbeat_s=0.1)
        grant, load = decode.grant(prefill, [3, 4], TokenRange(0, 8))
        push = prefill.open_push(grant)
        assert push.part([20], TokenRange(0, 4)).released.wait(10)
        mortal_world.targets.pop("p:1")
        decode.pushing.due(load.load_id)
        assert load.wait(5.0).in_doubt is True
        quiet = threading.Event()
        decode.transceiver.when_quiet(load.load_id, quiet.set)
        assert not quiet.wait(0.5)
        mortal_world.targets["p:1"] = prefill.transceiver
        assert quiet.wait(5)

    def test_another_life_of_the_writer_answers(self, mortal_world: Any) -> None:
        prefill, decode = timed_pair(mortal_world, heartbeat_s=0.1)
        grant, load = decode.grant(prefill, [3, 4], TokenRange(0, 8))
        push = prefill.open_push(grant)
        assert push.part([20], TokenRange(0, 4)).released.wait(10)
        mortal_world.kill(prefill)
        mortal_world.worker(Role.PREFILL, "p:1")
        result = load.wait(5.0)
        assert (result.error, result.in_doubt) == ("the writer has restarted", False)
        assert decode.transceiver.stats().fences == 1

    def test_destination_that_died_lets_the_pages_go(self, mortal_world: Any, eventually: Eventually) -> None:
        prefill, decode = timed_pair(mortal_world, heartbeat_s=0.1)
        grant, _ = decode.grant(prefill, [3, 4], TokenRange(0, 8))
        push = prefill.open_push(grant)
        assert push.part([20], TokenRange(0, 4)).released.wait(10)
        mortal_world.kill(decode)
        hold = push.part([20, 21], TokenRange(4, 8))
        assert hold.released.wait(5)
        assert len(push.failures) == 1


def test_grant_for_a_writer_nobody_knows_is_taken_back(pair: tuple[Any, Any]) -> None:
    _, decode = pair
    side = decode.pushing
    results: list[Any] = []
    tables = (decode.table([3]),)
    load_id, _ = side.grant(PeerAddress("nobody:1", "x"), b"d" * 32, tables, TokenRange(0, 4), results.append)
    decode.transceiver.cancel_load(load_id)
    assert [result.error for result in results] == ["cancelled"]
