from dataclasses import replace
from itertools import product

import pytest

from kvferry.core import Resolution, Source
from kvferry.resolution import PairFacts, can_pair, islands


def facts(
    worker: str,
    *,
    backend: str = "NIXL",
    runtime: str | None = "PYTHON",
    manager: str = "V2",
    model: str = "m1",
    kv_dtype: str = "float32",
) -> PairFacts:
    source = Source.DEFAULT if runtime else None
    resolution = Resolution("LlamaForCausalLM", backend, runtime, source, manager, Source.DEFAULT, "because")
    return PairFacts(worker, model, kv_dtype, resolution)


PREFILL = facts("prefill-0")


def test_equal_workers_pair() -> None:
    assert can_pair(PREFILL, facts("decode-0")) is None


def test_where_a_pair_came_from_does_not_matter() -> None:
    other = replace(facts("decode-0").resolution, manager_source=Source.USER, reason="other", warnings=("w",))
    assert can_pair(PREFILL, replace(facts("decode-0"), resolution=other)) is None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (facts("decode-0", model="m2"), ("model fingerprint", "m1", "m2")),
        (facts("decode-0", kv_dtype="bfloat16"), ("KV dtype", "float32", "bfloat16")),
        (facts("decode-0", backend="SHM"), ("backend", "NIXL", "SHM")),
        (facts("decode-0", manager="V1"), ("KV manager", "V1", "V2")),
        (facts("decode-0", runtime="CPP"), ("runtime", "PYTHON", "CPP")),
    ],
)
def test_a_difference_is_named_with_both_workers(other: PairFacts, words: tuple[str, ...]) -> None:
    for sentence in (can_pair(PREFILL, other), can_pair(other, PREFILL)):
        assert sentence is not None
        for word in ("prefill-0", "decode-0", *words):
            assert word in sentence


def test_every_difference_is_named() -> None:
    sentence = can_pair(PREFILL, facts("decode-0", model="m2", backend="SHM"))
    assert sentence is not None
    assert "model fingerprint" in sentence
    assert "backend" in sentence


def test_runtimes_may_differ_on_v1_only() -> None:
    for manager in ("V1", "V2"):
        sentence = can_pair(facts("p", manager=manager), facts("d", runtime="CPP", manager=manager))
        assert (sentence is None) == (manager == "V1")


def test_aggregated_workers_pair_with_nobody() -> None:
    alone = facts("aggregated-0", backend="NONE", runtime=None)
    for other in (PREFILL, facts("aggregated-1", backend="NONE", runtime=None)):
        for sentence in (can_pair(alone, other), can_pair(other, alone)):
            assert sentence is not None
            assert "aggregated-0" in sentence
            assert other.worker in sentence


def _pool() -> list[PairFacts]:
    shapes = product(("NIXL", "SHM"), ("PYTHON", "CPP"), ("V1", "V2"), ("m1", "m2"))
    return [
        facts(f"w{index}", backend=backend, runtime=runtime, manager=manager, model=model)
        for index, (backend, runtime, manager, model) in enumerate(shapes)
    ]


def test_islands_hold_exactly_the_workers_that_can_talk() -> None:
    pool = _pool()
    home = {member.worker: number for number, island in enumerate(islands(pool)) for member in island}
    assert set(home) == {worker.worker for worker in pool}
    for a, b in product(pool, pool):
        if a is not b:
            assert (can_pair(a, b) is None) == (home[a.worker] == home[b.worker])


def test_each_aggregated_worker_is_an_island() -> None:
    alone = [facts(f"aggregated-{index}", backend="NONE", runtime=None) for index in range(3)]
    assert [len(island) for island in islands(alone)] == [1, 1, 1]
    assert islands([]) == []
