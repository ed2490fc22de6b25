"""The Ray actors: each hosts one gRPC server on its own thread and event loop.

Ray places them and starts them again when their process dies; requests, tokens and KV never pass through Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.cluster.log_setup import log_to_file
from kvferry.core import KVFerryError

logger = logging.getLogger(__name__)

RESTART_PAUSE_S = 3.0
_FOLDERS = frozenset(entry.name for entry in Path(__file__).resolve().parents[1].iterdir() if entry.is_dir())

Report = dict[str, Any]
Ready = Callable[[Report], None]
Serve = Callable[[Ready], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class ActorLog:
    """Where an actor's process logs to, and how much."""

    name: str
    log_dir: str
    level: str


class ServerHost:
    """Runs one server in this process until the process ends.

    A server that ends, or cannot start again, takes the process with it: Ray then starts a new one.
    """

    def __init__(self, log: ActorLog) -> None:
        self._log = log
        log_to_file(log.name, Path(log.log_dir), log.level)
        _check_no_bare_names()
        _take_full_priority()

    def start(self, build: Callable[[], Serve], timeout_s: float) -> Report:
        """Builds and serves on a thread of its own. What `ready` got, or {"error": ..., "field": ...}."""
        outcome: list[Report] = []
        answered = threading.Event()

        def answer(report: Report) -> None:
            if not answered.is_set():
                outcome.append({"name": self._log.name, "pid": os.getpid(), **report})
                answered.set()

        thread = threading.Thread(target=self._run, args=(build, answer), name=f"serve-{self._log.name}", daemon=True)
        thread.start()
        if not answered.wait(timeout_s):
            return {"name": self._log.name, "error": f"not ready within {timeout_s:.0f} s", "field": "ready_timeout_s"}
        return outcome[0]

    def restart(self, build: Callable[[], Serve]) -> None:
        """After Ray started this process again: nobody waits for an answer, and a failure ends the process."""

        def answer(report: Report) -> None:
            if "error" in report:
                logger.error("cannot start again: %s", report["error"])
                time.sleep(RESTART_PAUSE_S)  # or a lasting fault would have Ray restart us in a tight loop
                os._exit(1)
            logger.info("%s is back, process %d", self._log.name, os.getpid())

        threading.Thread(target=self._run, args=(build, answer), name=f"serve-{self._log.name}", daemon=True).start()

    def _run(self, build: Callable[[], Serve], answer: Callable[[Report], None]) -> None:
        served = False

        def ready(report: Report) -> None:
            nonlocal served
            served = True
            answer(report)

        try:
            asyncio.run(build()(ready))
            logger.error("the server of %s ended", self._log.name)
        except KVFerryError as error:
            logger.error("%s", error.message)
            answer({"error": error.message, "field": error.field})
        except BaseException as error:
            logger.exception("the server of %s failed", self._log.name)
            answer({"error": f"{type(error).__name__}: {error}", "field": ""})
        if served:
            os._exit(1)


def _take_full_priority() -> None:
    """Ray runs its workers at niceness 15 unless its cluster was started with RAY_worker_niceness=0."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, min(0, os.getpriority(os.PRIO_PROCESS, 0)))
    except PermissionError:
        logger.warning(
            "this process runs at niceness %d, behind others on this machine: start Ray with RAY_worker_niceness=0",
            os.getpriority(os.PRIO_PROCESS, 0),
        )


def _check_no_bare_names() -> None:
    """A folder imported by its bare name would be a second copy with empty registries."""
    root = Path(__file__).resolve().parents[1]
    for name in _FOLDERS & sys.modules.keys():
        file = getattr(sys.modules[name], "__file__", None)
        if file and root in Path(file).resolve().parents and ".venv" not in Path(file).parts:
            raise RuntimeError(f"{name} was imported by its bare name from {file}: start workers with PYTHONSAFEPATH=1")
