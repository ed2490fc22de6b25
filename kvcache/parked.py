"""The bytes of one suspended cache, wherever they lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """rows: uint8 [slots, slot_nbytes] of some tier; slots: those that are meant."""

    rows: torch.Tensor
    slots: Sequence[int]


class Parked(ABC):
    """first_blocks: per layer group the index of the first block kept."""

    def __init__(self, first_blocks: Sequence[int]) -> None:
        self.first_blocks = tuple(first_blocks)

    @abstractmethod
    def prepare(self) -> bool:
        """Starts bringing into memory what `stored` will return; whether it is there."""

    @abstractmethod
    def stored(self, group: int, skip: int) -> StoredRows | None:
        """The blocks of a group but for its first `skip`; None when they are not whole any more."""

    @abstractmethod
    def release(self) -> None:
        """Gives their place back; once."""
