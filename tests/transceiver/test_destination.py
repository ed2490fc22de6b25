"""Loads that must not succeed, and what is left of them: handles, generations, faults of agent and peer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from kvferry.core import Role, TokenRange
from kvferry.transceiver import CancelOutcome, FailureClass
from kvferry.transceiver.faulty import Fault

Eventually = Callable[..., None]


class TestHandles:
    def test_malformed(self, pair: tuple[Any, Any]) -> None:
        _, decode = pair
        assert "malformed" in decode.load(b"\xff\xff\xff", [1], TokenRange(0, 4)).wait().error
        assert decode.transceiver.stats().failures == {FailureClass.HANDLE: 1}

    def test_forged(self, pair: tuple[Any, Any]) -> None:
        prefill, decode = pair
        handle, hold = prefill.advertise([5], 4)
        forged = bytearray(handle)
        forged[-1] ^= 1
        load = decode.load(bytes(forged), [3], TokenRange(0, 4))
        assert "not made by the worker it names" in load.wait().error
        assert not hold.released.is_set()
        assert prefill.transceiver.withdraw(bytes(forged)) is CancelOutcome.NOT_FOUND

    def test_made_for_another_prompt(self, pair: tuple[Any, Any]) -> None:
        prefill, decode = pair
        before = decode.blocks([3])
        handle, _ = prefill.advertise([5], 4)
        assert "another prompt" in decode.load(handle, [3], TokenRange(0, 4), b"x" * 32).wait().error
        assert torch.equal(decode.blocks([3]), before)

    def test_used_twice(self, pair: tuple[Any, Any]) -> None:
        prefill, decode = pair
        handle, _ = prefill.advertise([5], 4)
        assert decode.load(handle, [3], TokenRange(0, 4)).wait().error is None
        assert "used already" in decode.load(handle, [7], TokenRange(0, 4)).wait().error

    def test_range_beyond_what_is_covered(self, pair: tuple[Any, Any]) -> None:
        prefill, decode = pair
        handle, _ = prefill.advertise([5, 6], 7)
        assert "covers" in decode.load(handle, [3, 4], TokenRange(0, 8)).wait().error

    def test_of_a_former_life(self, mortal_world: Any, mortal_pair: tuple[Any, Any]) -> None:
        prefill, decode = mortal_pair
        stale, _ = prefill.advertise([5], 4)
        fresh, _ = prefill.advertise([6], 4)
        assert decode.load(fresh, [3], TokenRange(0, 4)).wait().error is None
        mortal_world.kill(prefill)
        reborn = mortal_world.worker(Role.PREFILL, "p:1")
        assert "not reachable" in decode.load(stale, [3], TokenRange(0, 4)).wait().error
        assert "restarted" in decode.load(stale, [3], TokenRange(0, 4)).wait().error
        handle, _ = reborn.advertise([8], 4)
        assert decode.load(handle, [3], TokenRange(0, 4)).wait().error is None
        assert torch.equal(decode.blocks([3]), reborn.blocks([8]))
        assert decode.transceiver.connect("p:1").incarnation == reborn.transceiver.local.incarnation

    def test_block_outside_the_local_pool(self, pair: tuple[Any, Any]) -> None:
        prefill, decode = pair
        handle, hold = prefill.advertise([5], 4)
        result = decode.load(handle, [32], TokenRange(0, 4)).wait()
        assert "outside its pool of 32 blocks" in result.error
        assert decode.transceiver.stats().failures == {FailureClass.PLAN: 1}
        assert hold.released.wait(5)


class TestGenerations:
    def test_a_reused_block_fails_the_load(self, pair: tuple[Any, Any], eventually: Eventually) -> None:
        prefill, decode = pair
        handle, hold = prefill.advertise([5, 6], 8)
        prefill.pool.generations[6] += 1
        result = decode.load(handle, [3, 4], TokenRange(0, 8)).wait()
        assert "1 of 2 source blocks were reused" in result.error
        assert result.in_doubt is False
        assert decode.transceiver.stats().failures == {FailureClass.GENERATION: 1}
        eventually(hold.released.is_set)

    def test_a_reused_block_outside_the_range_does_not_matter(self, pair: tuple[Any, Any]) -> None:
        prefill, decode = pair
        handle, _ = prefill.advertise([5, 6], 8)
        prefill.pool.generations[5] += 1
        assert decode.load(handle, [3, 4], TokenRange(4, 8)).wait().error is None

    def test_a_block_reused_while_the_data_was_under_way(self, pair: tuple[Any, Any], eventually: Eventually) -> None:
        prefill, decode = pair
        decode.transceiver.connect("p:1")
        decode.agent.inject(Fault.DELAY, delay_s=0.3)
        handle, _ = prefill.advertise([5], 4)
        load = decode.load(handle, [3], TokenRange(0, 4))
        eventually(lambda: torch.equal(decode.blocks([3]), prefill.blocks([5])))
        prefill.pool.generations[5] += 1
        assert "reused" in load.wait().error

    def test_a_corrupted_word_fails_the_load(self, pair: tuple[Any, Any]) -> None:
        prefill, decode = pair
        decode.transceiver.connect("p:1")
        decode.agent.inject(Fault.CORRUPT, skip=1)
        handle, _ = prefill.advertise([5], 4)
        assert "reused" in decode.load(handle, [3], TokenRange(0, 4)).wait().error


class TestFaults:
    def test_a_black_hole_times_out_is_fenced_and_never_lands(self, world: Any) -> None:
        prefill = world.worker(Role.PREFILL, "p:1")
        decode = world.worker(Role.DECODE, "d:1", transfer_timeout_s=0.3)
        decode.transceiver.connect("p:1")
        decode.agent.inject(Fault.BLACK_HOLE)
        before = decode.blocks([3])
        lost, hold = prefill.advertise([5], 4)
        result = decode.load(lost, [3], TokenRange(0, 4)).wait()
        assert "did not finish in time" in result.error
        assert result.in_doubt is False  # fenced before it was reported
        assert decode.transceiver.stats().failures == {FailureClass.TIMEOUT: 1}
        assert decode.transceiver.stats().fences == 1
        assert decode.agent.land_late_writes() == 0
        assert torch.equal(decode.blocks([3]), before)
        assert hold.released.wait(5)  # told over the control channel, the data path being cut
        handle, _ = prefill.advertise([6], 4)
        assert decode.load(handle, [3], TokenRange(0, 4)).wait().error is None
        assert torch.equal(decode.blocks([3]), prefill.blocks([6]))

    def test_a_fence_that_fails_leaves_the_load_in_doubt_until_one_succeeds(self, world: Any) -> None:
        prefill = world.worker(Role.PREFILL, "p:1")
        decode = world.worker(Role.DECODE, "d:1", transfer_timeout_s=0.3)
        decode.transceiver.connect("p:1")
        decode.agent.inject(Fault.BLACK_HOLE)
        decode.agent.fail_fences(1)
        handle, _ = prefill.advertise([5], 4)
        load = decode.load(handle, [3], TokenRange(0, 4))
        result = load.wait()
        assert (result.in_doubt, decode.transceiver.stats().in_doubt) == (True, 1)
        quiet = threading.Event()
        decode.transceiver.when_quiet(load.load_id, quiet.set)
        assert not quiet.is_set()
        assert quiet.wait(5)
        assert decode.transceiver.stats().in_doubt == 0
        assert decode.agent.land_late_writes() == 0
        again = threading.Event()
        decode.transceiver.when_quiet(load.load_id, again.set)
        assert again.is_set()
        assert len(load.results) == 1

    def test_a_submit_that_never_returns_is_reported_in_doubt_in_time(self, world: Any) -> None:
        prefill = world.worker(Role.PREFILL, "p:1")
        decode = world.worker(Role.DECODE, "d:1", transfer_timeout_s=0.2, grace_s=0.1)
        decode.transceiver.connect("p:1")
        decode.agent.inject(Fault.BLOCK)
        handle, _ = prefill.advertise([5], 4)
        load = decode.load(handle, [3], TokenRange(0, 4))
        result = load.wait(5)
        assert result.in_doubt is True
        quiet = threading.Event()
        decode.transceiver.when_quiet(load.load_id, quiet.set)
        assert not quiet.is_set()
        decode.agent.unblock()
        assert quiet.wait(5)
        assert len(load.results) == 1

    def test_loads_beside_a_black_hole_go_on(self, world: Any) -> None:
        prefill = world.worker(Role.PREFILL, "p:1")
        decode = world.worker(Role.DECODE, "d:1", transfer_timeout_s=1.5)
        decode.transceiver.connect("p:1")
        handles = [prefill.advertise([block], 4)[0] for block in range(4)]
        decode.agent.inject(Fault.BLACK_HOLE)
        lost = decode.load(handles[0], [10], TokenRange(0, 4))
        others = [decode.load(handle, [11 + n], TokenRange(0, 4)) for n, handle in enumerate(handles[1:])]
        assert [load.wait(1.2).error for load in others] == [None] * 3
        assert not lost.done.is_set()
        assert lost.wait().error is not None

    def test_an_operation_taken_along_by_a_fence_starts_over(self, world: Any, eventually: Eventually) -> None:
        apart_s = 2.0 if world.backend == "mooncake" else 0.5  # a fence of Mooncake takes a second
        prefill = world.worker(Role.PREFILL, "p:1")
        decode = world.worker(Role.DECODE, "d:1", transfer_timeout_s=2 * apart_s)
        decode.transceiver.connect("p:1")
        decode.agent.inject(Fault.BLACK_HOLE, count=1)
        first, _ = prefill.advertise([1], 4)
        second, _ = prefill.advertise([2], 4)
        lost = decode.load(first, [10], TokenRange(0, 4))
        eventually(lambda: not lost.done.is_set() and prefill.transceiver.stats().open_holds == 2)
        threading.Event().wait(apart_s)
        decode.agent.inject(Fault.BLACK_HOLE, count=1)
        innocent = decode.load(second, [11], TokenRange(0, 4))
        assert lost.wait().error is not None
        assert innocent.wait().error is None
        assert torch.equal(decode.blocks([11]), prefill.blocks([2]))

    def test_an_error_of_the_backend_ends_the_load_after_a_fence(self, pair: tuple[Any, Any]) -> None:
        prefill, decode = pair
        decode.transceiver.connect("p:1")
        decode.agent.inject(Fault.DROP)
        handle, _ = prefill.advertise([5], 4)
        result = decode.load(handle, [3], TokenRange(0, 4)).wait()
        assert "fails on command" in result.error
        assert (result.in_doubt, decode.transceiver.stats().fences) == (False, 1)
        assert decode.transceiver.stats().failures == {FailureClass.BACKEND: 1}

    def test_fifty_black_holes_at_once(self, world: Any) -> None:
        """The first to time out has the others fenced along; those start over, and none of them is in doubt."""
        prefill = world.worker(Role.PREFILL, "p:1", blocks=64)
        decode = world.worker(Role.DECODE, "d:1", blocks=64, transfer_timeout_s=0.5)
        decode.transceiver.connect("p:1")
        decode.agent.inject(Fault.BLACK_HOLE, count=50)
        handles = [prefill.advertise([block], 4) for block in range(50)]
        loads = [decode.load(handle, [block], TokenRange(0, 4)) for block, (handle, _) in enumerate(handles)]
        results = [load.wait() for load in loads]
        assert results[0].error is not None
        assert not any(result.in_doubt for result in results)
        arrived = [block for block, result in enumerate(results) if result.error is None]
        assert torch.equal(decode.blocks(arrived), prefill.blocks(arrived))
        assert decode.agent.land_late_writes() == 0
        assert all(hold.released.wait(5) for _, hold in handles)
        handle, _ = prefill.advertise([60], 4)
        assert decode.load(handle, [60], TokenRange(0, 4)).wait().error is None

    def test_a_dead_source_ends_the_load(self, mortal_world: Any, mortal_pair: tuple[Any, Any]) -> None:
        prefill, decode = mortal_pair
        handle, _ = prefill.advertise([5], 4)
        mortal_world.kill(prefill)
        assert "connection refused" in decode.load(handle, [3], TokenRange(0, 4)).wait().error
        assert decode.transceiver.stats().failures == {FailureClass.PEER: 1}

    def test_a_source_that_dies_after_first_contact(self, mortal_world: Any, mortal_pair: tuple[Any, Any]) -> None:
        prefill, decode = mortal_pair
        decode.transceiver.connect("p:1")
        handle, _ = prefill.advertise([5], 4)
        mortal_world.kill(prefill)
        result = decode.load(handle, [3], TokenRange(0, 4)).wait()
        assert "not reachable" in result.error

    def test_a_source_that_dies_between_begin_and_data(self, mortal_world: Any, mortal_pair: tuple[Any, Any]) -> None:
        prefill, decode = mortal_pair
        decode.transceiver.connect("p:1")
        decode.agent.inject(Fault.BLOCK)
        handle, _ = prefill.advertise([5], 4)
        load = decode.load(handle, [3], TokenRange(0, 4))
        mortal_world.kill(prefill)
        decode.agent.unblock()
        assert load.wait().error is not None
