"""Whether two workers serve the same model, without reading all of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from kvferry.core import CheckpointError
from kvferry.models.base import Config
from kvferry.models.weights import open_shard, weight_files

# Keys that say who wrote the file, not what the model is.
_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
_SAMPLES = 8


def checkpoint_fingerprint(model_dir: Path, config: Config) -> str:
    """Equal for equal checkpoints on any machine, however sharded: of the config, and of every tensor its name,
    shape, type and a few rows spread over it. Reads some megabytes."""
    digest = hashlib.sha256()
    kept = {key: value for key, value in config.items() if key not in _VOLATILE}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    files = weight_files(model_dir)
    sampled: dict[str, bytes] = {}
    for file in sorted(set(files.values())):
        sampled |= _sample_file(file)
    for name in sorted(files):
        if name not in sampled:
            raise CheckpointError(f"tensor {name} is missing from {files[name]}", field="model")
        digest.update(sampled[name])
    return digest.hexdigest()[:32]


def _sample_file(file: Path) -> dict[str, bytes]:
    sampled = {}
    shard = open_shard(file)
    for name in list(shard.keys()):
        piece = shard.get_slice(name)
        shape = list(piece.get_shape())
        digest = hashlib.sha256(f"{name}|{shape}|{piece.get_dtype()}|".encode())
        rows = shape[0] if shape else 0
        for row in sorted({step * (rows - 1) // (_SAMPLES - 1) for step in range(_SAMPLES)} if rows else ()):
            digest.update(piece[row : row + 1].contiguous().view(torch.uint8).numpy().tobytes())
        sampled[name] = digest.digest()
    return sampled
