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
            (layer, pool.layout.kind): (group, index)
            for group, pool in enumerate(pools)
            if pool.layout.kind.is_state
            for index, layer in enumerate(pool.layout.layers)
        }
        self._pools = pools
        self._slots = {
            (group, run.sequences): self._tensor([chunks[place].block_tables[group][0] for place in run.sequences])
            for group in {group for group, _ in self._where.values()}
            for run in self.runs
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
            runs.append(StateRun(tuple(sequences), length, self._tensor(rows)))
        return runs

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def read(self, layer: int, kind: GroupKind, run: StateRun) -> torch.Tensor:
        group, index = self._where[layer, kind]
        pool = self._pools[group]
        found = pool.view[self._slots[group, run.sequences], index]
        return found.view(len(run.sequences), pool.layout.kv_heads, pool.layout.head_dim)

    def write(self, layer: int, kind: GroupKind, run: StateRun, states: torch.Tensor) -> None:
        group, index = self._where[layer, kind]
        view = self._pools[group].view
        view[self._slots[group, run.sequences], index] = states.reshape(-1, *view.shape[2:]).to(view.dtype)
