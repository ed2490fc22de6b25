"""The other process of the transfer benchmark, as this one sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import TracebackType
from typing import Any

_CLOSE_S = 10.0


class SourceProcess:
    """Asks and waits for the answer. A context manager: the process ends with it."""

    def __init__(self, route: str, shape: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvferry.bench.transfer_source", route, shape],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.endpoint: str = self._read()["endpoint"]

    def __enter__(self) -> SourceProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # UCX may print warnings of its own
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"the source process ended with status {self._process.wait()}")
