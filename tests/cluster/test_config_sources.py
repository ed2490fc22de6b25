"""One configuration from a file, the environment and flags; errors that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry.cluster import config_sources
from kvferry.cluster.config_sources import (
    SHORT_FLAGS,
    config_keys,
    flag_key,
    load_config,
    parse_flags,
    state_dir,
    worker_config,
)
from kvferry.core import ConfigError, Role
from kvferry.resolution import Card


def _file(tmp_path: Path, content: Any) -> Path:
    file = tmp_path / "kvferry.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return file


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    file = _file(tmp_path, {"engine": {"max_batch": 8, "threads": 3}, "prefill": 2})
    config = load_config(file, parse_flags(["--engine.max_batch", "16", "--decode", "3"]), {})
    assert (config.engine.max_batch, config.engine.threads, config.engine.step_token_budget) == (16, 3, 512)
    assert (config.role_count(Role.PREFILL), config.role_count(Role.DECODE)) == (2, 3)


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    config = load_config(_file(tmp_path, ""), environ={})
    assert config.transceiver.transfer_timeout_ms == 60_000
    assert config.engine.max_step_ms == 250


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--prefill", "2"], {"prefill.count": 2}),
        (["--prefill=2"], {"prefill.count": 2}),
        (["--backend", "ucx"], {"transceiver.backend": "ucx"}),
        (["--transfer-timeout-ms", "null"], {"transceiver.transfer_timeout_ms": None}),
        (["--engine.max-batch", "4"], {"engine.max_batch": 4}),
        (["--ray-address", "10.0.0.1:6379"], {"ray_address": "10.0.0.1:6379"}),
        (["--insecure-bind", "true"], {"insecure_bind": True}),
        (["--decode.kv_cache.bytes", "2GiB"], {"decode.kv_cache.bytes": "2GiB"}),
    ],
)
def test_flags_are_typed_like_the_file(arguments: list[str], expected: dict[str, Any]) -> None:
    assert parse_flags(arguments) == expected


def test_every_key_is_a_flag() -> None:
    keys = [key for key, _ in config_keys()]
    assert len(keys) == len(set(keys)) > 50
    assert all(flag_key(key) == key for key in keys)
    assert set(SHORT_FLAGS.values()) <= set(keys)


def test_every_key_has_a_description() -> None:
    assert [key for key, field in config_keys() if not field.description] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine.max_bach", "4"], "did you mean --engine.max_batch"),
        (["--engine.max_batch"], "needs a value"),
        (["engine.max_batch", "4"], "unexpected argument"),
    ],
)
def test_unknown_flags_name_the_nearest(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_flags(arguments)


@pytest.mark.parametrize(
    ("content", "field", "message"),
    [
        ({"engine": {"max_bach": 4}}, "engine.max_bach", "unknown configuration key engine.max_bach.*engine.max_batch"),
        ({"enginee": {}}, "enginee", "unknown configuration key"),
        ({"engine": {"max_batch": 0}}, "engine.max_batch", "greater than or equal to 1, got 0"),
        ({"engine": {"threads": "many"}}, "engine.threads", "valid integer.*'many'"),
        ({"decode": {"engine": {"max_batch": -1}}}, "decode.engine.max_batch", "greater than or equal to 1"),
        ({"decode": {"engine": {"max_bach": 1}}}, "decode.engine.max_bach", "unknown.*decode.engine.max_batch"),
        ({"decode": {"count": -1}}, "decode.count", "greater than or equal to 0"),
        ({"prefill": 0}, "prefill.count", "at least 1.*NONE"),
        ({"transceiver": {"backend": "NONE"}, "decode": 0}, "decode.count", "at least 1 on backend NONE"),
        ({"transceiver": {"runtime": "RUST"}}, "transceiver.runtime", "'auto', 'CPP' or 'PYTHON', got 'RUST'"),
        ({"transceiver": {"transfer_timeout_ms": 0}}, "transceiver.transfer_timeout_ms", "greater than or equal to 1"),
        ({"kv_cache": {"manager": "V3"}}, "kv_cache.manager", "'auto', 'V1' or 'V2'"),
        ({"kv_cache": {"core": "rust"}}, "kv_cache.core", "'cpp' or 'python'"),
        ({"kv_cache": {"bytes": "plenty"}}, "kv_cache.bytes", "a size such as 512MiB"),
        ({"router": {"grpc_port": 70_000}}, "router.grpc_port", "less than or equal to 65535"),
        ({"host": "0.0.0.0"}, "host", "insecure_bind"),
        ({"worker_host": "auto"}, "worker_host", "insecure_bind"),
        ({"host": "my-box"}, "host", "an IP address"),
        ({"engine": {"speculative": "two-model"}}, "engine.speculative", "not built"),
        ({"engine": {"lora_adapters": ["a"]}}, "engine.lora_adapters", "not built"),
        ({"decode": {"transceiver": {"backend": "SHM"}}}, "decode.transceiver.backend", "share one backend"),
    ],
)
def test_bad_values_name_key_and_limit(tmp_path: Path, content: Any, field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(_file(tmp_path, content), environ={})
    assert caught.value.field == field


@pytest.mark.parametrize("content", ["- a list", "a: [", "just text"])
def test_files_that_hold_no_settings(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(_file(tmp_path, content), environ={})
    assert caught.value.field == "config"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read configuration .*none\.yaml"):
        load_config(tmp_path / "none.yaml")


def test_role_overrides_apply_to_their_role_only(tmp_path: Path) -> None:
    content = {"engine": {"max_batch": 8}, "decode": {"engine": {"max_batch": 32}, "kv_cache": {"bytes": "2GiB"}}}
    config = load_config(_file(tmp_path, content), environ={})
    prefill, decode = worker_config(config, Role.PREFILL), worker_config(config, Role.DECODE)
    assert (prefill.engine.max_batch, prefill.kv_cache.bytes) == (8, 512 << 20)
    assert (decode.engine.max_batch, decode.kv_cache.bytes) == (32, 2 << 30)


def test_a_models_defaults_lie_over_ours_and_under_what_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card("A", defaults={"engine": {"max_batch": 3, "max_queued": 5, "step_token_budget": 7}})
    monkeypatch.setattr(config_sources, "find_card", lambda model_config: card)
    # 64 is also our default: set is set.
    config = load_config(flags={"engine.max_batch": 64, "decode.engine.max_queued": 6}, environ={})
    engine = worker_config(config, Role.DECODE, {"architectures": ["A"]}).engine
    assert (engine.max_batch, engine.max_queued, engine.step_token_budget, engine.max_step_ms) == (64, 6, 7, 250.0)
    assert worker_config(config, Role.DECODE).engine.step_token_budget == 512


def test_a_bare_count_and_an_override_by_flag(tmp_path: Path) -> None:
    config = load_config(_file(tmp_path, {"prefill": 2}), {"prefill.engine.max_batch": 4}, {})
    assert config.prefill.count == 2
    assert worker_config(config, Role.PREFILL).engine.max_batch == 4


def test_backend_none_makes_aggregated_workers() -> None:
    config = load_config(flags={"transceiver.backend": "none", "decode.count": 3}, environ={})
    assert config.aggregated
    assert [config.role_count(role) for role in (Role.PREFILL, Role.DECODE, Role.AGGREGATED)] == [0, 0, 3]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("512MiB", 512 << 20), ("2GB", 2 * 10**9), ("1.5g", 1_500_000_000), (4096, 4096), ("64 kib", 65536)],
)
def test_sizes(text: object, nbytes: int) -> None:
    assert load_config(flags={"kv_cache.bytes": text}, environ={}).kv_cache.bytes == nbytes


def test_state_dir_comes_from_flag_then_environment(tmp_path: Path) -> None:
    environ = {"KVFERRY_STATE_DIR": str(tmp_path / "env"), "XDG_STATE_HOME": str(tmp_path / "xdg")}
    assert state_dir(tmp_path / "flag", environ) == tmp_path / "flag"
    assert state_dir(None, environ) == tmp_path / "env"
    assert state_dir(None, {"XDG_STATE_HOME": str(tmp_path / "xdg")}) == tmp_path / "xdg" / "kvferry"
    assert load_config(environ=environ).state_dir == str(tmp_path / "env")


def test_loopback_may_be_left_on_purpose() -> None:
    config = load_config(flags={"host": "0.0.0.0", "insecure_bind": True, "worker_host": "auto"}, environ={})
    assert config.host == "0.0.0.0"


@pytest.mark.parametrize(
    "text",
    ["engine: {max_batch: 8}\nmodel: a\nengine: {threads: 2}\n", "engine:\n  threads: 1\n  threads: 2\n"],
)
def test_a_key_given_twice_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"the key '(engine|threads)' is given twice, first in line [12]") as caught:
        load_config(_file(tmp_path, text), environ={})
    assert caught.value.field == "config"


def test_a_merged_mapping_may_be_overridden(tmp_path: Path) -> None:
    text = "engine: &shared {max_batch: 8, threads: 1}\ndecode: {engine: {<<: *shared, max_batch: 4}}\n"
    config = load_config(_file(tmp_path, text), environ={})
    assert worker_config(config, Role.DECODE).engine.max_batch == 4
    assert worker_config(config, Role.DECODE).engine.threads == 1
