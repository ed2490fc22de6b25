"""Tensors of an HF checkpoint directory, read on demand from its safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from kvferry.core import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def weight_files(model_dir: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it. Raises CheckpointError when files are missing or unreadable."""
    index = model_dir / INDEX_NAME
    if index.is_file():
        return _indexed_files(model_dir, index)
    single = model_dir / SINGLE_NAME
    if not single.is_file():
        raise CheckpointError(
            f"{model_dir} holds neither {SINGLE_NAME} nor {INDEX_NAME}: only safetensors checkpoints and .gguf "
            "files can be loaded (convert other formats first)",
            field="model",
        )
    return dict.fromkeys(open_shard(single).keys(), single)


def _indexed_files(model_dir: Path, index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): model_dir / str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is no safetensors index: {error}", field="model") from None
    for file in sorted(set(files.values())):
        if not file.is_file():
            names = [name for name, where in files.items() if where == file]
            raise CheckpointError(
                f"{file} is missing: {index.name} says it holds {len(names)} tensors, among them {names[0]}",
                field="model",
            )
    return files


class Shard(Protocol):
    """One open safetensors file; closed when the last reference goes."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...

    def get_slice(self, name: str) -> Any:
        """A tensor that is read where it is indexed; get_shape() and get_dtype() read nothing."""
        ...


def open_shard(file: Path) -> Shard:
    """Raises CheckpointError naming the file when it is damaged or cut short."""
    try:
        return cast(Shard, safe_open(file, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read (damaged or cut short?): {error}", field="model") from None


class CheckpointWeights:
    """Implements `models.base.Weights`: every tensor comes as `dtype` on `device`. Close it, or use `with`."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._model_dir = model_dir
        self._dtype = dtype
        self._device = device
        self._files = weight_files(model_dir)
        self._open: tuple[Path, Shard] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A fresh tensor that the caller owns. Raises CheckpointError naming a missing or misshapen one."""
        return self._read(name, shape, None)

    def get_part(self, name: str, shape: tuple[int, ...], axis: int, part: range) -> torch.Tensor:
        """Indices `part` along `axis` of the tensor, which is of `shape`; the rest is not read. Raises as `get`."""
        return self._read(name, shape, (*(slice(None),) * axis, slice(part.start, part.stop)))

    def _read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] | None) -> torch.Tensor:
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"tensor {name} is missing from {self._model_dir}", field="model")
        try:
            stored = self._shard(file).get_slice(name)
            found = tuple(stored.get_shape())
            tensor: torch.Tensor | None = None
            if found == shape:
                tensor = self._shard(file).get_tensor(name) if index is None else stored[index]
        except SafetensorError as error:
            raise CheckpointError(f"tensor {name} cannot be read from {file}: {error}", field="model") from None
        if tensor is None:
            raise CheckpointError(
                f"tensor {name} in {file} has shape {found}, config.json calls for {shape}", field="model"
            )
        return tensor.to(device=self._device, dtype=self._dtype, copy=True)

    def _shard(self, file: Path) -> Shard:
        # One file stays open: checkpoints are written in layer order, so reads rarely go back.
        if self._open is None or self._open[0] != file:
            self._open = (file, open_shard(file))
        return self._open[1]

    def close(self) -> None:
        self._open = None

    def __enter__(self) -> CheckpointWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
