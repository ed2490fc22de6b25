"""What rank 0 and each other rank of its worker say to each other beside the steps: lines of JSON over the pipes of a
child process. A pipe's end tells either side that the other one is gone."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any

from kvferry.engine.rank_group import RankLostError

Message = dict[str, Any]
END: Message = {"do": "end"}
"""Rank 0 says that it will go: no failure of anybody."""
_END_GRACE_S = 3.0


class ChildRank:
    """One other rank, as rank 0 sees it. Owns the process; `close` ends it.

    heard(message): every message that nobody waits for; lost(reason): once, when the process ends before `close`.
    Both are called on the thread that reads the pipe.
    """

    def __init__(
        self, rank: int, command: Sequence[str], heard: Callable[[Message], None], lost: Callable[[str], None]
    ) -> None:
        self.rank = rank
        self._heard, self._lost = heard, lost
        self._answers: dict[str, Message] = {}
        self._changed = threading.Condition()
        self._gone: str | None = None
        self._closing = False
        self._write = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-P", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._reader = threading.Thread(target=self._read, name=f"rank-{rank}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, message: Message) -> None:
        """Raises RankLostError when the process has ended."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            with self._write:
                stdin.write(json.dumps(message) + "\n")
                stdin.flush()
        except (OSError, ValueError) as error:
            raise RankLostError(f"rank {self.rank} cannot be told anything: {error}") from None

    def answer(self, key: str, timeout_s: float) -> Message:
        """The message that has `key`, once it has come. Raises RankLostError when it does not."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._answers or self._gone is not None, timeout_s)
            if key in self._answers:
                return self._answers.pop(key)
        raise RankLostError(self._gone or f"rank {self.rank} did not answer within {timeout_s:g} s ({key})")

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        for line in stdout:
            message: Message = json.loads(line)
            key = message.get("answers")
            if key is None:
                self._heard(message)
                continue
            with self._changed:
                self._answers[key] = message
                self._changed.notify_all()
        status = self._process.wait()
        with self._changed:
            self._gone = f"rank {self.rank} of this worker (process {self.pid}) ended with status {status}"
            self._changed.notify_all()
        if not self._closing:
            self._lost(self._gone)

    def close(self) -> None:
        """Ends the process: by closing its input, and by force if that does not do. Bounded."""
        self._closing = True
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError):  # it is gone, with something unsaid
            stdin.close()
        try:
            self._process.wait(_END_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_END_GRACE_S)


class ParentPipe:
    """Rank 0, as another rank sees it. Takes standard input and output over: whatever else is printed goes to stderr.

    When rank 0 has gone, this process ends at once, whatever it is doing: with status 0 when it had said so before.
    """

    def __init__(self) -> None:
        # A stream of its own: a thread that waits in sys.stdin keeps the interpreter from ending in order.
        self._in: IO[str] = os.fdopen(os.dup(0), "r")
        self._out: IO[str] = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._write = threading.Lock()
        self._unheard: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="rank-0", daemon=True).start()

    def _read(self) -> None:
        announced = False
        for line in self._in:
            message: Message = json.loads(line)
            announced |= message == END
            self._unheard.put(message)
        os._exit(0 if announced else 1)

    def hear(self) -> Message:
        """The next message. Blocks."""
        return self._unheard.get()

    def listen(self, heard: Callable[[Message], None]) -> None:
        """From now on a thread hears, and calls `heard` with each message."""

        def run() -> None:
            while True:
                heard(self.hear())

        threading.Thread(target=run, name="rank-0-heard", daemon=True).start()

    def say(self, message: Message) -> None:
        try:
            with self._write:
                self._out.write(json.dumps(message) + "\n")
                self._out.flush()
        except OSError:
            os._exit(1)

    def answer(self, key: str, **facts: Any) -> None:
        self.say({"answers": key, **facts})
