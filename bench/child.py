"""Processes that a benchmark starts: pinned to cores, heard with a deadline, and ended with all they started."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from kvferry.core import UnavailableError

END_S = 15.0
_TAIL_CHARS = 600


class ChildFailedError(UnavailableError):
    """A child did not start, died, or said nothing in time. The message holds the end of its log."""


@contextlib.contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """What this thread starts meanwhile runs on `cores` alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Child:
    """A process in a session of its own. A context manager: it ends, with its own children, when that is left.

    Everything it prints goes to `log`; `JSONChild` keeps stdout for answers.
    """

    def __init__(
        self, name: str, command: Sequence[str], environ: Mapping[str, str], cores: Collection[int], log: Path
    ) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output, on_cores(cores):
            try:
                self.process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.PIPE,
                    stdout=self._stdout(output),
                    stderr=output,
                    env={**os.environ, **environ},
                    start_new_session=True,
                )
            except OSError as error:
                raise ChildFailedError(f"{name} cannot be started: {error}") from None

    def _stdout(self, log: IO[bytes]) -> IO[bytes] | int:
        return log

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def rest(self) -> None:
        """Stops it where it stands, so that it takes no time from another; until `wake`."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """SIGTERM, and SIGKILL for what is left of it."""
        self.wake()
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self._signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def failed(self, what: str) -> ChildFailedError:
        text = self.log.read_text(encoding="utf-8", errors="replace").strip()
        return ChildFailedError(f"{self.name} {what}; its log ends with: {text[-_TAIL_CHARS:] or 'nothing'}")

    def _signal(self, number: signal.Signals) -> None:
        # To the group: also what outlived its leader.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class JSONChild(Child):
    """A child that takes and gives one JSON object a line."""

    _heard = b""  # what came after the last line that was taken

    def _stdout(self, log: IO[bytes]) -> IO[bytes] | int:
        return subprocess.PIPE

    def tell(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.failed("has ended") from None

    def hear(self, timeout_s: float) -> dict[str, Any]:
        """The next object it prints; lines of other kinds are passed over. Raises ChildFailedError."""
        deadline = time.monotonic() + timeout_s
        while True:
            line, newline, rest = self._heard.partition(b"\n")
            if not newline:
                self._read(deadline, timeout_s)
                continue
            self._heard = rest
            if line.startswith(b"{"):
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    raise ChildFailedError(f"{self.name}: {answer['error']}")
                return answer

    def _read(self, deadline: float, timeout_s: float) -> None:
        stdout = self.process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise self.failed(f"said nothing for {timeout_s:.0f} s")
        piece = os.read(stdout.fileno(), 1 << 16)
        if not piece:
            raise self.failed("has ended")
        self._heard += piece
