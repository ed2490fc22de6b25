from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.core import Resolution, Role, Source
from kvferry.router.facts import WorkerFacts
from kvferry.router.topology import Topology, build_topology

V2 = Resolution("LlamaForCausalLM", "NIXL", "PYTHON", Source.MODEL, "V2", Source.MODEL, "")
V1 = replace(V2, manager="V1")
ALONE = Resolution("LlamaForCausalLM", "NONE", None, None, "V2", Source.MODEL, "")


def facts(name: str, resolution: Resolution = V2, peers: tuple[str, ...] = (), **changes: object) -> WorkerFacts:
    made = WorkerFacts(
        name=name,
        role=Role(name.split("-", maxsplit=1)[0]),
        incarnation=f"{name}-1",
        endpoint=f"{name}:1",
        resolution=resolution,
        model_fingerprint="m",
        kv_dtype="float32",
        peers_ready=frozenset(f"{peer}:1" for peer in peers),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_pairs_need_contact() -> None:
    topology = build_topology(
        [facts("prefill-0"), facts("prefill-1"), facts("decode-0", peers=("prefill-0",)), facts("decode-1")]
    )
    assert topology.pairs == {"prefill-0": ("decode-0",)}
    assert topology.alone == ()
    assert topology.usable
    assert "decode-1 has not made contact with prefill-0 yet" in topology.problems
    assert len(topology.problems) == 3


def test_failed_contact_is_explained() -> None:
    decode = facts("decode-0", peer_errors={"prefill-0:1": "dtype differs"})
    assert build_topology([facts("prefill-0"), decode]).problems == (
        "decode-0 has not made contact with prefill-0: dtype differs",
    )


def test_islands_are_not_left_and_refusals_name_both() -> None:
    peers = ("prefill-0", "prefill-1")
    topology = build_topology(
        [facts("prefill-0", V1), facts("prefill-1"), facts("decode-0", V1, peers), facts("decode-1", V2, peers)]
    )
    assert topology.pairs == {"prefill-0": ("decode-0",), "prefill-1": ("decode-1",)}
    assert len(topology.problems) == 2
    assert all("cannot be paired" in problem and "V1" in problem for problem in topology.problems)


@pytest.mark.parametrize("change", [{"model_fingerprint": "other"}, {"kv_dtype": "bfloat16"}])
def test_incompatible_workers_are_refused_rather_than_served_alone(change: dict[str, str]) -> None:
    topology = build_topology([facts("prefill-0"), facts("decode-0", V2, ("prefill-0",), **change)])
    assert not topology.usable
    assert "prefill-0 and decode-0" in topology.problems[0]


def test_workers_that_need_no_partner() -> None:
    assert build_topology([facts("aggregated-0", ALONE)]).alone == ("aggregated-0",)
    assert build_topology([facts("decode-1"), facts("decode-0")]).alone == ("decode-0", "decode-1")
    assert not build_topology([facts("prefill-0")]).usable


def test_avoided_workers_come_last() -> None:
    topology = Topology({"p0": ("d0",), "p1": ("d0", "d1")}, alone=("a0",))
    assert topology.first_legs(set()) == ["a0", "p0", "p1"]
    assert topology.first_legs({"p1"}) == ["a0", "p0"]
    assert topology.first_legs({"d0"}) == ["a0", "p1"]  # p0 leads to d0 only
    assert topology.first_legs({"a0", "p0", "p1"}) == ["a0", "p0", "p1"]
    assert topology.decode_legs("p1", {"d0"}) == ["d1"]
    assert topology.decode_legs("p0", {"d0"}) == ["d0"]
    assert topology.decode_legs("gone", set()) == []
