"""Reading tensors: one file, shards, and everything that can be wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvferry.core import CheckpointError
from kvferry.models.weights import INDEX_NAME, SINGLE_NAME, CheckpointWeights

CPU = torch.device("cpu")


def _sharded(directory: Path) -> None:
    save_file({"a": torch.arange(6.0).view(2, 3)}, directory / "model-1.safetensors")
    save_file({"b": torch.ones(4, dtype=torch.bfloat16)}, directory / "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_read_by_the_index_in_the_wanted_type(tmp_path: Path) -> None:
    _sharded(tmp_path)
    with CheckpointWeights(tmp_path, torch.float32, CPU) as weights:
        assert weights.get("a", (2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert weights.get("b", (4,)).dtype == torch.float32
        assert weights.get("a", (2, 3)).sum() == 15
        assert "a" in weights
        assert "c" not in weights


def test_a_tensor_belongs_to_the_caller(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / SINGLE_NAME)
    with CheckpointWeights(tmp_path, torch.float32, CPU) as weights:
        weights.get("a", (3,)).add_(1)
        assert weights.get("a", (3,)).tolist() == [0, 0, 0]


def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / SINGLE_NAME)
    with CheckpointWeights(tmp_path, torch.float32, CPU) as weights:
        with pytest.raises(CheckpointError, match="tensor b is missing"):
            weights.get("b", (1,))
        with pytest.raises(CheckpointError, match=r"tensor a in .* has shape \(2, 3\), config.json calls for \(3, 2\)"):
            weights.get("a", (3, 2))


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="only safetensors checkpoints"):
        CheckpointWeights(tmp_path, torch.float32, CPU)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    _sharded(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2.safetensors is missing: .* 1 tensors, among them b"):
        CheckpointWeights(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}'])
def test_a_broken_index_is_named(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX_NAME).write_text(index)
    with pytest.raises(CheckpointError, match="is no safetensors index"):
        CheckpointWeights(tmp_path, torch.float32, CPU)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    whole = tmp_path / SINGLE_NAME
    save_file({"a": torch.zeros(1000)}, whole)
    whole.write_bytes(whole.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read .damaged or cut short"):
        CheckpointWeights(tmp_path, torch.float32, CPU)
