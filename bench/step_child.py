"""One system of `kvferry bench compare` in a process of its own, as the benchmark sees it.

The child says ``{"ready": ABOUT}`` when its model is loaded. Then, for every ``{"prompts": [[token ids]],
"new_tokens": N}``, it computes N greedy tokens for each prompt at once and answers with `StepTimes`. A prompt that was
sent in the same place before costs it as little as its own prefix cache allows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from kvferry.bench.child import ChildFailedError, JSONChild
from kvferry.bench.peers.step_loop import StepTimes, Tokens

LOAD_S = 600.0
ANSWER_S = 300.0


class StepChild:
    """A context manager. Between its turns the process is stopped, so that nothing of it runs in another's."""

    def __init__(
        self, name: str, command: Sequence[str], environ: Mapping[str, str], cores: Collection[int], log: Path
    ) -> None:
        self._child = JSONChild(name, command, environ, cores, log)

    def load(self, timeout_s: float = LOAD_S) -> str:
        """Waits for the model; what the child says about itself. Raises ChildFailedError."""
        about = str(self._child.hear(timeout_s)["ready"])
        self._child.rest()
        return about

    def run(
        self, prompts: Sequence[Tokens], new_tokens: int, least_steps: int = 0, timeout_s: float = ANSWER_S
    ) -> StepTimes:
        """Raises ChildFailedError, also when the answer is not `new_tokens` for each prompt.

        Steps in which some prompts got nothing are not in the answer, so it may hold fewer than were needed; it is
        refused when it holds fewer than `least_steps`.
        """
        self._child.wake()
        self._child.tell({"prompts": prompts, "new_tokens": new_tokens})
        times = StepTimes(**self._child.hear(timeout_s))
        self._child.rest()
        lengths = [len(row) for row in times.tokens]
        if lengths != [new_tokens] * len(prompts) or not least_steps <= len(times.steps_s) < new_tokens:
            raise ChildFailedError(
                f"{self._child.name} was asked for {new_tokens} tokens of each of {len(prompts)} prompts and answered "
                f"with {lengths} in {len(times.steps_s)} whole steps after the first"
            )
        return times

    def __enter__(self) -> StepChild:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.end()
