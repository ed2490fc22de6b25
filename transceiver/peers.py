"""Peers this worker reads from: first contact, and what is known of each afterwards."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from kvferry.core import Lifecycle, RankInfo, TransferError, rank_incarnation
from kvferry.transceiver.base import Agent, Direction, Operation, OpState
from kvferry.transceiver.control import ControlClient
from kvferry.transceiver.handshake import check_peer
from kvferry.transceiver.planner import GENERATION_NBYTES
from kvferry.transceiver.scratch import Scratch, ScratchBlock

logger = logging.getLogger(__name__)


class LinkState(Enum):
    """WARMING: a first small READ is on its way, so that no request pays for the path's set-up."""

    HANDSHAKING = "handshaking"
    WARMING = "warming"
    READY = "ready"
    LOST = "lost"


_TRANSITIONS: Mapping[LinkState, frozenset[LinkState]] = {
    LinkState.HANDSHAKING: frozenset({LinkState.WARMING, LinkState.READY, LinkState.LOST}),
    LinkState.WARMING: frozenset({LinkState.READY, LinkState.LOST}),
    LinkState.READY: frozenset({LinkState.LOST}),
    LinkState.LOST: frozenset(),
}


@dataclass(slots=True, eq=False)
class _Link:
    """One attempt to reach one endpoint, and the outcome. `ready` resolves exactly once."""

    endpoint: str
    rank_index: int
    deadline_s: float
    ready: Future[RankInfo] = field(default_factory=Future)
    lifecycle: Lifecycle[LinkState] = field(default_factory=lambda: Lifecycle(LinkState.HANDSHAKING, _TRANSITIONS))
    rank: RankInfo | None = None
    operation: Operation | None = None
    scratch: ScratchBlock | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.endpoint, self.rank_index


class Peers:
    """Used by the agent thread only; `post` brings what other threads report back onto it.

    `suspect(incarnation)` is called when an operation with a peer can no longer be trusted to end: fence it.
    """

    def __init__(
        self,
        agent: Agent,
        control: ControlClient,
        local: Callable[[], RankInfo],
        scratch: Scratch,
        post: Callable[[Callable[[], None]], None],
        timeout_s: float,
        suspect: Callable[[str], None],
    ) -> None:
        self._agent = agent
        self._control = control
        self._local = local
        self._scratch = scratch
        self._post = post
        self._timeout_s = timeout_s
        self._suspect = suspect
        self._current: dict[tuple[str, int], _Link] = {}
        self._attempts: dict[tuple[str, int], _Link] = {}

    def reach(self, endpoint: str, incarnation: str | None, rank_index: int = 0) -> Future[RankInfo]:
        """Rank `rank_index` of the peer at `endpoint` when it can be read from; TransferError when it cannot.

        A peer known already as `incarnation` is ready at once; otherwise it is asked who it is now. The future
        resolves on the agent thread.
        """
        key = (endpoint, rank_index)
        current = self._current.get(key)
        if current is not None and current.rank is not None and current.rank.incarnation == incarnation:
            return current.ready
        attempt = self._attempts.get(key)
        if attempt is None:
            attempt = self._attempts[key] = _Link(endpoint, rank_index, time.monotonic() + self._timeout_s)
            # The key would let the peer forge our handles; it only reads what we tell it to.
            initiator = replace(self._local(), handle_key=b"")
            link = attempt
            reply = self._control.handshake(endpoint, initiator, self._timeout_s)
            reply.add_done_callback(lambda ended: self._post(lambda: self._replied(link, ended)))
        return attempt.ready

    def knows(self, incarnation: str) -> bool:
        """Whether operations and notifications to this peer make sense now."""
        return any(link.rank is not None and link.rank.incarnation == incarnation for link in self._current.values())

    def lost(self, incarnation: str) -> None:
        """After a fence: the peer is forgotten and must be met anew."""
        for link in [*self._current.values(), *self._attempts.values()]:
            if link.rank is not None and link.rank.incarnation == incarnation:
                self._fail(link, TransferError(f"the path to {link.rank.worker} at {link.endpoint} was cut"))

    @property
    def warming(self) -> bool:
        """Whether a first contact has an operation in flight, which `step` must be called for."""
        return any(link.lifecycle.state is LinkState.WARMING for link in self._attempts.values())

    def step(self, now_s: float) -> float | None:
        """Drives first contacts; when the oldest of them began, None when there is none in flight."""
        warming = [link for link in self._attempts.values() if link.lifecycle.state is LinkState.WARMING]
        for link in warming:
            try:
                self._warm(link, now_s)
            except TransferError as error:
                self._fail(link, error)
        return min((link.deadline_s - self._timeout_s for link in warming), default=None)

    # -- one link -----------------------------------------------------------------------------------------

    def _replied(self, link: _Link, reply: Future[RankInfo]) -> None:
        try:
            self._accept(link, self._checked(reply.result(), link.rank_index))
        except TransferError as error:
            self._fail(link, error)

    def _checked(self, target: RankInfo, rank_index: int) -> RankInfo:
        """The rank that is wanted, of the worker whose rank 0 answered."""
        ranks = target.ranks
        if len(ranks) != target.tp_size * target.pp_size:
            raise TransferError(f"{target.worker} names {len(ranks)} ranks, of {target.tp_size} x {target.pp_size}")
        if rank_index >= len(ranks):
            raise TransferError(f"{target.worker} has no rank {rank_index}")
        rank = ranks[rank_index]
        if rank.incarnation != rank_incarnation(target.incarnation, rank_index):
            raise TransferError(f"rank {rank_index} of {target.worker} is not of its incarnation")
        check_peer(self._local(), rank)
        return rank

    def _accept(self, link: _Link, rank: RankInfo) -> None:
        known = self._current.get(link.key)
        if known is not None and known.rank is not None:
            same = known.rank.incarnation == rank.incarnation
            if same and known.rank.agent_metadata == rank.agent_metadata:
                link.rank = known.rank
                self._ready(link)
                return
            if not same:
                logger.info("%s at %s has restarted", known.rank.worker, link.endpoint)
                self._suspect(known.rank.incarnation)
        self._agent.load_peer(rank.incarnation, rank.agent_metadata)
        link.rank = rank
        link.lifecycle.to(LinkState.WARMING)
        link.scratch = self._scratch.take(1)
        self._submit(link)

    def _submit(self, link: _Link) -> None:
        assert link.rank is not None
        assert link.scratch is not None
        row = [link.scratch.region.addr, link.rank.generations[0].addr, GENERATION_NBYTES]
        copies = np.asarray([row], dtype=np.uint64)
        link.operation = self._agent.submit(Direction.READ, link.rank.incarnation, copies)
        self._warm(link, time.monotonic())

    def _warm(self, link: _Link, now_s: float) -> None:
        assert link.rank is not None
        assert link.operation is not None
        state = link.operation.poll()
        if state is OpState.DONE:
            link.operation.release()
            self._give_back(link)
            self._ready(link)
        elif state is OpState.NOT_SUBMITTED:
            link.operation.release()
            self._submit(link)
        elif state is OpState.IN_DOUBT or now_s >= link.deadline_s:
            reason = link.operation.error or f"nothing arrived within {self._timeout_s:g} s"
            logger.warning("first contact with %s at %s: %s", link.rank.worker, link.endpoint, reason)
            self._suspect(link.rank.incarnation)

    def _ready(self, link: _Link) -> None:
        assert link.rank is not None
        link.lifecycle.to(LinkState.READY)
        del self._attempts[link.key]
        self._current[link.key] = link
        link.ready.set_result(link.rank)

    def _fail(self, link: _Link, error: TransferError) -> None:
        if link.lifecycle.ended:
            return
        was_ready = link.lifecycle.state is LinkState.READY
        link.lifecycle.to(LinkState.LOST)
        if link.operation is not None and not was_ready:
            link.operation.release()
            self._give_back(link)
        for table in (self._current, self._attempts):
            if table.get(link.key) is link:
                del table[link.key]
        if not was_ready:
            link.ready.set_exception(error)

    def _give_back(self, link: _Link) -> None:
        if link.scratch is not None:
            self._scratch.give(link.scratch)
            link.scratch = None
