"""Which workers a configuration asks for, and refusals before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_checkpoint
from families import FAMILIES
from transformers import Gemma3TextConfig

from kvferry.cluster.config import WorkerConfig
from kvferry.cluster.config_sources import load_config
from kvferry.cluster.roles import model_limits, plan_roles, router_settings, threads_per_rank
from kvferry.core import CheckpointError, ConfigError, ModelLimits, Role
from kvferry.router import Flow, Schedule

LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "max_position_embeddings": 64}


def _plan(**flags: Any) -> list[Any]:
    settings = {key.replace("__", "."): value for key, value in flags.items()}
    return plan_roles(load_config(flags=settings, environ={}), LLAMA, {})


def test_prefill_and_decode_resolve_to_the_preferred_pair() -> None:
    plans = _plan(prefill__count=2, decode__count=1)
    assert [(plan.role, plan.names) for plan in plans] == [
        (Role.PREFILL, ("prefill-0", "prefill-1")),
        (Role.DECODE, ("decode-0",)),
    ]
    assert {(plan.resolution.transceiver, plan.resolution.manager) for plan in plans} == {("NIXL/PYTHON", "V2")}


def test_a_backend_that_listens_everywhere_must_be_allowed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.cluster.roles.probe_libraries", lambda *_: frozenset())
    flags = {"transceiver__backend": "MOONCAKE", "prefill__count": 1, "decode__count": 1}
    with pytest.raises(ConfigError, match="MOONCAKE listens on every network interface") as raised:
        _plan(**flags)
    assert raised.value.field == "insecure_bind"
    plans = _plan(**flags, insecure_bind=True)
    assert {plan.resolution.transceiver for plan in plans} == {"MOONCAKE/PYTHON"}


def test_backend_none_has_one_role_without_a_transceiver() -> None:
    (plan,) = _plan(transceiver__backend="NONE", decode__count=2)
    assert plan.role is Role.AGGREGATED
    assert plan.names == ("aggregated-0", "aggregated-1")
    assert plan.resolution.runtime is None


def test_a_connector_makes_both_roles_run_v1() -> None:
    plans = _plan(kv_cache__connector="directory", kv_cache__connector_address="/tmp/kv")
    assert {(plan.resolution.manager, plan.resolution.manager_source.value) for plan in plans} == {("V1", "demoted")}


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"kv_cache__connector": "lmcache"}, "kv_cache.connector"),
        ({"kv_cache__connector_address": "/tmp/kv"}, "kv_cache.connector_address"),
        ({"kv_cache__connector": "directory", "kv_cache__prefix_reuse": False}, "kv_cache.connector"),
        ({"kv_cache__manager": "V1", "kv_cache__disk_bytes": 1 << 20}, "kv_cache.disk_bytes"),
        ({"transceiver__backend": "UCX", "transceiver__runtime": "PYTHON"}, "transceiver.runtime"),
        ({"transceiver__runtime": "CPP", "kv_cache__manager": "V2"}, "kv_cache.manager"),
        (
            {"transceiver__runtime": "PYTHON", "transceiver__transfer_timeout_ms": None},
            "transceiver.transfer_timeout_ms",
        ),
        ({"transceiver__backend": "MPI"}, "transceiver.backend"),
        ({"transceiver__backend": "NIXXL"}, "transceiver.backend"),
    ],
)
def test_impossible_pairs_name_the_setting(flags: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _plan(**flags)
    assert caught.value.field == field


def test_caches_of_two_types_are_refused() -> None:
    with pytest.raises(ConfigError, match="KV dtype is int8 on prefill workers and bf16 on decode workers") as caught:
        _plan(kv_cache__dtype="int8", decode__kv_cache__dtype="bf16")
    assert caught.value.field == "kv_cache.dtype"
    plans = _plan(kv_cache__dtype="int8", decode__engine__precision="int8")
    assert [plan.config.kv_cache.dtype for plan in plans] == ["int8", "int8"]
    assert [plan.config.engine.precision for plan in plans] == ["fp32", "int8"]


def test_overrides_that_keep_roles_apart_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"V1.*V2|V2.*V1"):
        _plan(decode__kv_cache__manager="V1")


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"prefill.kv_cache.manager": "V1"}, "kv_cache.manager"),
        ({"prefill.transceiver.runtime": "CPP"}, "transceiver.runtime"),
    ],
)
def test_what_keeps_roles_apart_is_named(flags: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match="cannot be paired") as caught:
        _plan(**flags)
    assert caught.value.field == field


def test_planning_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys\n"
        "from kvferry.cluster.config_sources import load_config\n"
        "from kvferry.cluster.roles import early_model_config, plan_roles\n"
        "plan_roles(load_config(environ={}), early_model_config('smollm2'), {})\n"
        "assert not {'torch', 'ray', 'transformers'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(("workers", "cores", "threads"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (4, 2, 1), (0, 2, 2)])
def test_cores_are_shared_out(workers: int, cores: int, threads: int) -> None:
    assert threads_per_rank(WorkerConfig(), workers, cores) == threads


def test_an_explicit_thread_count_is_kept() -> None:
    config = WorkerConfig.model_validate({"engine": {"threads": 5}})
    assert threads_per_rank(config, ranks=4, cores=2) == 5


def test_limits_come_from_the_text_part_of_a_wrapper() -> None:
    nowhere = Path("never read")
    assert model_limits(nowhere, LLAMA, None) == ModelLimits(100, 64)
    assert model_limits(nowhere, LLAMA, 32) == ModelLimits(100, 32)
    wrapper = {"architectures": ["X"], "text_config": {"vocab_size": 7, "max_position_embeddings": 9}}
    assert model_limits(nowhere, wrapper, None) == ModelLimits(7, 9)


def test_a_size_that_config_json_leaves_out_is_what_the_model_class_means_by_it(tmp_path: Path) -> None:
    model_dir = random_checkpoint(FAMILIES["gemma3"](), tmp_path)
    path = model_dir / "config.json"
    config = json.loads(path.read_text())
    assert model_limits(model_dir, config, None) == ModelLimits(211, 512)
    del config["max_position_embeddings"]
    path.write_text(json.dumps(config))
    assert model_limits(model_dir, config, None) == ModelLimits(211, Gemma3TextConfig().max_position_embeddings)
    assert model_limits(model_dir, config, 600) == ModelLimits(211, 600)
    with pytest.raises(ConfigError, match=r"max_context_tokens is 999999, but the model was made for 131072"):
        model_limits(model_dir, config, 999_999)


def test_limits_beyond_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="the model was made for 64"):
        model_limits(Path("never read"), LLAMA, 65)
    with pytest.raises(CheckpointError, match="vocab_size must be a positive integer, got 0"):
        model_limits(Path("never read"), {**LLAMA, "vocab_size": 0}, None)


@pytest.mark.parametrize(
    ("settings", "schedule", "flow"),
    [
        ({}, Schedule.PREFILL_FIRST, Flow.PUSH),
        ({"router.schedule": "decode_first", "router.flow": "pull"}, Schedule.DECODE_FIRST, Flow.PULL),
    ],
)
def test_the_router_is_told_who_comes_first_and_who_moves_kv(
    settings: dict[str, str], schedule: Schedule, flow: Flow
) -> None:
    config = load_config(flags={"model": "m", **settings}, environ={})
    told = router_settings(config, Path("never read"), ModelLimits(100, 64), grpc_port=0, http_port=0)
    assert (told.schedule, told.flow) == (schedule, flow)
    with pytest.raises(ConfigError, match=r"router\.flow"):
        load_config(flags={"router.flow": "sideways"}, environ={})
