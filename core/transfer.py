"""Who a rank is and what it advertises: the values of the transfer protocol."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvferry.core.layout import KVLayout, MemRegion, TokenRange
from kvferry.core.request import Role
from kvferry.core.resolved import Resolution

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class BlockTable:
    """One request's blocks in one layer group: slot ids in token order, and each one's generation.

    Block i holds the tokens [i * tokens_per_block, (i + 1) * tokens_per_block); `first_block` is the index of
    the first block still held (a sliding window drops earlier ones).
    """

    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    first_block: int = 0


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What two ranks tell each other at first contact.

    pools and generations hold one region per layout: slot i of a group starts at pool.addr + i * slot_nbytes,
    its generation is the u64 at generations.addr + 8 * i. handle_key authenticates this incarnation's handles.
    others: of the worker's rank 0, every other rank, in order; block ids and generations are the same on all of them.
    """

    worker: str
    role: Role
    incarnation: str
    endpoint: str
    model_fingerprint: str
    resolution: Resolution
    layouts: tuple[KVLayout, ...]
    pools: tuple[MemRegion, ...]
    generations: tuple[MemRegion, ...]
    agent_metadata: bytes
    handle_key: bytes
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    protocol_version: int = PROTOCOL_VERSION
    others: tuple[RankInfo, ...] = ()

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        """Of rank 0: all ranks of its worker. Handles are the worker's, so its key is that of all."""
        return (self, *(replace(other, handle_key=self.handle_key) for other in self.others))


def rank_incarnation(worker: str, rank: int) -> str:
    """The incarnation of one rank of the worker whose rank 0 has the incarnation `worker`."""
    return f"{worker}.{rank}" if rank else worker


@dataclass(frozen=True, slots=True)
class TransferHandle:
    """Names one advertised hand-off; opaque to everyone but transceivers.

    transfer_id is minted by the source, nonce makes a guess useless, tokens_digest binds it to one prompt.
    """

    incarnation: str
    endpoint: str
    transfer_id: int
    nonce: bytes
    tokens: TokenRange
    blocks: tuple[BlockTable, ...]
    tokens_digest: bytes


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """One life of a worker, and where its control channel is: host:port."""

    endpoint: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, for whoever runs on the same machine. machine: of this boot, and of this namespace of process ids.
    started: clock ticks since boot, so that a later process with the same id is another."""

    machine: str
    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class HandOffPart:
    """An advertised stretch of a prompt whose rest is still being computed: it ends at position `stop` and begins where
    the part before it ended."""

    handle: bytes
    stop: int
