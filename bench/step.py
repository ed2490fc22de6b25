"""What a step costs beside its forward pass: scheduling, sampling and streaming, at a full batch.

The real engine thread runs the real scheduler and model; one consumer per request reads its stream on an asyncio
loop, as a worker's gRPC handlers do. A step's time is taken from one forward pass's start to the next one's.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from kvferry.bench.floor import CONTEXT_TOKENS, machine
from kvferry.core import (
    DECODE_TRANSITIONS,
    DecodeLeg,
    Lifecycle,
    OutputDelta,
    SamplingParams,
    WorkerRequest,
    codec,
)
from kvferry.engine import DecodeSequence, EngineHost, EngineSettings, GenerationScheduler, ModelRunner
from kvferry.kvcache import create_manager
from kvferry.models import CausalLM, ForwardBatch, progress_bar, resolve_model
from kvferry.text import Tokenizer

DECODE_STEPS = 48
TARGETS_MS = {1: 2.0, 16: 4.0}
"""batch size -> the most that may be outside the forward pass"""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One batch size: medians per step, and the 10th to 90th percentile of what is outside the forward pass."""

    batch: int
    sampling: str
    step_ms: float
    forward_ms: float
    outside_ms: float
    outside_spread_ms: tuple[float, float]
    target_ms: float | None


class TimedModel:
    """Notes when each decode forward pass began and ended."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self.spans: list[tuple[float, float, int]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        started = time.perf_counter()
        logits = self._model.forward(batch)
        self.spans.append((started, time.perf_counter(), len(batch.token_ids)))
        return logits


async def _consume(host: EngineHost, scheduler: GenerationScheduler, sequence: DecodeSequence) -> None:
    async with host.run(sequence, lambda: scheduler.add(sequence)) as events:
        async for delta in events:
            assert isinstance(delta, OutputDelta)
            codec.delta_to_wire(delta).SerializeToString()
            if delta.finish_reason is not None:
                return


async def _run(runner: ModelRunner, tokenizer: Tokenizer, batch: int, sampling: SamplingParams) -> None:
    blocks = (batch + 1) * runner.layouts[0].blocks_for(CONTEXT_TOKENS + DECODE_STEPS + 16)
    manager = create_manager("V2", runner.layouts, blocks * runner.layouts[0].slot_nbytes)
    host = EngineHost("bench")
    scheduler = GenerationScheduler(runner, manager, host.thread.emit)
    host.start(scheduler)
    generator = torch.Generator().manual_seed(batch)
    shape = (batch, CONTEXT_TOKENS)
    prompts = torch.randint(0, runner.limits.vocab_size, shape, generator=generator).tolist()
    try:
        # First the prompts alone, so that they are cached and the whole batch then starts together.
        for choice in (dataclasses.replace(sampling, max_tokens=1), sampling):
            async with asyncio.TaskGroup() as consumers:
                for number, prompt in enumerate(prompts):
                    request = WorkerRequest(f"bench-{number}", tuple(prompt), choice)
                    leg = Lifecycle(DecodeLeg.QUEUED, DECODE_TRANSITIONS)
                    sequence = DecodeSequence(request, leg, runner.limits, tokenizer)
                    consumers.create_task(_consume(host, scheduler, sequence))
    finally:
        host.close()


def _row(spans: Sequence[tuple[float, float, int]], batch: int, name: str) -> StepRow:
    """Only steps in which the whole batch decoded, each followed by another one."""
    pairs = [(a, b) for a, b in itertools.pairwise(spans) if a[2] == b[2] == batch]
    outside = [1e3 * (following[0] - step[1]) for step, following in pairs]
    low, high = np.percentile(outside, (10, 90))
    return StepRow(
        batch=batch,
        sampling=name,
        step_ms=statistics.median(1e3 * (following[0] - step[0]) for step, following in pairs),
        forward_ms=statistics.median(1e3 * (step[1] - step[0]) for step, _ in pairs),
        outside_ms=statistics.median(outside),
        outside_spread_ms=(float(low), float(high)),
        target_ms=TARGETS_MS.get(batch),
    )


def measure(model_dir: Path, threads: int = 2, batches: Sequence[int] = (1, 8, 16)) -> list[StepRow]:
    """Runs every batch size twice: greedy, and sampled with every filter on."""
    runner = ModelRunner.load(model_dir, EngineSettings(threads=threads))
    timed = TimedModel(runner.stage.model)
    runner.stage = replace(runner.stage, model=timed)  # type: ignore[arg-type]
    tokenizer = Tokenizer.load(model_dir)
    common = {"max_tokens": DECODE_STEPS, "ignore_eos": True, "seed": 1}
    choices = {
        "greedy": SamplingParams(temperature=0.0, **common),  # type: ignore[arg-type]
        "sampled": SamplingParams(temperature=0.8, top_p=0.95, top_k=50, logprobs=5, **common),  # type: ignore[arg-type]
    }
    rows = []
    for batch in batches:
        for name, sampling in choices.items():
            timed.spans.clear()
            asyncio.run(_run(runner, tokenizer, batch, sampling))
            rows.append(_row(timed.spans, batch, name))
    return rows


def as_table(rows: Sequence[StepRow]) -> Table:
    table = Table(title="one decode step at context 256 and more: medians (10th to 90th percentile)")
    for name in ("batch", "sampling", "step", "forward pass", "outside it", "at most"):
        table.add_column(name, justify="right")
    for row in rows:
        low, high = row.outside_spread_ms
        missed = row.target_ms is not None and row.outside_ms > row.target_ms
        outside = f"{row.outside_ms:.1f} ms ({low:.1f} to {high:.1f})"
        table.add_row(
            str(row.batch),
            row.sampling,
            f"{row.step_ms:.1f} ms",
            f"{row.forward_ms:.1f} ms",
            f"[red]{outside}[/red]" if missed else outside,
            "" if row.target_ms is None else f"{row.target_ms:.0f} ms",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="kvferry bench step", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a known name, a model directory or a .gguf file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    if options.threads < 1:
        parser.error("--threads must be at least 1")
    with progress_bar() as progress:
        model_dir = resolve_model(options.model, progress)
    rows = measure(model_dir, options.threads)
    if options.json:
        print(json.dumps({"machine": machine(options.threads), "rows": [asdict(row) for row in rows]}))
    else:
        Console().print(as_table(rows))


if __name__ == "__main__":
    main()
