"""A damaged checkpoint of any family is refused by the name of the tensor and its shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import random_checkpoint
from families import FAMILIES
from safetensors.torch import load_file, save_file

from kvferry.core import CheckpointError, DType
from kvferry.models import inspect_model, load_model, torch_operators


@pytest.fixture(scope="module", params=FAMILIES)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(FAMILIES[request.param](), tmp_path_factory.mktemp(request.param))


def test_every_tensor_that_is_missing_or_has_another_shape_is_named(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    whole = load_file(path)
    load_model(model_dir, torch_operators())
    last = [name for name in sorted(whole) if ".layers.3." in name]
    assert len(last) > 8
    for name in last:
        save_file({key: value for key, value in whole.items() if key != name}, path)
        with pytest.raises(CheckpointError, match=f"tensor {name} is missing from"):
            load_model(model_dir, torch_operators())
        shape = tuple(whole[name].shape)
        save_file({**whole, name: whole[name][:-1].contiguous()}, path)
        with pytest.raises(CheckpointError) as caught:
            load_model(model_dir, torch_operators())
        assert f"tensor {name}" in caught.value.message
        assert f"has shape {(shape[0] - 1, *shape[1:])}, config.json calls for {shape}" in caught.value.message
    save_file(whole, path)


def test_headers_alone_tell_what_the_load_will(model_dir: Path) -> None:
    loaded, inspected = load_model(model_dir, torch_operators()), inspect_model(model_dir)
    assert inspected.limits == loaded.limits
    assert inspected.layouts(16, DType.FLOAT32) == loaded.layouts(16, DType.FLOAT32)


def test_a_file_that_is_cut_short_is_named(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    whole = (model_dir / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read .damaged or cut short"):
        load_model(tmp_path, torch_operators())


def test_weights_that_need_scales_are_refused(model_dir: Path, tmp_path: Path) -> None:
    """Read as they stand they would compute nonsense."""
    config = json.loads((model_dir / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((model_dir / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="weights quantised by 'fp8' cannot be loaded") as caught:
        load_model(tmp_path, torch_operators())
    assert caught.value.field == "quantization_config"
