"""An actor's process: what it answers, where it logs, and that it ends when its server does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# A process of its own: hosting redirects stdout and stderr for good.
_PROGRAM = """
import asyncio, json, os, sys
from kvferry.cluster.actors import ActorLog, ServerHost
from kvferry.core import ConfigError

host = ServerHost(ActorLog("w", sys.argv[1], "INFO"))

def build():
    {build}

async def ends(ready):
    ready({{"endpoint": "here"}})
    await asyncio.sleep(0.05)

async def stays(ready):
    ready({{"endpoint": "here"}})
    print("a line of native code")
    await asyncio.sleep(3600)

async def never(ready):
    await asyncio.sleep(3600)

report = host.start(build, timeout_s={timeout})
open(sys.argv[1] + "/report.json", "w").write(json.dumps(report))
{after}
"""


def _run(
    tmp_path: Path, build: str, after: str = "os._exit(0)", timeout: float = 30.0
) -> tuple[int, dict[str, object]]:
    code = _PROGRAM.format(build=build, after=after, timeout=timeout)
    done = subprocess.run([sys.executable, "-P", "-c", code, str(tmp_path)], timeout=60)
    return done.returncode, json.loads((tmp_path / "report.json").read_text())


def test_a_server_that_is_ready_reports_and_stays(tmp_path: Path) -> None:
    exit_code, report = _run(tmp_path, "return stays", after="import time; time.sleep(0.5); os._exit(7)")
    assert exit_code == 7
    assert (report["name"], report["endpoint"]) == ("w", "here")
    assert "a line of native code" in (tmp_path / "w.log").read_text()


def test_an_error_names_its_setting_and_does_not_end_the_process(tmp_path: Path) -> None:
    exit_code, report = _run(tmp_path, "raise ConfigError('too small', field='kv_cache.bytes')")
    assert exit_code == 0
    assert (report["error"], report["field"]) == ("too small", "kv_cache.bytes")


def test_a_bug_is_reported_with_its_trace_in_the_log(tmp_path: Path) -> None:
    _, report = _run(tmp_path, "raise ZeroDivisionError('oops')")
    assert report["error"] == "ZeroDivisionError: oops"
    assert "Traceback" in (tmp_path / "w.log").read_text()


def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    _, report = _run(tmp_path, "return never", timeout=0.2)
    assert report["field"] == "ready_timeout_s"


def test_the_process_ends_with_its_server_so_that_ray_starts_another(tmp_path: Path) -> None:
    exit_code, _ = _run(tmp_path, "return ends", after="import time; time.sleep(30); os._exit(0)")
    assert exit_code == 1


@pytest.mark.parametrize("build", ["raise ConfigError('gone')", "return ends"])
def test_a_failed_restart_ends_the_process(tmp_path: Path, build: str) -> None:
    code = _PROGRAM.format(build=build, after="", timeout=1).replace("report = host.start(build, timeout_s=1)", "")
    code = code.split("open(sys.argv")[0] + "import time, kvferry.cluster.actors as a\na.RESTART_PAUSE_S = 0.05\n"
    code += "host.restart(build)\ntime.sleep(30)\n"
    assert subprocess.run([sys.executable, "-P", "-c", code, str(tmp_path)], timeout=60).returncode == 1
