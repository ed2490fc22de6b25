"""The recurrent states of a step, in the live slots of its sequences' caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.core import GroupKind
from kvferry.engine.spans import AttentionChunk
from kvferry.kvcache import KVPool
from kvferry.models import StateRun


class PagedStates:
    """`models.States`, bound to one step. `pools` and each chunk's tables are in layer-group order."""

    def __init__(self, pools: Sequence[KVPool], chunks: Sequence[AttentionChunk]) -> None:
        self._device = pools[0].view.device
        self.runs = tuple(self._runs(chunks))
        self._where = {
            (layer, pool.layout.kind): (pool, index, [chunk.block_tables[group][0] for chunk in chunks])
            for group, pool in enumerate(pools)
            if pool.layout.kind.is_state
            for index, layer in enumerate(pool.layout.layers)
        }

    def _runs(self, chunks: Sequence[AttentionChunk]) -> list[StateRun]:
        places: dict[int, list[int]] = {}
        first_rows, row = [], 0
        for place, chunk in enumerate(chunks):
            places.setdefault(chunk.length, []).append(place)
            first_rows.append(row)
            row += chunk.length
        runs = []
        for length, sequences in places.items():
            rows = [first_rows[place] + token for place in sequences for token in range(length)]
            runs.append(StateRun(tuple(sequences), length, torch.tensor(rows, device=self._device)))
        return runs

    def read(self, layer: int, kind: GroupKind, run: StateRun) -> torch.Tensor:
        pool, index, slots = self._at(layer, kind, run)
        return pool.view[slots, index].view(len(run.sequences), pool.layout.kv_heads, pool.layout.head_dim)

    def write(self, layer: int, kind: GroupKind, run: StateRun, states: torch.Tensor) -> None:
        pool, index, slots = self._at(layer, kind, run)
        pool.view[slots, index] = states.reshape(len(run.sequences), *pool.view.shape[2:]).to(pool.view.dtype)

    def _at(self, layer: int, kind: GroupKind, run: StateRun) -> tuple[KVPool, int, torch.Tensor]:
        pool, index, slots = self._where[layer, kind]
        return pool, index, torch.tensor([slots[place] for place in run.sequences], device=self._device)
