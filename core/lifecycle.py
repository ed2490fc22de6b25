"""Three observers of a request, three small state machines.

Each is an enum, a transition table and one mutator (`Lifecycle.to`) that raises on an illegal move.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

S = TypeVar("S", bound=Enum)


class IllegalTransitionError(RuntimeError):
    """Our bug: a state machine was asked for a move its table does not have."""


class Lifecycle(Generic[S]):
    """The one holder of a state; `to` is the only way to change it."""

    __slots__ = ("_state", "_table")

    def __init__(self, initial: S, table: Mapping[S, frozenset[S]]) -> None:
        self._state = initial
        self._table = table

    @property
    def state(self) -> S:
        return self._state

    @property
    def ended(self) -> bool:
        """No move leads out of the present state."""
        return not self._table[self._state]

    def can(self, target: S) -> bool:
        return target in self._table[self._state]

    def to(self, target: S) -> None:
        """Moves to `target`; raises IllegalTransitionError when the table has no such move."""
        if target not in self._table[self._state]:
            raise IllegalTransitionError(f"{type(target).__name__}: {self._state.name} -> {target.name}")
        self._state = target


class RequestState(Enum):
    """As the router sees a request."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


_REQUEST_DEAD = frozenset({RequestState.FAILED, RequestState.CANCELLED})
REQUEST_TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = {
    RequestState.QUEUED: frozenset({RequestState.PREFILLING, RequestState.DECODING}) | _REQUEST_DEAD,
    # PREFILLING -> QUEUED: the prefill worker was lost and another takes the prompt.
    RequestState.PREFILLING: frozenset({RequestState.TRANSFERRING, RequestState.FINISHED, RequestState.QUEUED})
    | _REQUEST_DEAD,
    RequestState.TRANSFERRING: frozenset({RequestState.DECODING, RequestState.QUEUED}) | _REQUEST_DEAD,
    RequestState.DECODING: frozenset({RequestState.FINISHED, RequestState.QUEUED}) | _REQUEST_DEAD,
    RequestState.FINISHED: frozenset(),
    RequestState.FAILED: frozenset(),
    RequestState.CANCELLED: frozenset(),
}


class PrefillLeg(Enum):
    """As the prefill worker sees it. HELD: computed, and pinned until decode has pulled it."""

    QUEUED = "queued"
    RUNNING = "running"
    HELD = "held"
    RELEASED = "released"
    FAILED = "failed"
    CANCELLED = "cancelled"


_PREFILL_DEAD = frozenset({PrefillLeg.FAILED, PrefillLeg.CANCELLED})
PREFILL_TRANSITIONS: Mapping[PrefillLeg, frozenset[PrefillLeg]] = {
    # RUNNING -> RELEASED: ended at the first token, nothing to hold. RUNNING -> QUEUED: preempted.
    PrefillLeg.QUEUED: frozenset({PrefillLeg.RUNNING}) | _PREFILL_DEAD,
    PrefillLeg.RUNNING: frozenset({PrefillLeg.HELD, PrefillLeg.RELEASED, PrefillLeg.QUEUED}) | _PREFILL_DEAD,
    PrefillLeg.HELD: frozenset({PrefillLeg.RELEASED}) | _PREFILL_DEAD,
    PrefillLeg.RELEASED: frozenset(),
    PrefillLeg.FAILED: frozenset(),
    PrefillLeg.CANCELLED: frozenset(),
}


class DecodeLeg(Enum):
    """As the decode (or aggregated) worker sees it. LOADING: its KV is on the way from prefill."""

    QUEUED = "queued"
    RESERVED = "reserved"
    LOADING = "loading"
    PREFILLING = "prefilling"
    RUNNING = "running"
    SUSPENDED = "suspended"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


_DECODE_DEAD = frozenset({DecodeLeg.FAILED, DecodeLeg.CANCELLED})
DECODE_TRANSITIONS: Mapping[DecodeLeg, frozenset[DecodeLeg]] = {
    DecodeLeg.QUEUED: frozenset({DecodeLeg.RESERVED, DecodeLeg.PREFILLING}) | _DECODE_DEAD,
    DecodeLeg.RESERVED: frozenset({DecodeLeg.LOADING, DecodeLeg.QUEUED}) | _DECODE_DEAD,
    # LOADING -> QUEUED: the load failed; the prompt is computed here instead.
    DecodeLeg.LOADING: frozenset({DecodeLeg.RUNNING, DecodeLeg.PREFILLING, DecodeLeg.QUEUED}) | _DECODE_DEAD,
    DecodeLeg.PREFILLING: frozenset({DecodeLeg.RUNNING, DecodeLeg.SUSPENDED, DecodeLeg.FINISHED, DecodeLeg.QUEUED})
    | _DECODE_DEAD,
    # RUNNING -> QUEUED: preempted without a tier to suspend to; computed again later.
    DecodeLeg.RUNNING: frozenset({DecodeLeg.SUSPENDED, DecodeLeg.FINISHED, DecodeLeg.QUEUED}) | _DECODE_DEAD,
    DecodeLeg.SUSPENDED: frozenset({DecodeLeg.RUNNING, DecodeLeg.PREFILLING, DecodeLeg.QUEUED}) | _DECODE_DEAD,
    DecodeLeg.FINISHED: frozenset(),
    DecodeLeg.FAILED: frozenset(),
    DecodeLeg.CANCELLED: frozenset(),
}
