"""The bytes of one suspended cache, wherever they lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.kvcache.copier import RowCopy


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """rows: uint8 [slots, slot_nbytes] of some tier; slots: those that are meant."""

    rows: torch.Tensor
    slots: Sequence[int]


class Parked(ABC):
    """first_blocks: per layer group the index of the first block kept. copies: what must still be copied from the pools
    before any of it is read, or its place given back."""

    def __init__(self, first_blocks: Sequence[int], copies: Sequence[RowCopy] = ()) -> None:
        self.first_blocks = tuple(first_blocks)
        self.copies = tuple(copies)

    @abstractmethod
    def prepare(self) -> bool:
        """Starts bringing into memory what `stored` will return; whether it is there."""

    @abstractmethod
    def stored(self, group: int, skip: int) -> StoredRows | None:
        """The blocks of a group but for its first `skip`; None when they are not whole any more."""

    @abstractmethod
    def release(self) -> None:
        """Gives their place back; once."""
