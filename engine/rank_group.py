"""The ranks of a worker as torch.distributed sees them: process groups of their own, nothing global.

Ranks are processes of one machine. They find each other through files in a folder that only they know, and open no
port beyond loopback. Words travel over gloo; tensors too, or over NCCL where the ranks compute on GPUs.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kvferry.core import UnavailableError
from kvferry.models import Shard

_PACKET_WORDS = 1024
"""What every message is sent in first; longer ones need a second broadcast."""


class RankLostError(UnavailableError):
    """A rank of this worker has ended, or does not take part: the worker cannot go on, and must be started anew."""


class RankGroup:
    """All ranks of one worker, as one of them sees them. Implements `models.Collectives` for its pipeline stage.

    Every method is bounded by `timeout_s` and raises RankLostError. One thread at a time.
    """

    def __init__(self, shard: Shard, folder: Path, device: torch.device, timeout_s: float) -> None:
        """Blocks until every rank has called it with the same folder, for `timeout_s` at most."""
        self._shard = shard
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        stage = f"stage-{shard.pp_rank}"
        self._words = self._join(folder / "words", shard.rank, shard.size, torch.device("cpu"))
        on_cpu = device.type == "cpu"
        self._world = self._words if on_cpu else self._join(folder / "world", shard.rank, shard.size, device)
        self._stage = self._join(folder / stage, shard.tp_rank, shard.tp_size, device) if shard.tp_size > 1 else None

    def _join(self, file: Path, rank: int, size: int, device: torch.device) -> Any:
        try:
            store = dist.FileStore(str(file), size)  # type: ignore[attr-defined]
            store.set_timeout(self._timeout)
            if device.type == "cuda":
                on_gpu = dist.ProcessGroupNCCL.Options()
                on_gpu._timeout = self._timeout
                return dist.ProcessGroupNCCL(store, rank, size, on_gpu)
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = self._timeout
            return dist.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise RankLostError(f"the ranks of this worker cannot meet: {_short(error)}") from error

    # -- Collectives --------------------------------------------------------------------------------------

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if self._stage is not None:
            x = x.contiguous()
            _wait(self._stage.allreduce([x]))
        return x

    def side_by_side(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        if self._stage is None:
            return x
        # Gathered parts must be of one shape: the narrower ones are padded.
        padded = x.new_zeros(len(x), max(widths))
        padded[:, : x.shape[1]] = x
        parts = [torch.empty_like(padded) for _ in widths]
        _wait(self._stage.allgather([parts], [padded]))
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    # -- between stages -----------------------------------------------------------------------------------

    def send(self, x: torch.Tensor, rank: int) -> None:
        _wait(self._world.send([x.contiguous()], rank, 0))

    def receive(self, rows: int, columns: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[rows, columns] from `rank`, which must send just that."""
        x = torch.empty(rows, columns, dtype=dtype, device=self._device)
        _wait(self._world.recv([x], rank, 0))
        return x

    # -- rank 0 to all ------------------------------------------------------------------------------------

    def announce(self, words: array[int]) -> None:
        """Called by rank 0 while all others `listen`."""
        total = len(words) + 1
        whole = torch.zeros(max(total, _PACKET_WORDS), dtype=torch.int64)
        whole[0] = len(words)
        whole[1:total] = torch.frombuffer(words, dtype=torch.int64)
        self._broadcast(whole[:_PACKET_WORDS])
        if total > _PACKET_WORDS:
            self._broadcast(whole[_PACKET_WORDS:])

    def listen(self) -> list[int]:
        """What rank 0 announces next."""
        first = torch.empty(_PACKET_WORDS, dtype=torch.int64)
        self._broadcast(first)
        total = int(first[0]) + 1
        if total <= _PACKET_WORDS:
            words: list[int] = first[1:total].tolist()
            return words
        rest = torch.empty(total - _PACKET_WORDS, dtype=torch.int64)
        self._broadcast(rest)
        return [*first[1:].tolist(), *rest.tolist()]

    def _broadcast(self, words: torch.Tensor) -> None:
        _wait(self._words.broadcast(words, 0))


def _wait(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise RankLostError(f"a rank of this worker is gone: {_short(error)}") from error


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:200]
