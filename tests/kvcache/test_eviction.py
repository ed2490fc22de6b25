"""The order of eviction, against an exact least-recently-used simulation."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvferry.kvcache import KVCache, KVCacheManager
from kvferry.kvcache.eviction import EvictionQueue

MakeManager = Callable[..., KVCacheManager]
Serve = Callable[..., KVCache]
SIZE = 4


@dataclass
class ExactLRU:
    """A prefix cache that looks at everything it holds whenever it must choose. Ties evict the deepest block."""

    capacity: int
    now: int = 0
    used: dict[tuple[int, ...], int] = field(default_factory=dict)

    def request(self, blocks: list[int]) -> int:
        """Serves a sequence of block contents and returns how many of its blocks were there."""
        self.now += 1
        path = [tuple(blocks[: n + 1]) for n in range(len(blocks))]
        hits = next((n for n, prefix in enumerate(path) if prefix not in self.used), len(path))
        for prefix in path[:hits]:
            self.used[prefix] = self.now
        while len(self.used) + len(path) - hits > self.capacity:
            idle = [prefix for prefix in self.used if self.used[prefix] != self.now]
            del self.used[min(idle, key=lambda prefix: (self.used[prefix], -len(prefix)))]
        for prefix in path[hits:]:
            self.used[prefix] = self.now
        return hits


def conversations(rng: random.Random, requests: int) -> list[list[int]]:
    """Block contents of each request: new conversations behind one of a few system prompts, and further turns."""
    systems = [[1000 + s] * (2 + s) for s in range(4)]
    open_ended: list[list[int]] = []
    trace = []
    for number in range(requests):
        if open_ended and rng.random() < 0.6:
            turn = rng.choice(open_ended[-12:])
        else:
            turn = list(rng.choice(systems))
            open_ended.append(turn)
        turn.extend(number * 8 + n for n in range(rng.randint(1, 5)))
        del turn[24:]
        trace.append(list(turn))
    return trace


@pytest.mark.parametrize("capacity", [24, 40, 100, 400, 10_000])
def test_hits_equal_those_of_an_exact_lru(capacity: int, make_manager: MakeManager, serve: Serve) -> None:
    trace = conversations(random.Random(capacity), 400)
    manager, exact = make_manager(capacity), ExactLRU(capacity)
    hits = []
    for blocks in trace:
        tokens = [block for block in blocks for _ in range(SIZE)]
        cache = serve(manager, tokens, reuse=len(tokens))
        hits.append((cache.reused // SIZE, exact.request(blocks)))
        cache.close()
    assert [mine for mine, _ in hits] == [theirs for _, theirs in hits]
    manager.check_integrity()
    assert sum(mine for mine, _ in hits) > 0


def test_with_room_for_all_every_repeated_block_is_a_hit(make_manager: MakeManager, serve: Serve) -> None:
    manager, seen, expected, hits = make_manager(10_000), set[tuple[int, ...]](), 0, 0
    for blocks in conversations(random.Random(1), 200):
        tokens = [block for block in blocks for _ in range(SIZE)]
        prefixes = [tuple(blocks[: n + 1]) for n in range(len(blocks))]
        expected += sum(prefix in seen for prefix in prefixes)
        seen.update(prefixes)
        cache = serve(manager, tokens, reuse=len(tokens))
        hits += cache.reused // SIZE
        cache.close()
    assert hits == expected > 0


def test_the_queue_goes_by_priority_then_by_age() -> None:
    queue = EvictionQueue()
    for slot, priority in [(1, 5), (2, 0), (3, 0), (4, -1)]:
        queue.push(slot, priority)
    assert list(queue) == [4, 2, 3, 1]
    queue.remove(2)
    queue.push(2, 0)
    queue.remove(4)
    assert (queue.oldest(), len(queue), 4 in queue) == (3, 3, False)
    assert list(queue) == [3, 2, 1]
