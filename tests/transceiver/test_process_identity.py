"""A process is dead when that is proven, and not before."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvferry.core import ProcessIdentity
from kvferry.transceiver.process_identity import is_dead, this_process

NOWHERE = "127.0.0.1:1"
SAY_WHO = "from kvferry.transceiver.process_identity import *; import sys; p = this_process(); " + (
    "print(p.machine, p.pid, p.started, flush=True); sys.stdin.read()"
)


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], ProcessIdentity]]:
    arguments = [sys.executable, "-P", "-c", SAY_WHO]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        machine, pid, started = process.stdout.readline().split()
        yield process, ProcessIdentity(machine, int(pid), int(started))
        process.kill()


def test_lives_while_it_runs_or_is_stopped(child: tuple[subprocess.Popen[str], ProcessIdentity]) -> None:
    process, identity = child
    assert identity.pid == process.pid
    assert identity.machine == this_process().machine
    assert not is_dead(identity, NOWHERE)
    process.send_signal(signal.SIGSTOP)
    assert not is_dead(identity, NOWHERE)
    process.send_signal(signal.SIGCONT)


def test_is_dead_once_killed_also_before_anybody_has_waited_for_it(
    child: tuple[subprocess.Popen[str], ProcessIdentity],
) -> None:
    process, identity = child
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead(identity, NOWHERE)
    process.wait()
    assert is_dead(identity, NOWHERE)


def test_a_later_process_with_its_number_is_another() -> None:
    assert not is_dead(this_process(), NOWHERE)
    assert is_dead(replace(this_process(), started=this_process().started - 1), NOWHERE)


def test_on_another_machine_only_a_refusal_proves_it() -> None:
    elsewhere = replace(this_process(), machine="another")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        assert not is_dead(elsewhere, endpoint)  # it need not even accept
    assert is_dead(elsewhere, endpoint)
    assert not is_dead(elsewhere, "no such host.invalid:80")
    assert not is_dead(elsewhere, "nonsense")
