"""Processes without the seconds of processor time that importing torch takes in each: a template imports once and
forks. What hatches is a process like any other, with pipes, environment, arguments, signals and an end of its own.

``python hatchery.py FD`` is the template. FD: its end of the socket that asks it for processes; it ends with the
other end.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

MODULES = ("torch", "grpc.aio", "kvferry.cluster.roles", "kvferry.cluster.worker", "kvferry.transceiver.nixl")
READY = b"ready"
MAX_REQUEST_NBYTES = 1 << 17
START_S = 120.0


class Hatched:
    """The part of `subprocess.Popen` that tests use. stdin and stdout: text."""

    def __init__(self, stdin: IO[str], stdout: IO[str], report: IO[str]) -> None:
        """report: says the process's id, then how it ended."""
        self.stdin, self.stdout, self._report = stdin, stdout, report
        self.pid = int(report.readline())
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and select.select([self._report], [], [], 0)[0]:
            self._code = int(self._report.readline())
            self._report.close()
        return self._code

    def wait(self, timeout: float) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.poll() is None and not select.select([self._report], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its report is on the way
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Hatchery:
    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self._template = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=environ,
                pass_fds=[theirs.fileno()],
            )
        self._channel.settimeout(START_S)
        assert self._channel.recv(len(READY)) == READY, "the template did not start"

    def close(self) -> None:
        """Ends the template, not what hatched."""
        self._channel.close()
        self._template.wait(10)

    def hatch(
        self, program: Path | str, arguments: Sequence[str], environ: Mapping[str, str], stderr: IO[Any] | None = None
    ) -> Hatched:
        """program: a script, or the name of a module to run as one."""
        request = {"program": str(program), "arguments": list(arguments), "environ": dict(environ)}
        (stdin, ours_in), (ours_out, stdout), (ours_report, report) = os.pipe(), os.pipe(), os.pipe()
        theirs = [stdin, stdout, stderr.fileno() if stderr else 2, report]
        socket.send_fds(self._channel, [json.dumps(request).encode()], theirs)
        for end in (stdin, stdout, report):
            os.close(end)
        return Hatched(os.fdopen(ours_in, "w", 1), os.fdopen(ours_out), os.fdopen(ours_report))


@functools.cache
def hatchery() -> Hatchery:
    """One for all tests of this process, started by the first."""
    started = Hatchery()
    atexit.register(started.close)
    return started


def serve(channel: socket.socket) -> dict[str, Any]:
    """Returns in every child, with the request that it is to carry out; ends the process when nobody asks any more."""
    for name in MODULES:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: children would lack all but one of them"
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel.send(READY)
    while True:
        message, files, _, _ = socket.recv_fds(channel, MAX_REQUEST_NBYTES, 4)
        if not message:
            sys.exit()
        if os.fork() == 0:
            channel.close()
            *standard, report = files
            _watch_over_child(report)
            return _become(json.loads(message), standard)
        for file in files:
            os.close(file)


def _watch_over_child(report: int) -> None:
    """Returns in the child. Only a parent learns how a process ended, so each has one that waits for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        os.close(report)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return
    os.closerange(0, report)
    os.write(report, f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(request: dict[str, Any], standard: Sequence[int]) -> dict[str, Any]:
    for number, file in enumerate(standard):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.path[:0] = filter(None, request["environ"].get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = [request["program"], *request["arguments"]]
    return request


if __name__ == "__main__":
    wanted = serve(socket.socket(fileno=int(sys.argv[1])))["program"]
    run: Any = runpy.run_path if Path(wanted).exists() else functools.partial(runpy.run_module, alter_sys=True)
    run(wanted, run_name="__main__")
