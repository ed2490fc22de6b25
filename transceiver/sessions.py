"""A transfer as its two ends see it: one life cycle, two kinds of session.

Logical outcome is not memory quiescence: a session's state says how it ended, its operation's `OpState` whether
memory may still be touched.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from kvferry.core import BlockTable, Lifecycle, PeerAddress, ProcessIdentity, RankInfo, TokenRange
from kvferry.kvcache import BlockHold
from kvferry.transceiver.base import LoadResult, Operation
from kvferry.transceiver.planner import GenerationReads, TransferPlan
from kvferry.transceiver.protocol import SignedHandle
from kvferry.transceiver.scratch import ScratchBlock
from kvferry.transceiver.stats import FailureClass


class SessionState(Enum):
    """ADVERTISED: at the source, its handle is out; at the destination, the handle is verified and planned."""

    CREATED = "created"
    ADVERTISED = "advertised"
    TRANSFERRING = "transferring"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_DEAD = frozenset({SessionState.FAILED, SessionState.CANCELLED})
SESSION_TRANSITIONS: Mapping[SessionState, frozenset[SessionState]] = {
    SessionState.CREATED: frozenset({SessionState.ADVERTISED}) | _DEAD,
    # ADVERTISED -> DONE: nothing had to move, or BEGIN was lost or overtaken on the way.
    SessionState.ADVERTISED: frozenset({SessionState.TRANSFERRING, SessionState.DONE}) | _DEAD,
    SessionState.TRANSFERRING: frozenset({SessionState.DONE}) | _DEAD,
    SessionState.DONE: frozenset(),
    SessionState.FAILED: frozenset(),
    SessionState.CANCELLED: frozenset(),
}


def new_lifecycle() -> Lifecycle[SessionState]:
    return Lifecycle(SessionState.CREATED, SESSION_TRANSITIONS)


@dataclass(slots=True, eq=False)
class SourceSession:
    """An advertised hand-off. The hold stays pinned until the session ends; then `on_release` runs once."""

    transfer_id: int
    nonce: bytes
    hold: BlockHold
    tokens: TokenRange
    on_release: Callable[[], None]
    advertised_s: float
    begun_s: float = 0.0
    lifecycle: Lifecycle[SessionState] = field(default_factory=new_lifecycle)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a load will fail as soon as its operation has come to rest."""

    failure: FailureClass
    message: str


@dataclass(slots=True, eq=False, kw_only=True)
class InboundSession:
    """Bytes that come in. `lifecycle`, `verdict` and `on_quiet` change under the table's lock."""

    load_id: int
    on_done: Callable[[LoadResult], None]
    deadline_s: float
    lifecycle: Lifecycle[SessionState] = field(default_factory=new_lifecycle)
    verdict: Verdict | None = None
    on_quiet: list[Callable[[], None]] = field(default_factory=list)

    @property
    def begun(self) -> bool:
        """An operation may be touching memory, or did."""
        return self.lifecycle.state is SessionState.TRANSFERRING


@dataclass(slots=True, eq=False, kw_only=True)
class GrantSession(InboundSession):
    """Room that a peer may write to. process: who it is, once it has begun. due_s: when it had computed all.
    awaits_cut: it writes no more, and its path is to be cut here too before the pages are called quiet."""

    transfer_id: int
    nonce: bytes
    writer: PeerAddress
    tables: tuple[BlockTable, ...]
    tokens: TokenRange
    granted_s: float
    process: ProcessIdentity | None = None
    begun_s: float = 0.0
    due_s: float | None = None
    awaits_cut: bool = False

    @property
    def opened(self) -> bool:
        """The writer may have written, or may yet."""
        return self.process is not None


@dataclass(slots=True, eq=False)
class PushPart:
    """`tokens` of an outgoing push, and the pages they are in. Their owner gets them back by `on_release`."""

    hold: BlockHold
    tokens: TokenRange
    on_release: Callable[[], None]


@dataclass(slots=True, eq=False)
class PushSession:
    """An outgoing push. Owned by the agent thread; the clock reads `deadline_s`. Its states: CREATED until the grant is
    verified, ADVERTISED until the destination lets it begin, then TRANSFERRING until the last part is written.

    part: what `operation` moves. reached: the position written up to. cut: it ended by a fence."""

    push_id: int
    signed: SignedHandle
    tokens_digest: bytes
    data: bytes
    on_failed: Callable[[str], None]
    reached: int
    lifecycle: Lifecycle[SessionState] = field(default_factory=new_lifecycle)
    verdict: Verdict | None = None
    peer: RankInfo | None = None
    waiting: deque[PushPart] = field(default_factory=deque)
    part: PushPart | None = None
    operation: Operation | None = None
    part_nbytes: int = 0
    nbytes: int = 0
    submitted_s: float = 0.0
    deadline_s: float = math.inf
    cut: bool = False


class LoadStage(Enum):
    """Which physical operation a load in TRANSFERRING is at."""

    DATA = "data"
    GENERATIONS = "generations"


class Companions(Protocol):
    """The loads by other ranks, or from other ranks, that one load stands for. Called on the agent thread."""

    def begin(self, load_id: int, source: RankInfo) -> None:
        """The load that speaks for all is planned: start the others. source: rank 0 of the worker read from."""

    def all_done(self) -> bool:
        """Whether every one of them has every byte, so that the source may be told."""


@dataclass(slots=True, eq=False, kw_only=True)
class LoadSession(InboundSession):
    """One pull. Owned by the agent thread.

    stale_words, source_told: where the operation made the generation check itself, its result, and whether the
    source has heard of it. source_rank: which rank of the source is read. part: of a load by several ranks, one that
    the source hears nothing of. companions: of the load that speaks for all, the others.
    """

    data: bytes
    tokens_digest: bytes
    tables: tuple[BlockTable, ...]
    tokens: TokenRange
    signed: SignedHandle | None = None
    peer: RankInfo | None = None
    plan: TransferPlan | None = None
    reads: GenerationReads | None = None
    stage: LoadStage = LoadStage.DATA
    operation: Operation | None = None
    scratch: ScratchBlock | None = None
    submitted_s: float = 0.0
    resubmissions: int = 0
    stale_words: int = 0
    source_told: bool = False
    source_rank: int = 0
    part: bool = False
    companions: Companions | None = None
    awaits_companions: bool = False
