"""kvferry as a step child: the engine's own scheduler over the paged cache, without a thread or a server around it.

Prompts stay cached as its prefix cache keeps them. A chunk may be as long as a prompt (the limit on a step's length is
there for clients that cancel).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kvferry.bench.peers.step_loop import ChildArguments, StepTimes, Tokens, child_arguments, serve
from kvferry.core import (
    DECODE_TRANSITIONS,
    DecodeLeg,
    KVFerryError,
    Lifecycle,
    OutputDelta,
    SamplingParams,
    WorkerRequest,
)
from kvferry.engine import DecodeSequence, EngineSettings, GenerationScheduler, ModelRunner
from kvferry.kvcache import create_manager
from kvferry.text import Tokenizer

_NO_STEP_LIMIT_MS = 60_000.0


class EngineSteps:
    def __init__(self, arguments: ChildArguments) -> None:
        model_dir = Path(arguments.model_dir)
        settings = EngineSettings(
            precision=arguments.precision, threads=arguments.threads, max_step_ms=_NO_STEP_LIMIT_MS
        )
        self._runner = ModelRunner.load(model_dir, settings)
        self._tokenizer = Tokenizer.load(model_dir)
        # Twice what is asked for at once, so that prompts are still cached when they come again.
        nbytes = sum(
            2 * arguments.sequences * layout.blocks_for(arguments.tokens + layout.tokens_per_block) * layout.slot_nbytes
            for layout in self._runner.layouts
        )
        manager = create_manager("V2", self._runner.layouts, nbytes)
        self._events: list[tuple[int, object]] = []
        self._scheduler = GenerationScheduler(self._runner, manager, lambda *event: self._events.append(event))

    def run(self, prompts: Sequence[Tokens], new_tokens: int) -> StepTimes:
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        started = time.perf_counter()
        answers: dict[int, Tokens] = {}
        for number, prompt in enumerate(prompts):
            sequence = self._sequence(f"bench-{number}", prompt, sampling)
            answers[sequence.key] = []
            self._scheduler.add(sequence)
        times = StepTimes()
        while self._scheduler.has_work:
            before = time.perf_counter()
            self._scheduler.step()
            grown = self._take(answers)
            now = time.perf_counter()
            if times.first_s:
                if grown == len(prompts):
                    times.steps_s.append(now - before)
            elif all(answers.values()):
                times.first_s = now - started
        times.tokens = list(answers.values())
        return times

    def _sequence(self, name: str, prompt: Tokens, sampling: SamplingParams) -> DecodeSequence:
        request = WorkerRequest(name, tuple(prompt), sampling)
        leg = Lifecycle(DecodeLeg.QUEUED, DECODE_TRANSITIONS)
        return DecodeSequence(request, leg, self._runner.limits, self._tokenizer)

    def _take(self, answers: dict[int, Tokens]) -> int:
        """Moves what the last step produced into `answers`; how many of them grew."""
        events, self._events[:] = list(self._events), []
        grown = set()
        for key, event in events:
            if isinstance(event, KVFerryError):
                raise event
            assert isinstance(event, OutputDelta)
            if event.token_ids:
                answers[key] += event.token_ids
                grown.add(key)
        return len(grown)


def main() -> None:
    arguments = child_arguments()
    serve(EngineSteps(arguments).run, "compiled kernels, else torch's")


if __name__ == "__main__":
    main()
