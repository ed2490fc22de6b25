"""Log lines carry the worker and the request; logs of an earlier cluster are set aside."""

from __future__ import annotations

import logging
from pathlib import Path

from kvferry.cluster.log_setup import RequestFormatter, set_aside_logs


def _line(**extra: object) -> str:
    record = logging.makeLogRecord(
        {"name": "kvferry.x", "levelname": "INFO", "msg": "hello %s", "args": ("you",), **extra}
    )
    return RequestFormatter("decode-0").format(record)


def test_lines_name_worker_and_request() -> None:
    assert _line().endswith(" I decode-0 kvferry.x: hello you")
    assert _line(request_id="req-1").endswith(" I decode-0 kvferry.x [req-1]: hello you")


def test_old_logs_are_kept_once(tmp_path: Path) -> None:
    for text in ("first", "second"):
        set_aside_logs(tmp_path)
        (tmp_path / "router.log").write_text(text)
    set_aside_logs(tmp_path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"router.log.old": "second"}
