"""The pipe between rank 0 and another rank: messages arrive, and neither end outlives the other."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.engine import RankLostError
from kvferry.engine.rank_pipe import END, ChildRank

_CHILD = """
import sys, time
from kvferry.engine.rank_pipe import ParentPipe
pipe = ParentPipe()
print("what a library prints goes elsewhere")
spec = pipe.hear()
pipe.answer("started", twice=2 * spec["number"])
if spec["listens"]:
    pipe.listen(lambda message: pipe.say({"echo": message}))
time.sleep(600)
"""


class Ends:
    """Rank 0's end, and what it was told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.lost: list[str] = []
        self.changed = threading.Event()
        self.child = ChildRank(1, ("-c", _CHILD), self._hear, self._lose)

    def _hear(self, message: Any) -> None:
        self.heard.append(message)
        self.changed.set()

    def _lose(self, reason: str) -> None:
        self.lost.append(reason)
        self.changed.set()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.child.close()


def test_answers_and_other_messages_find_who_waits_for_them(ends: Ends) -> None:
    ends.child.tell({"number": 21, "listens": True})
    assert ends.child.answer("started", 120)["twice"] == 42
    ends.child.tell({"a": "message"})
    assert ends.changed.wait(30)
    assert ends.heard == [{"echo": {"a": "message"}}]
    ends.child.tell(END)
    ends.child.close()
    assert ends.lost == []
    assert ends.child._process.returncode == 0, "it was told"


def test_a_child_that_is_killed_is_noticed_and_waited_for_no_longer(ends: Ends) -> None:
    ends.child.tell({"number": 1, "listens": False})
    ends.child.answer("started", 120)
    ends.child._process.kill()
    with pytest.raises(RankLostError, match=r"rank 1 of this worker \(process \d+\) ended with status -9"):
        ends.child.answer("loaded", 30)
    assert ends.changed.wait(5)
    assert len(ends.lost) == 1


def test_a_child_ends_with_its_parent_whatever_it_is_doing(ends: Ends) -> None:
    """It does not listen: it loads its weights, say."""
    ends.child.tell({"number": 1, "listens": False})
    ends.child.answer("started", 120)
    assert ends.child._process.stdin is not None
    ends.child._process.stdin.close()
    assert ends.child._process.wait(5) == 1


def test_a_child_that_ends_by_itself_does_so_in_order() -> None:
    """While a thread waits for the next message."""
    program = "from kvferry.engine.rank_pipe import ParentPipe; ParentPipe().listen(print)"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.wait(60) == 0
