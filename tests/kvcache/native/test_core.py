"""The C++ core against hashlib, and against the Python core in lockstep."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from kv_model import WHICH
from manual_copier import ManualCopier

from kvferry.core import ConfigError, GroupKind, KVLayout, block_digests
from kvferry.kvcache import BlockHold, CacheStateError, KVCache, OutOfBlocksError, create_manager
from kvferry.kvcache.core_v2 import CORES, CoreCache
from kvferry.kvcache.groups import GroupRule, Keeps
from kvferry.kvcache.native import core

SIZE = 4
BLOCKS = 24
LAYOUTS = (
    KVLayout(GroupKind.FULL, (0,), 1, 1, tokens_per_block=SIZE),
    KVLayout(GroupKind.WINDOW, (1,), 1, 1, tokens_per_block=SIZE, window=6),
    KVLayout(GroupKind.CHUNKED, (2,), 1, 1, tokens_per_block=SIZE, window=10),
)
HYBRID = (LAYOUTS[0], LAYOUTS[1], KVLayout(GroupKind.SSM, (3,), 1, 1, tokens_per_block=1, planes=1))
SEQUENCES = [[1 + n // (8 + 6 * which) * which for n in range(60)] for which in range(5)]
Pair = tuple[KVCache, KVCache]


@pytest.mark.parametrize("digest", [core.sha256, core.sha256_portable])
def test_sha256_is_the_standard_one(digest: Callable[[bytes], bytes]) -> None:
    rng = random.Random(0)
    for length in [*range(260), 4096, 5001]:
        data = rng.randbytes(length)
        assert digest(data) == hashlib.sha256(data).digest(), f"{length} bytes"


def test_a_block_has_the_digest_everybody_else_computes() -> None:
    """The router computes digests itself: what they are is a contract, not an inner matter of the two cores."""
    tokens = array("I", [5, 0, 2**32 - 1, 7, 11, 13, 17, 19])
    expected = block_digests("salt", tokens, SIZE)
    chain = hashlib.sha256(b"kvferry.block.v1\0salt").digest()
    for at, digest in zip((0, SIZE), expected, strict=True):
        chain = core.sha256(chain + tokens[at : at + SIZE].tobytes())
        assert chain == digest


def test_a_block_table_reads_like_a_list_and_follows_its_cache() -> None:
    cache = create_manager("V2", LAYOUTS[:1], 8 * LAYOUTS[0].slot_nbytes).open("", [1], max_reuse=0)
    table = cache.block_table(0)
    assert list(table) == []
    cache.reserve(5 * SIZE)
    assert isinstance(table, Sequence)
    assert (len(table), table[-1], table[1], table[1:4], table[::-2]) == (5, 4, 1, [1, 2, 3], [4, 2, 0])
    assert list(table) == [0, 1, 2, 3, 4]
    for outside in (5, -6):
        with pytest.raises(IndexError):
            table[outside]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: core.Ledger([("all", 0, 4)], 0, True), ValueError),
        (lambda: core.Ledger([("some", 1, 4)], 4, True), ValueError),
        (lambda: core.Ledger([("window", 0, 4)], 4, True), ValueError),
        (lambda: core.Ledger([("all", 0, -1)], 4, True), ValueError),
        (lambda: core.Ledger([("all", 0, 4)], 4, True).match(b"short", array("I")), ValueError),
        (lambda: core.Ledger([("all", 0, 4)], 4, True).match(bytes(32), array("Q", [1])), TypeError),
        (lambda: core.Ledger([("all", 0, 4)], 4, True).available(1), IndexError),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


def test_broken_invariants_are_assertion_errors() -> None:
    ledger = core.Ledger([("all", 0, 4)], 4, True)
    cache = ledger.open(bytes(32), array("I"), 0, 0)
    cache.grow(2, 2)
    hold = cache.pin(2)
    hold.release()
    with pytest.raises(AssertionError, match="released twice"):
        hold.release()
    with pytest.raises(AssertionError, match="nothing is cached"):
        cache.grow(5, 5)
    cache.close()
    with pytest.raises(AssertionError, match="closed twice"):
        cache.close()


class Lockstep(RuleBasedStateMachine):
    """Every step on both cores; afterwards everything that can be seen of them is compared."""

    layouts: ClassVar[tuple[KVLayout, ...]] = LAYOUTS
    typical: ClassVar[int | None] = None

    def __init__(self) -> None:
        super().__init__()
        nbytes = BLOCKS * sum(layout.slot_nbytes for layout in self.layouts)
        self.copiers = [ManualCopier(), ManualCopier()]
        self.managers = [
            create_manager(
                "V2",
                self.layouts,
                nbytes,
                core=name,
                host_bytes=nbytes // 2,
                typical_tokens=self.typical,
                step_tokens=8,
                copier=copier,
            )
            for name, copier in zip(("cpp", "python"), self.copiers, strict=True)
        ]
        self.nbytes = nbytes
        self.live: list[tuple[Pair, list[int]]] = []
        self.holds: list[tuple[BlockHold, BlockHold]] = []

    @precondition(lambda self: len(self.live) < 8)
    @rule(
        tokens=st.sampled_from(SEQUENCES),
        scope=st.sampled_from(["", "a"]),
        limit=st.integers(0, 60),
        priority=st.integers(-1, 2),
        serve=st.booleans(),
        least=st.integers(0, 3),
        loads=st.booleans(),
    )
    def open(
        self, tokens: list[int], scope: str, limit: int, priority: int, serve: bool, least: int, loads: bool
    ) -> None:
        first, second = (
            m.open(scope, tokens, max_reuse=limit, priority=priority, min_partial=least, loads=loads)
            for m in self.managers
        )
        assert first.lacks_windows == second.lacks_windows
        self.live.append(((first, second), tokens))
        length = max(limit, first.reused)
        loaded = limit if loads else 0
        if serve and self._both(lambda cache: cache.reserve(length, loaded=loaded), (first, second)):
            self._both(lambda cache: cache.advance(length), (first, second))
            self._both(lambda cache: cache.commit(tokens), (first, second))

    @precondition(lambda self: self.live)
    @rule(which=WHICH, capacity=st.integers(0, 70), ahead=st.sampled_from([None, None, 3]), loaded=st.integers(-40, 40))
    def reserve(self, which: int, capacity: int, ahead: int | None, loaded: int) -> None:
        self._both(lambda cache: cache.reserve(capacity, ahead=ahead, loaded=max(0, loaded)), self._any(which)[0])

    @rule(share=st.integers(1, 8))
    def resize(self, share: int) -> None:
        outcomes = []
        for manager in self.managers:
            try:
                manager.resize(self.nbytes * share // 8)
                outcomes.append("")
            except (OutOfBlocksError, ConfigError) as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]

    @precondition(lambda self: self.live)
    @rule(which=WHICH, more=st.integers(0, 20))
    def advance(self, which: int, more: int) -> None:
        self._both(lambda cache: cache.advance(min(60, cache.history + more)), self._any(which)[0])

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def commit(self, which: int) -> None:
        pair, tokens = self._any(which)
        self._both(lambda cache: cache.commit(tokens), pair)

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def pin(self, which: int) -> None:
        pair, _ = self._any(which)
        # Refused while what it would keep is yet to be loaded.
        if not pair[0].suspended and self._both(lambda cache: cache.pin().release(), pair):
            self._keep([cache.pin() for cache in pair])

    @precondition(lambda self: self.live)
    @rule(which=WHICH, quarantine=st.booleans())
    def end(self, which: int, quarantine: bool) -> None:
        entry = self._any(which)
        self.live.remove(entry)
        if quarantine and not entry[0][0].suspended:
            self._keep([cache.quarantine() for cache in entry[0]])
        else:
            self._both(lambda cache: cache.close(), entry[0])

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def snapshot(self, which: int) -> None:
        pair, _ = self._any(which)
        if not pair[0].suspended and 0 < pair[0].committed == pair[0].history:
            taken: list[bool] = []
            if self._both(lambda cache: taken.append(cache.snapshot()), pair):
                assert taken[0] == taken[1]

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def suspend_or_resume(self, which: int) -> None:
        pair, tokens = self._any(which)
        if pair[0].suspended:
            self._both(lambda cache: cache.resume(tokens), pair)
        else:
            self._both(lambda cache: cache.suspend(), pair)
            assert pair[0].suspended == pair[1].suspended

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def prepare_resume(self, which: int) -> None:
        pair, tokens = self._any(which)
        if pair[0].suspended:
            first, second = (cache.prepare_resume(tokens) for cache in pair)
            assert first == second

    @rule(tokens=st.sampled_from(SEQUENCES), scope=st.sampled_from(["", "a"]), length=st.integers(0, 60))
    def prefetch(self, tokens: list[int], scope: str, length: int) -> None:
        first, second = (manager.prefetch(scope, tokens[:length]) for manager in self.managers)
        assert first == second

    @precondition(lambda self: self.copiers[0].waiting)
    @rule(which=WHICH)
    def copy(self, which: int) -> None:
        for copier in self.copiers:
            copier.waiting[which % len(copier.waiting)].make()

    @rule()
    def poll(self) -> None:
        first, second = (manager.poll() for manager in self.managers)
        assert first == second

    @precondition(lambda self: self.holds)
    @rule(which=WHICH)
    def release(self, which: int) -> None:
        pair = self.holds[which % len(self.holds)]
        self.holds.remove(pair)
        for hold in pair:
            hold.release()

    @rule()
    def clear_reuse(self) -> None:
        for manager in self.managers:
            manager.clear_reuse()

    @invariant()
    def alike(self) -> None:
        cpp, python = self.managers
        assert cpp.group_counts() == python.group_counts()
        assert cpp.statistics() == python.statistics()
        assert cpp.tier_counts() == python.tier_counts()
        assert cpp.releasing == python.releasing
        copies = [
            [[(copy.to, copy.sources) for copy in pending.copies] for pending in copier.waiting]
            for copier in self.copiers
        ]
        assert copies[0] == copies[1]
        for ours, theirs in zip(cpp.pools, python.pools, strict=True):
            assert ours.generations.tolist() == theirs.generations.tolist()
        for scope in ("", "a"):
            assert [cpp.match(scope, t) for t in SEQUENCES] == [python.match(scope, t) for t in SEQUENCES]
        for (ours, theirs), _ in self.live:
            assert self._seen(ours) == self._seen(theirs)
        for manager in self.managers:
            manager.check_integrity()

    def _seen(self, cache: KVCache) -> object:
        tables = [(cache.first_block(group), list(cache.block_table(group))) for group in range(len(self.layouts))]
        return cache.reused, cache.committed, cache.history, cache.capacity, tables

    def _any(self, which: int) -> tuple[Pair, list[int]]:
        return self.live[which % len(self.live)]

    def _both(self, call: Callable[[KVCache], object], pair: Pair) -> bool:
        """Whether it succeeded; both must say the same, in the same words."""
        outcomes = []
        for cache in pair:
            try:
                call(cache)
                outcomes.append("")
            except (OutOfBlocksError, CacheStateError) as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        return not outcomes[0]

    def _keep(self, holds: list[BlockHold]) -> None:
        first, second = holds
        assert first.tables == second.tables
        self.holds.append((first, second))


class HybridLockstep(Lockstep):
    layouts = HYBRID


class SharedLockstep(Lockstep):
    typical = 60


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", [Lockstep, SharedLockstep])
def test_both_cores_take_the_same_decisions(machine: type[Lockstep], few_histories: settings) -> None:
    run_state_machine_as_test(machine, settings=few_histories)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", [Lockstep, SharedLockstep])
def test_both_cores_take_the_same_decisions_for_long(machine: type[Lockstep], histories: settings) -> None:
    run_state_machine_as_test(machine, settings=histories)


@pytest.mark.timeout(1800)
def test_both_cores_take_the_same_decisions_with_states(few_histories: settings) -> None:
    run_state_machine_as_test(HybridLockstep, settings=few_histories)


def test_both_cores_keep_the_slabs_of_a_large_pool_alike() -> None:
    """Free runs of tens of thousands of slots, cut and joined in their middle."""
    rng, slots, per_slab = random.Random(0), 300_000, 10
    rules = [GroupRule(Keeps.ALL, 0, SIZE)]
    ledgers = [CORES.get(name)(rules, [slots], True, False, [per_slab]) for name in ("cpp", "python")]
    withheld: set[int] = set()
    caches: list[list[CoreCache]] = []
    for _ in range(200):
        slab = rng.choice([*withheld]) if withheld and rng.random() < 0.3 else rng.randrange(slots // per_slab)
        its = range(slab * per_slab, (slab + 1) * per_slab)
        if slab in withheld:
            withheld.remove(slab)
            for ledger in ledgers:
                ledger.give_back(0, its)
        elif (False, slab) in ledgers[0].first_idle_slabs(0, slots):
            withheld.add(slab)
            for ledger in ledgers:
                ledger.withhold(0, its)
        if rng.random() < 0.3:
            opened = [ledger.open(bytes(32), array("I"), 0, False) for ledger in ledgers]
            blocks = rng.randrange(1, 2_000)
            assert opened[0].grow(blocks, blocks) == opened[1].grow(blocks, blocks)
            caches.append(opened)
        elif caches and rng.random() < 0.3:
            for cache in caches.pop(rng.randrange(len(caches))):
                cache.close()
        assert ledgers[0].idle_slabs(0) == ledgers[1].idle_slabs(0)
        assert ledgers[0].first_idle_slabs(0, 50) == ledgers[1].first_idle_slabs(0, 50)
    assert len(withheld) > 20
    assert ledgers[0].counts() == ledgers[1].counts()
    ledgers[0].check_integrity()


@pytest.mark.parametrize("seed", range(3))
def test_both_cores_agree_over_a_long_history(seed: int) -> None:
    """Thousands of steps on a larger pool: free runs, eviction and the tree get into states short histories do not."""
    rng = random.Random(seed)
    nbytes = 200 * sum(layout.slot_nbytes for layout in LAYOUTS)
    managers = [create_manager("V2", LAYOUTS, nbytes, core=name) for name in ("cpp", "python")]
    live: list[tuple[list[KVCache], list[int]]] = []
    for _ in range(1500):
        if live and rng.random() < 0.4:
            caches, _tokens = live.pop(rng.randrange(len(live)))
            for cache in caches:
                cache.close()
            continue
        prefix = [rng.randrange(4)] * rng.randrange(0, 80)
        tokens = prefix + [rng.randrange(1000) for _ in range(rng.randrange(1, 120))]
        priority = rng.randrange(3)
        caches = [m.open("", tokens, max_reuse=len(tokens), priority=priority) for m in managers]
        served = []
        for cache in caches:
            try:
                cache.reserve(len(tokens))
            except OutOfBlocksError:
                cache.close()
                continue
            cache.advance(len(tokens))
            cache.commit(tokens)
            served.append(cache)
        assert len(served) in (0, 2)
        if served:
            live.append((served, tokens))
        for group in range(len(LAYOUTS)):
            tables = [list(cache.block_table(group)) for cache in served]
            assert tables == [] or tables[0] == tables[1]
    assert managers[0].counts() == managers[1].counts()
    for manager in managers:
        manager.check_integrity()
