"""GGUF -> HF checkpoint directory, once, into a cache that several processes may share."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvferry.core import CheckpointError, ConfigError
from kvferry.models.gguf_checkpoint import GGUFCheckpoint
from kvferry.models.gguf_tokenizer import tokenizer_config, write_tokenizer
from kvferry.models.progress import ProgressCallback
from kvferry.models.weights import INDEX_NAME, SINGLE_NAME

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "KVFERRY_CACHE"
CONVERTER_VERSION = 1
"""Part of the cache key: raise it when the files written change."""

_SHARD_NBYTES = 2 << 30
_SAMPLE_NBYTES = 1 << 20
_LOCK_TIMEOUT_S = 1800.0
_LOCK_POLL_S = 0.2


def cache_dir() -> Path:
    """$KVFERRY_CACHE, else ~/.cache/kvferry."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "kvferry"


def convert_gguf(gguf_path: Path, progress: ProgressCallback | None = None) -> Path:
    """The HF directory of `gguf_path`, converted now unless the cache has it. Safe among processes and threads.

    The directory appears under its name only when complete. Blocks while another process converts the same
    file. Raises CheckpointError for a file that cannot be converted.
    """
    target = cache_dir() / "converted" / f"{gguf_path.stem}-{_file_digest(gguf_path)}"
    if target.is_dir():
        return target
    _make_dir(target.parent)
    with _exclusive(target.with_name(f"{target.name}.lock")):
        if not target.is_dir():
            _convert_into(gguf_path, target, progress)
    return target


def write_hf_directory(checkpoint: GGUFCheckpoint, directory: Path, progress: ProgressCallback | None = None) -> None:
    """Writes config, tokenizer and weights of `checkpoint` into the existing, empty `directory`."""
    _write_json(directory / "config.json", checkpoint.config())
    _write_json(directory / "generation_config.json", checkpoint.special_tokens())
    _write_json(directory / "tokenizer_config.json", tokenizer_config(checkpoint))
    write_tokenizer(checkpoint, directory)
    _write_weights(checkpoint, directory, progress)


def _convert_into(gguf_path: Path, target: Path, progress: ProgressCallback | None) -> None:
    checkpoint = GGUFCheckpoint(gguf_path)
    # The lock is ours, so whatever carries this prefix was left by a process that died.
    prefix = f"{target.name}.part-"
    for left_over in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    logger.info("converting %s into %s", gguf_path, target)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        write_hf_directory(checkpoint, scratch, progress)
        scratch.chmod(0o755)
        scratch.rename(target)
    except OSError as error:
        raise CheckpointError(
            f"{gguf_path} could not be converted into {target} (set {CACHE_VARIABLE} to a place with room): {error}",
            field="model",
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_weights(checkpoint: GGUFCheckpoint, directory: Path, progress: ProgressCallback | None) -> None:
    """One file, or numbered shards with an index where one would pass 2 GiB; a shard at a time is in memory."""
    total, done, in_shard = checkpoint.nbytes, 0, 0
    shard: dict[str, torch.Tensor] = {}
    shards: list[tuple[Path, list[str]]] = []

    def flush() -> None:
        path = directory / f"part-{len(shards) + 1:05d}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors writes for the owner alone; the cache may be shared
        shards.append((path, list(shard)))
        shard.clear()

    for name, tensor in checkpoint.tensors():
        nbytes = tensor.numel() * tensor.element_size()
        if shard and in_shard + nbytes > _SHARD_NBYTES:
            flush()
            in_shard = 0
        shard[name] = tensor
        in_shard += nbytes
        done += nbytes
        if progress is not None:
            progress(f"converting {checkpoint.path.name}", done, total)
    flush()
    _name_shards(directory, shards, done)


def _name_shards(directory: Path, shards: list[tuple[Path, list[str]]], nbytes: int) -> None:
    if len(shards) == 1:
        shards[0][0].rename(directory / SINGLE_NAME)
        return
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(shards, start=1):
        final = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path.rename(directory / final)
        weight_map |= dict.fromkeys(names, final)
    _write_json(directory / INDEX_NAME, {"metadata": {"total_size": nbytes}, "weight_map": weight_map})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _file_digest(path: Path) -> str:
    """Names the file's content cheaply: its size, both ends and 16 samples between."""
    digest = hashlib.sha256(f"{CONVERTER_VERSION}|".encode())
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(f"{size}|".encode())
            for step in range(17):
                file.seek(max(0, (size - _SAMPLE_NBYTES) * step // 16))
                digest.update(file.read(_SAMPLE_NBYTES))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}", field="model") from None
    return digest.hexdigest()[:12]


def _make_dir(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the model cache {path} cannot be created: {error}; set {CACHE_VARIABLE} to a writable folder",
            field=CACHE_VARIABLE,
        ) from None


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """An advisory lock that dies with its holder. Raises CheckpointError when it stays taken too long."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(
            f"the model cache cannot be written: {error}; set {CACHE_VARIABLE} to a writable folder",
            field=CACHE_VARIABLE,
        ) from None
    try:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"another process has been converting for {_LOCK_TIMEOUT_S:.0f} s and holds {lock}", field="model"
                )
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
