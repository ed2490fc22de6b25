"""Logging of a worker process: everything it says goes to ``<state-dir>/logs/NAME.log``."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path


class RequestFormatter(logging.Formatter):
    """Lines carry the request id when their record has one (``extra={"request_id": ...}``)."""

    def __init__(self, worker: str) -> None:
        super().__init__(f"%(asctime)s %(levelname).1s {worker} %(name)s%(request_label)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", "")
        record.request_label = f" [{request_id}]" if request_id else ""
        return super().format(record)


def log_path(log_dir: Path, name: str) -> Path:
    return log_dir / f"{name}.log"


def set_aside_logs(log_dir: Path) -> None:
    """Before a cluster starts: logs of the one before become NAME.log.old."""
    log_dir.mkdir(parents=True, exist_ok=True)
    for path in log_dir.glob("*.log"):
        path.replace(path.with_suffix(".log.old"))


def log_to_file(name: str, log_dir: Path, level: str) -> Path:
    """Sends this process's log, stdout and stderr to the file, also what native code prints as it dies."""
    log_dir.mkdir(parents=True, exist_ok=True)
    path = log_path(log_dir, name)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    handler = logging.StreamHandler(os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8"))
    handler.setFormatter(RequestFormatter(name))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("kvferry").setLevel(level)
    return path
