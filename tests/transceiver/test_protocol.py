from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core import BlockTable, TokenRange, TransferError, TransferHandle
from kvferry.transceiver.protocol import (
    Notification,
    NotificationKind,
    decode_notification,
    encode_notification,
    new_handle_key,
    new_nonce,
    new_transfer_id,
    open_handle,
    sign_handle,
)

HANDLE = TransferHandle(
    incarnation="life-1",
    endpoint="host:1",
    transfer_id=2**63 - 1,
    nonce=b"n" * 16,
    tokens=TokenRange(3, 40),
    blocks=(BlockTable((1, 2, 3), (10, 2**63, 30), 1), BlockTable((), ())),
    tokens_digest=b"d" * 32,
)


@given(
    st.sampled_from(NotificationKind),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**64 - 1),
    st.integers(0, 1000),
    st.integers(0, 1000),
)
def test_notifications_survive_the_wire(
    kind: NotificationKind, transfer_id: int, nonce: bytes, nbytes: int, start: int, more: int
) -> None:
    note = Notification(kind, transfer_id, nonce, nbytes, TokenRange(start, start + more))
    assert decode_notification(encode_notification(note)) == note


@given(st.binary(max_size=80))
def test_anything_else_is_refused(message: bytes) -> None:
    with pytest.raises(TransferError, match="not a transfer notification"):
        decode_notification(message)


@pytest.mark.parametrize(("offset", "value"), [(0, 0), (4, 9), (4, 0)])
def test_wrong_magic_or_kind(offset: int, value: int) -> None:
    message = bytearray(encode_notification(Notification(NotificationKind.DONE, 1, b"n" * 16, 2, TokenRange(0, 1))))
    message[offset] = value
    with pytest.raises(TransferError):
        decode_notification(bytes(message))


def test_handles_survive_the_wire_and_prove_their_maker() -> None:
    key = new_handle_key()
    signed = open_handle(sign_handle(HANDLE, key))
    assert signed.handle == HANDLE
    signed.verify(key)
    with pytest.raises(TransferError, match="not made by the worker it names"):
        signed.verify(new_handle_key())


def test_no_changed_bit_goes_unnoticed() -> None:
    key = new_handle_key()
    data = sign_handle(HANDLE, key)
    for offset in range(len(data)):
        forged = bytearray(data)
        forged[offset] ^= 1
        with pytest.raises(TransferError):
            open_handle(bytes(forged)).verify(key)


def test_ids_and_nonces_do_not_repeat() -> None:
    assert len({new_transfer_id() for _ in range(1000)}) == 1000
    assert all(0 <= new_transfer_id() < 2**63 for _ in range(100))
    assert len({new_nonce() for _ in range(100)}) == 100
