"""Sealed records: whole, or not there."""

from __future__ import annotations

import pytest

from kvferry.kvcache.records import HEADER_NBYTES, Kind, seal, sealed_digest, unseal

DIGEST, OTHER = b"d" * 32, b"o" * 32


def test_what_was_sealed_comes_back() -> None:
    record = seal(DIGEST, b"bytes")
    assert unseal(record, DIGEST, 5) == b"bytes"
    assert sealed_digest(record[:HEADER_NBYTES], 5) == DIGEST


@pytest.mark.parametrize("at", [0, 8, 20, 50, HEADER_NBYTES, HEADER_NBYTES + 4])
def test_one_flipped_bit_anywhere_is_noticed(at: int) -> None:
    record = bytearray(seal(DIGEST, b"bytes"))
    record[at] ^= 1
    assert unseal(bytes(record), DIGEST, 5) is None


@pytest.mark.parametrize("nbytes", [0, 10, HEADER_NBYTES, HEADER_NBYTES + 4])
def test_a_record_cut_short_is_none(nbytes: int) -> None:
    assert unseal(seal(DIGEST, b"bytes")[:nbytes], DIGEST, 5) is None


def test_another_block_s_record_is_none() -> None:
    assert unseal(seal(OTHER, b"bytes"), DIGEST, 5) is None
    assert unseal(seal(DIGEST, b"bytes"), DIGEST, 6) is None
    assert sealed_digest(seal(DIGEST, b"bytes")[:HEADER_NBYTES], 6) is None
    assert sealed_digest(bytes(HEADER_NBYTES), 5) is None


def test_what_was_parked_is_no_block() -> None:
    digest, payload = b"d" * 32, b"bytes"
    record = seal(digest, payload, Kind.PARKED)
    assert unseal(record, digest, 5, Kind.PARKED) == payload
    assert unseal(record, digest, 5) is None
    assert sealed_digest(record[:HEADER_NBYTES], 5) is None
