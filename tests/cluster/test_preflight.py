"""What `kvferry up` finds wrong before it starts anything."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvferry.cluster import preflight
from kvferry.cluster.config_sources import load_config
from kvferry.cluster.launch import draw_up, worker_specs
from kvferry.core import ConfigError

WEIGHTS = "model.safetensors"


@pytest.fixture
def model_dir(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    """A copy to damage, with a tokenizer beside it if the original has none."""
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "model"))


@pytest.fixture
def refusal(tmp_path: Path) -> Callable[..., ConfigError]:
    """`refusal(model_dir, {key: value})`: what `draw_up` says."""

    def run(model: Path, settings: dict[str, Any] | None = None) -> ConfigError:
        flags = {"model": str(model), "state_dir": str(tmp_path / "state"), **(settings or {})}
        with pytest.raises(ConfigError) as caught:
            draw_up(load_config(flags=flags, environ={}), lambda message: None)
        assert not (tmp_path / "state").exists()
        return caught.value

    return run


def test_a_good_checkpoint_passes(model_dir: Path, tmp_path: Path) -> None:
    config = load_config(flags={"model": str(model_dir), "state_dir": str(tmp_path / "state")}, environ={})
    blueprint = draw_up(config, lambda message: None)
    assert blueprint.worker_names == ["prefill-0", "decode-0"]
    assert not (tmp_path / "state").exists()


def test_workers_are_given_cores_one_after_the_other(model_dir: Path, tmp_path: Path) -> None:
    flags = {
        "model": str(model_dir),
        "state_dir": str(tmp_path / "state"),
        "prefill.count": 2,
        "prefill.engine.threads": 3,
        "decode.engine.threads": 2,
        "engine.pin_threads": True,
    }
    blueprint = draw_up(load_config(flags=flags, environ={}), lambda message: None)
    specs = worker_specs(blueprint, "127.0.0.1:1", tmp_path)
    assert [(spec.name, spec.threads, spec.first_core) for spec in specs] == [
        ("prefill-0", 3, 0),
        ("prefill-1", 3, 3),
        ("decode-0", 2, 6),
    ]
    assert preflight.engine_settings(specs[2].config, 2, specs[2].first_core).first_core == 6


def test_threads_run_anywhere_by_default(model_dir: Path, tmp_path: Path) -> None:
    config = load_config(flags={"model": str(model_dir), "state_dir": str(tmp_path / "state")}, environ={})
    spec = worker_specs(draw_up(config, lambda message: None), "127.0.0.1:1", tmp_path)[1]
    assert preflight.engine_settings(spec.config, 1, spec.first_core).first_core is None


@pytest.mark.parametrize("file", ["config.json", WEIGHTS, "tokenizer.json"])
def test_a_missing_file(model_dir: Path, refusal: Callable[..., ConfigError], file: str) -> None:
    (model_dir / file).unlink()
    error = refusal(model_dir)
    assert error.field == "model"
    assert file in error.message


def test_weights_that_were_cut_short(model_dir: Path, refusal: Callable[..., ConfigError]) -> None:
    data = (model_dir / WEIGHTS).read_bytes()
    (model_dir / WEIGHTS).write_bytes(data[:-100])
    error = refusal(model_dir)
    assert f"{WEIGHTS} cannot be read (damaged or cut short?)" in error.message


def test_a_tensor_that_is_missing(model_dir: Path, refusal: Callable[..., ConfigError]) -> None:
    tensors = load_file(model_dir / WEIGHTS)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model_dir / WEIGHTS)
    assert "model.layers.1.mlp.up_proj.weight is missing" in refusal(model_dir).message


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_attention_heads", 0, "num_attention_heads must be a whole number"),
        ("num_attention_heads", None, "lacks num_attention_heads"),
        ("num_hidden_layers", -1, "num_hidden_layers must be a whole number"),
        ("num_hidden_layers", "30", "num_hidden_layers must be a whole number"),
        ("rope_scaling", {"rope_type": "spiral", "factor": 2.0}, "rope_type 'spiral'"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
        ("intermediate_size", 7, "has shape"),
        ("rms_norm_eps", "small", "does not describe a model"),
    ],
)
def test_a_config_that_does_not_fit(
    model_dir: Path, refusal: Callable[..., ConfigError], key: str, value: Any, words: str
) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    config.pop("rope_parameters", None)
    config[key] = value
    (model_dir / "config.json").write_text(json.dumps(config))
    assert words in refusal(model_dir).message


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"router.prefill_policy": "lottery"}, "router.prefill_policy", "least_loaded"),
        ({"router.decode_policy": "lottery"}, "router.decode_policy", "least_loaded"),
        ({"engine.precision": "fp3"}, "engine.precision", "fp32"),
        ({"engine.device": "quantum"}, "engine.device", "'quantum' cannot be used"),
        ({"decode.engine.device": "xla"}, "engine.device", "'xla' cannot be used"),
        ({"engine.tensor_parallel": 5}, "engine.tensor_parallel", "does not divide num_attention_heads (6)"),
        ({"decode.engine.pipeline_parallel": 4}, "engine.pipeline_parallel", "the model has 3 layers"),
        ({"engine.tensor_parallel": 2, "kv_cache.host_bytes": 4096}, "kv_cache.host_bytes", "no tiers below"),
        (
            {"engine.tensor_parallel": 2, "transceiver.runtime": "CPP", "transceiver.backend": "NIXL"},
            "engine.tensor_parallel",
            "through transceiver.runtime PYTHON alone",
        ),
        ({"kv_cache.bytes": 100}, "kv_cache.bytes", "raise kv_cache.bytes to at least"),
        ({"transceiver.wire_format": "int4"}, "transceiver.wire_format", "int8"),
        ({"kv_cache.bytes": 900 << 40}, "kv_cache.bytes", "lower kv_cache.bytes"),
    ],
)
def test_settings_that_cannot_work(
    model_dir: Path, refusal: Callable[..., ConfigError], settings: dict[str, Any], field: str, words: str
) -> None:
    error = refusal(model_dir, settings)
    assert error.field == field
    assert words in error.message


def test_workers_share_the_memory_of_one_machine(
    model_dir: Path, refusal: Callable[..., ConfigError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "available_nbytes", lambda: 3 << 20)
    error = refusal(model_dir, {"kv_cache.bytes": 2 << 20})
    assert error.message.startswith(f"kv_cache.bytes and kv_cache.host_bytes of 2 workers come to {4 << 20} bytes")


def test_one_port_cannot_serve_two_front_ends(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ConfigError, match=r"router\.grpc_port and router\.http_port are both"):
        load_config(flags={"router.grpc_port": port, "router.http_port": port}, environ={})


@pytest.mark.parametrize(
    ("settings", "field", "says"),
    [
        ({"transceiver.runtime": "CPP"}, "engine.tensor_parallel", "transceiver NIXL/CPP"),
        ({"transceiver.wire_format": "int8"}, "transceiver.wire_format", "set it to stored"),
    ],
)
def test_what_workers_of_several_ranks_cannot_have(
    model_dir: Path, refusal: Callable[..., ConfigError], settings: dict[str, Any], field: str, says: str
) -> None:
    error = refusal(model_dir, {"engine.tensor_parallel": 2, **settings})
    assert error.field == field
    assert says in error.message
