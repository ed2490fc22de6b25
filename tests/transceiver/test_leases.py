from __future__ import annotations

import pytest

from kvferry.transceiver.leases import LeasePolicy, LeaseTable


@pytest.fixture
def table() -> LeaseTable:
    return LeaseTable(LeasePolicy(lease_s=30, max_s=70))


def test_a_lease_runs_out_without_a_sign_of_life(table: LeaseTable) -> None:
    table.grant(1, now_s=100)
    assert table.next_expiry_s() == 130
    assert table.expired(129.9) == []
    assert table.expired(130) == [1]


def test_signs_of_life_extend_it_up_to_the_cap(table: LeaseTable) -> None:
    table.grant(1, now_s=100)
    assert table.extend(1, now_s=125)
    assert table.next_expiry_s() == 155
    assert table.extend(1, now_s=154)
    assert table.next_expiry_s() == 170
    assert table.extend(1, now_s=169)
    assert table.expired(170) == [1]


def test_a_lease_is_never_longer_than_the_cap() -> None:
    table = LeaseTable(LeasePolicy(lease_s=30, max_s=10))
    table.grant(1, now_s=0)
    assert table.expired(10) == [1]


def test_unknown_and_dropped_leases_cannot_be_extended(table: LeaseTable) -> None:
    assert not table.extend(1, now_s=0)
    table.grant(1, now_s=0)
    table.drop(1)
    table.drop(1)
    assert not table.extend(1, now_s=0)
    assert (len(table), table.next_expiry_s()) == (0, None)


def test_the_next_expiry_is_the_earliest(table: LeaseTable) -> None:
    table.grant(1, now_s=10)
    table.grant(2, now_s=5)
    assert table.next_expiry_s() == 35
    assert table.expired(38) == [2]
    assert 1 in table
