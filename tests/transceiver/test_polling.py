from __future__ import annotations

import pytest

from kvferry.transceiver.polling import PollDemand, poll_interval_s


def test_nothing_open_means_no_polling() -> None:
    assert poll_interval_s(PollDemand()) is None


@pytest.mark.parametrize("kind", ["operation_s", "reader_s", "advertised_s"])
def test_longer_waits_are_polled_less_often_within_bounds(kind: str) -> None:
    intervals = [poll_interval_s(PollDemand(**{kind: age})) for age in (0.0, 0.015, 0.1, 60.0)]
    assert None not in intervals
    assert intervals == sorted(intervals, key=lambda interval: interval or 0)
    assert intervals[0] is not None
    assert intervals[0] <= 0.0005
    assert intervals[-1] is not None
    assert intervals[-1] <= 0.01


def test_the_most_urgent_decides() -> None:
    both = poll_interval_s(PollDemand(operation_s=0.0, advertised_s=60.0))
    assert both == poll_interval_s(PollDemand(operation_s=0.0))
    assert poll_interval_s(PollDemand(advertised_s=60.0, attention_s=1.0)) == 0.0005
