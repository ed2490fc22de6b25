"""The child's side of a step child: answers on stdin and stdout, one JSON object a line. See `step_child`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

Tokens = list[int]


@dataclass(slots=True)
class StepTimes:
    """first_s: until every prompt had its first token. steps_s: of each later step, in which all sequences got one
    token. tokens: [prompt][token], the first one included."""

    first_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    tokens: list[Tokens] = field(default_factory=list)


Run = Callable[[Sequence[Tokens], int], StepTimes]
"""(prompts, tokens to generate for each) -> what that took"""


@dataclass(frozen=True, slots=True)
class ChildArguments:
    """sequences: most prompts at once. tokens: the longest prompt with its answer."""

    model_dir: str
    precision: str
    threads: int
    sequences: int
    tokens: int


def child_arguments(arguments: Sequence[str] | None = None) -> ChildArguments:
    parser = argparse.ArgumentParser()
    parser.add_argument("model_dir")
    parser.add_argument("--precision", required=True)
    for name in ("--threads", "--sequences", "--tokens"):
        parser.add_argument(name, type=int, required=True)
    return ChildArguments(**vars(parser.parse_args(arguments)))


def serve(run: Run, about: str) -> None:
    """Until stdin ends. about: which kernels, for the report."""
    _say({"ready": about})
    for line in sys.stdin:
        ask = json.loads(line)
        _say(asdict(run(ask["prompts"], ask["new_tokens"])))


def _say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)
