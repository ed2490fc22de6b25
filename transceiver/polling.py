"""How often to look: a pure function of what is going on.

A short operation is polled often and a long one seldom, so that polling costs a fixed small share of what is
waited for, and nothing at all when no session is open.
"""

from __future__ import annotations

from dataclasses import dataclass

_SHARE = 1 / 20
_ATTENTION_S = 0.0005


@dataclass(frozen=True, slots=True)
class PollDemand:
    """Ages in seconds of the *youngest* thing of each kind, None where there is none.

    operation: a local operation in flight. reader: a peer is reading from here. advertised: a handle is out.
    attention_s: for how long yet a peer is making first contact, or a notification may be on its way out.
    """

    operation_s: float | None = None
    reader_s: float | None = None
    advertised_s: float | None = None
    attention_s: float = 0.0


def poll_interval_s(demand: PollDemand) -> float | None:
    """None: do not poll."""
    intervals = []
    if demand.operation_s is not None:
        intervals.append(_clamp(demand.operation_s * _SHARE, 0.00005, 0.001))
    if demand.reader_s is not None:
        intervals.append(_clamp(demand.reader_s * _SHARE, 0.0002, 0.002))
    if demand.advertised_s is not None:
        intervals.append(_clamp(demand.advertised_s * _SHARE, 0.0005, 0.01))
    if demand.attention_s > 0:
        intervals.append(_ATTENTION_S)
    return min(intervals, default=None)


def _clamp(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))
