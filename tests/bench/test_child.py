"""Children: pinned, heard with a deadline, stopped and continued, and ended with what they started."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from kvferry.bench.child import Child, ChildFailedError, JSONChild, on_cores
from kvferry.bench.step_child import StepChild

CORES = sorted(os.sched_getaffinity(0))

ECHO = """
import json, os, sys
print("a warning of some library")
print(json.dumps({"cores": sorted(os.sched_getaffinity(0)), "flag": os.environ["FLAG"]}), flush=True)
for line in sys.stdin:
    print(json.dumps({"heard": json.loads(line)}), flush=True)
"""

STEPS = """
import json, sys
wrong = sys.argv[1]
print(json.dumps({"ready": "scripted"}), flush=True)
for line in sys.stdin:
    ask = json.loads(line)
    if wrong == "dies":
        sys.exit("out of memory")
    rows = len(ask["prompts"]) - (wrong == "row")
    new = ask["new_tokens"] - (wrong == "token")
    steps = [0.5] * (ask["new_tokens"] - 1 - (wrong == "step"))
    print(json.dumps({"first_s": 1.0, "steps_s": steps, "tokens": [[7] * new] * rows}), flush=True)
"""


def python(script: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", script, *arguments]


def wait_until(condition: object, timeout_s: float = 10.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def state_of(pid: int) -> str:
    """The letter /proc has for it; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_a_child_runs_on_its_cores_and_answers(tmp_path: Path) -> None:
    with JSONChild("echo", python(ECHO), {"FLAG": "on"}, CORES[-1:], tmp_path / "log") as child:
        assert child.hear(30) == {"cores": CORES[-1:], "flag": "on"}
        child.tell({"n": 1})
        assert child.hear(30) == {"heard": {"n": 1}}
    assert not child.alive
    assert sorted(os.sched_getaffinity(0)) == CORES


def test_cores_are_given_back_after_an_error() -> None:
    with pytest.raises(KeyError), on_cores(CORES[:1]):
        raise KeyError
    assert sorted(os.sched_getaffinity(0)) == CORES


def test_a_silent_child_is_not_waited_for_beyond_the_deadline(tmp_path: Path) -> None:
    script = "import sys, time; print('loading', file=sys.stderr, flush=True); time.sleep(600)"
    with JSONChild("silent", python(script), {}, CORES, tmp_path / "log") as child:
        wait_until(lambda: "loading" in (tmp_path / "log").read_text())
        with pytest.raises(ChildFailedError, match="silent said nothing for 0 s; its log ends with: loading"):
            child.hear(0.2)


def test_a_dead_child_says_what_its_log_ends_with(tmp_path: Path) -> None:
    with JSONChild("dead", python("import sys; sys.exit('no such model')"), {}, CORES, tmp_path / "log") as child:
        with pytest.raises(ChildFailedError, match="dead has ended; its log ends with: no such model"):
            child.hear(30)
        with pytest.raises(ChildFailedError, match="dead has ended"):
            child.tell({"big": "x" * 100_000})


def test_a_childs_own_error_is_raised(tmp_path: Path) -> None:
    script = """print('{"error": "cannot load x.gguf"}')"""
    with (
        JSONChild("llama", python(script), {}, CORES, tmp_path / "log") as child,
        pytest.raises(ChildFailedError, match=r"llama: cannot load x\.gguf"),
    ):
        child.hear(30)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ChildFailedError, match="ghost cannot be started"):
        Child("ghost", [str(tmp_path / "none")], {}, CORES, tmp_path / "log")


def test_its_own_children_end_with_it(tmp_path: Path) -> None:
    script = """
import json, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_DFL)
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
own = subprocess.Popen([sys.executable, "-c", stubborn])
print(json.dumps({"own": own.pid}), flush=True)
own.wait()
"""
    with JSONChild("parent", python(script), {}, CORES, tmp_path / "log") as child:
        own = child.hear(30)["own"]
        assert state_of(own)
    wait_until(lambda: state_of(own) in ("", "Z"))


def test_a_resting_child_stands_still(tmp_path: Path) -> None:
    with JSONChild("echo", python(ECHO), {"FLAG": ""}, CORES, tmp_path / "log") as child:
        child.hear(30)
        child.rest()
        wait_until(lambda: state_of(child.process.pid) == "T")
        child.wake()
        child.tell({"n": 2})
        assert child.hear(30) == {"heard": {"n": 2}}
        child.rest()  # and ends all the same


def test_a_step_child_is_stopped_between_its_turns(tmp_path: Path) -> None:
    with StepChild("scripted", python(STEPS, "right"), {}, CORES, tmp_path / "log") as child:
        assert child.load(30) == "scripted"
        times = child.run([[1], [2]], 3, least_steps=2)
        assert (times.first_s, times.steps_s, times.tokens) == (1.0, [0.5, 0.5], [[7, 7, 7], [7, 7, 7]])
        wait_until(lambda: state_of(child._child.process.pid) == "T")
        assert child.run([[1]], 1).steps_s == []


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("row", r"answered with \[3\] in 2 whole steps"),
        ("token", r"answered with \[2, 2\] in 2 whole steps"),
        ("step", r"answered with \[3, 3\] in 1 whole steps"),
        ("dies", "has ended; its log ends with: out of memory"),
    ],
)
def test_an_answer_of_another_size_is_refused(wrong: str, says: str, tmp_path: Path) -> None:
    with StepChild("scripted", python(STEPS, wrong), {}, CORES, tmp_path / "log") as child:
        child.load(30)
        with pytest.raises(ChildFailedError, match=says):
            child.run([[1], [2]], 3, least_steps=2)
