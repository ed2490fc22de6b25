"""The seam to a store of KV blocks outside this worker: what an external KV connector implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConnectorParts:
    """What a connector is built from.

    address: where its store is, in words of its own (`kv_cache.connector_address`). namespace: hex digits, equal
    exactly for workers whose blocks are interchangeable; one namespace's blocks are never another's. block_nbytes: the
    size of every block.
    """

    address: str
    namespace: str
    block_nbytes: int


class KVConnector(ABC):
    """A store of completed blocks by digest. Equal digests within a namespace mean equal content, so whoever saves a
    block first may win, and a block never changes.

    One thread makes every call, one at a time, and the engine computes nothing meanwhile: answer in milliseconds, from
    a cache of your own if need be, and bound every wait. After a second the engine goes on without the answer. That,
    and whatever a method raises, counts as a miss, and the connector is left alone for some seconds, or until it has
    answered.
    """

    @abstractmethod
    def lookup(self, digests: Sequence[bytes]) -> int:
        """How many of the first of `digests` could be loaded. May be wrong by the time they are."""

    @abstractmethod
    def load(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        """The bytes of `digests`, whole and checked: fewer where one is missing or damaged, none after that one."""

    @abstractmethod
    def save(self, blocks: Mapping[bytes, bytes]) -> None:
        """Takes completed blocks by digest, each after the one it hangs on. May store them later, or not at all."""

    @abstractmethod
    def close(self) -> None:
        """Ends what works in the background, after what it was given to save."""


ConnectorBuilder = Callable[[ConnectorParts], KVConnector]
"""What the entry point of a connector names. Raises ConfigError for an address it cannot use."""
