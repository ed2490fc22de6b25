"""A checkpoint without its weights: names, shapes and files checked from the headers, in a second or so."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError

from kvferry.core import CheckpointError
from kvferry.models.base import Linear
from kvferry.models.weights import Shard, open_shard, weight_files


class HeaderWeights:
    """Implements `models.base.Weights`: tensors on torch's `meta` device, which have a shape and no bytes.

    Every file is opened at once: one that is damaged or shorter than its header says is found before any model is
    built. Raises CheckpointError.
    """

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._files = weight_files(model_dir)
        self._shards: dict[Path, Shard] = {file: open_shard(file) for file in sorted(set(self._files.values()))}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"tensor {name} is missing from {self._model_dir}", field="model")
        try:
            found = tuple(self._shards[file].get_slice(name).get_shape())
        except SafetensorError as error:
            raise CheckpointError(f"tensor {name} cannot be read from {file}: {error}", field="model") from None
        if found != shape:
            raise CheckpointError(
                f"tensor {name} in {file} has shape {found}, config.json calls for {shape}", field="model"
            )
        return torch.empty(shape, device="meta")

    def get_part(self, name: str, shape: tuple[int, ...], axis: int, part: range) -> torch.Tensor:
        """Indices `part` along `axis` of the tensor, which is of `shape`."""
        return self.get(name, shape).narrow(axis, part.start, len(part))


class _NeverComputes:
    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        raise AssertionError("a model built from headers has no weights to compute with")


def unpacked_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The linear factory of a model that is built to be checked."""
    return _NeverComputes()
