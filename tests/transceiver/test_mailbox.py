"""Notifications over TCP: whole frames, once each; strangers, silence and deaths are told apart."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from kvferry.core import TransferError
from kvferry.transceiver import mailbox as mailbox_module
from kvferry.transceiver.mailbox import Mailbox, MailLine, join_address, split_address


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    made = Mailbox("127.0.0.1")
    yield made
    made.close()
    made.close()


def collect(mailbox: Mailbox, count: int) -> list[tuple[str, bytes]]:
    arrived: list[tuple[str, bytes]] = []
    deadline_s = time.monotonic() + 10
    while len(arrived) < count:
        assert time.monotonic() < deadline_s, f"{len(arrived)} of {count}"
        arrived += mailbox.drain()
    return arrived


def test_frames_arrive_whole_in_order_and_once(mailbox: Mailbox) -> None:
    line, other = MailLine(mailbox.address, "one"), MailLine(mailbox.address, "two")
    sent = [bytes([number]) * (number * 97) for number in range(200)]
    for frame in sent:
        line.send(frame)
    other.send(b"hello")
    deadline_s = time.monotonic() + 10
    arrived: list[tuple[str, bytes]] = []
    while len(arrived) < 201:
        assert time.monotonic() < deadline_s
        line.flush()
        arrived += mailbox.drain()
    assert [frame for name, frame in arrived if name == "one"] == sent
    assert [frame for name, frame in arrived if name == "two"] == [b"hello"]
    assert mailbox.drain() == []
    line.close()
    other.close()


def send_for_ever(line: MailLine) -> None:
    """The kernel takes a first message for a line whose end it has not been told of yet."""
    for _ in range(100):
        line.send(b"x")
        time.sleep(0.01)


def test_who_does_not_listen_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = join_address("127.0.0.1", gone.getsockname()[1])
    with pytest.raises(TransferError, match="cannot be reached"):
        MailLine(address, "near")


def test_a_listener_that_does_not_answer_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a stopped process is: its kernel accepts, and nobody is there."""
    monkeypatch.setattr(mailbox_module, "_CONTACT_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started_s = time.monotonic()
        with pytest.raises(TransferError, match="does not answer"):
            MailLine(join_address("127.0.0.1", silent.getsockname()[1]), "near")
        assert time.monotonic() - started_s < 2


def test_a_closed_mailbox_ends_its_lines(mailbox: Mailbox, eventually: Callable[..., None]) -> None:
    line = MailLine(mailbox.address, "near")
    assert line.alive
    mailbox.close()
    eventually(lambda: not line.alive)
    with pytest.raises(TransferError, match="cannot be notified"):
        send_for_ever(line)
    line.close()


@pytest.mark.parametrize("strange", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x03\x00\x00\x00abc"])
def test_strangers_are_cut_and_others_are_not_disturbed(mailbox: Mailbox, strange: bytes) -> None:
    with socket.create_connection(split_address(mailbox.address), 2) as stranger:
        stranger.sendall(strange)
        assert stranger.recv(1) == b""
    line = MailLine(mailbox.address, "near")
    line.send(b"hello")
    assert collect(mailbox, 1) == [("near", b"hello")]
    line.close()


def test_a_peer_that_floods_is_cut(
    mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    monkeypatch.setattr(mailbox_module, "_MAX_UNREAD", 10)
    line = MailLine(mailbox.address, "near")
    with contextlib.suppress(TransferError):  # the cut may come before the last of them
        for _ in range(20):
            line.send(b"x")
    eventually(lambda: not line.alive)
    assert len(mailbox.drain()) == 10
    line.close()


@pytest.mark.parametrize("address", ["", "host", "host:", ":5", "host:x", "host:99999", "host:-1"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(TransferError, match="no address"):
        split_address(address)


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1:80"), ("::1", "[::1]:80")])
def test_addresses_go_both_ways(host: str, address: str) -> None:
    assert join_address(host, 80) == address
    assert split_address(address) == (host, 80)
