"""The engine's floor: prefill and decode of one process beside a plain transformers loop, in the same run.

Both sides run the same tokens on the same threads, alternating round by round, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from kvferry.core import DType
from kvferry.engine.attention import PagedAttention
from kvferry.engine.operators import operators_for
from kvferry.engine.spans import AttentionChunk
from kvferry.kvcache.pool import build_pool
from kvferry.models import ForwardBatch, load_model, progress_bar, resolve_model

PREFILL_TOKENS = 512
CONTEXT_TOKENS = 256
DECODE_STEPS = 8
TOKENS_PER_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """One prompt of `prompt_tokens` tokens (decode_batch 0), or steps of a batch with that context behind it.
    target: how many times the other's speed this has to reach; None where nothing is promised."""

    name: str
    prompt_tokens: int
    decode_batch: int = 0
    target: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens that one timed step computes."""
        return self.decode_batch or self.prompt_tokens


WORKLOADS = (
    Workload("prefill 512", PREFILL_TOKENS, target=1.0),
    Workload("decode, batch 1", CONTEXT_TOKENS, decode_batch=1, target=1.5),
    Workload("decode, batch 8", CONTEXT_TOKENS, decode_batch=8, target=1.5),
    Workload("decode, batch 16", CONTEXT_TOKENS, decode_batch=16),
)


@dataclass(frozen=True, slots=True)
class FloorRow:
    """One workload, both sides. Times are of one step: median, and 10th to 90th percentile. agreement: share of
    greedy tokens on which both sides agree."""

    workload: str
    kvferry_ms: float
    kvferry_spread_ms: tuple[float, float]
    kvferry_tokens_per_s: float
    transformers_ms: float
    transformers_spread_ms: tuple[float, float]
    transformers_tokens_per_s: float
    ratio: float
    target: float | None
    agreement: float


class Contender(ABC):
    """One side. Prompts are the rows of `prompts`, int64 [batch, tokens]."""

    @abstractmethod
    def prefill(self, prompts: torch.Tensor) -> torch.Tensor:
        """Greedy next tokens, int64 [batch]; forgets whatever it held and keeps these prompts' caches."""

    @abstractmethod
    def rewind(self, tokens: int) -> None:
        """Keeps only the first `tokens` positions of every cache."""

    @abstractmethod
    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Appends one token to every sequence and returns the next ones, both int64 [batch]."""


class KVFerryContender(Contender):
    """The model over a paged cache, as a worker's step runs it."""

    def __init__(self, model_dir: Path) -> None:
        self._model = load_model(model_dir, operators_for())
        longest = max(load.prompt_tokens for load in WORKLOADS) + DECODE_STEPS
        self._blocks = -(-longest // TOKENS_PER_BLOCK)
        batch = max(load.decode_batch for load in WORKLOADS)
        layouts = self._model.layouts(TOKENS_PER_BLOCK, DType.FLOAT32)
        self._pools = [build_pool(layout, self._blocks * batch, "cpu") for layout in layouts]
        self._length = 0

    @property
    def vocab_size(self) -> int:
        return self._model.limits.vocab_size

    def prefill(self, prompts: torch.Tensor) -> torch.Tensor:
        self._length = 0
        next_tokens = [self._step([row], prompts[row]) for row in range(len(prompts))]
        self._length = prompts.shape[1]
        return torch.cat(next_tokens)

    def rewind(self, tokens: int) -> None:
        self._length = tokens

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        next_tokens = self._step(range(len(tokens)), tokens)
        self._length += 1
        return next_tokens

    def _step(self, sequences: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
        """`tokens` continue the given sequences, in equal shares."""
        length = len(tokens) // len(sequences)
        chunks = [self._chunk(sequence, length) for sequence in sequences]
        batch = ForwardBatch(
            token_ids=tokens,
            positions=torch.arange(self._length, self._length + length).repeat(len(sequences)),
            logit_rows=torch.arange(length - 1, len(tokens), length),
            attention=PagedAttention(self._pools, chunks),
        )
        return self._model.forward(batch).argmax(dim=-1)

    def _chunk(self, sequence: int, length: int) -> AttentionChunk:
        # Every other block, so that no sequence lies in one piece.
        whole = range(sequence * self._blocks, (sequence + 1) * self._blocks)
        table = (*whole[::2], *whole[1::2])
        groups = len(self._pools)
        return AttentionChunk(self._length, length, (table,) * groups, (0,) * groups)


class TransformersContender(Contender):
    """The library's own forward pass with its default cache and attention, called in a greedy loop."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoModelForCausalLM, DynamicCache
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._new_cache: Callable[[], Any] = DynamicCache
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._cache: Any = None

    def prefill(self, prompts: torch.Tensor) -> torch.Tensor:
        self._cache = self._new_cache()
        return self._forward(prompts)

    def rewind(self, tokens: int) -> None:
        surplus = self._cache.get_seq_length() - tokens
        if surplus > 0:
            self._cache.crop(-surplus)

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._forward(tokens.unsqueeze(1))

    def _forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            result = self._model(input_ids=token_ids, cache=self._cache, use_cache=True, logits_to_keep=1)
            next_tokens: torch.Tensor = result.logits[:, -1].argmax(dim=-1)
            return next_tokens


def measure(model_dir: Path, rounds: int = 9, threads: int = 2) -> list[FloorRow]:
    """Loads both sides (about 1.5 GB for SmolLM2) and times every workload. Sets torch's threads."""
    torch.set_num_threads(threads)
    ours, theirs = KVFerryContender(model_dir), TransformersContender(model_dir)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for load in WORKLOADS:
        shape = (max(1, load.decode_batch), load.prompt_tokens)
        prompts = torch.randint(0, ours.vocab_size, shape, generator=generator)
        rows.append(_compare(load, prompts, ours, theirs, rounds))
    return rows


@dataclass(slots=True)
class _Side:
    """One side's step times and tokens over all rounds."""

    contender: Contender
    seconds: list[float]
    tokens: list[int]

    def run(self, load: Workload, prompts: torch.Tensor) -> None:
        if not load.decode_batch:
            self._timed(self.contender.prefill, prompts)
            return
        self.contender.rewind(load.prompt_tokens)
        tokens = prompts[:, -1]
        for _ in range(DECODE_STEPS):
            tokens = self._timed(self.contender.decode, tokens)

    def _timed(self, step: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        started = time.perf_counter()
        next_tokens = step(tokens)
        self.seconds.append(time.perf_counter() - started)
        self.tokens += next_tokens.tolist()
        return next_tokens


def _compare(load: Workload, prompts: torch.Tensor, ours: Contender, theirs: Contender, rounds: int) -> FloorRow:
    sides = [_Side(ours, [], []), _Side(theirs, [], [])]
    for side in sides:  # caches for decode, and a round to warm up that does not count
        side.contender.prefill(prompts)
        side.run(load, prompts)
        side.seconds.clear()
        side.tokens.clear()
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            side.run(load, prompts)
    medians = [statistics.median(side.seconds) for side in sides]
    equal = sum(a == b for a, b in zip(sides[0].tokens, sides[1].tokens, strict=True))
    return FloorRow(
        workload=load.name,
        kvferry_ms=medians[0] * 1e3,
        kvferry_spread_ms=_spread_ms(sides[0].seconds),
        kvferry_tokens_per_s=load.tokens / medians[0],
        transformers_ms=medians[1] * 1e3,
        transformers_spread_ms=_spread_ms(sides[1].seconds),
        transformers_tokens_per_s=load.tokens / medians[1],
        ratio=medians[1] / medians[0],
        target=load.target,
        agreement=equal / len(sides[0].tokens),
    )


def _spread_ms(seconds: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(seconds, (10, 90))
    return float(low) * 1e3, float(high) * 1e3


def machine(threads: int) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "processor": _processor(),
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "precision": "fp32",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def as_table(rows: Sequence[FloorRow]) -> Table:
    table = Table(title="one step, fp32: median (10th to 90th percentile)")
    for name in ("workload", "kvferry", "transformers", "ratio", "target", "same tokens"):
        table.add_column(name, justify="left" if name == "workload" else "right")
    for row in rows:
        missed = row.target is not None and row.ratio < row.target
        table.add_row(
            row.workload,
            _cell(row.kvferry_ms, row.kvferry_spread_ms),
            _cell(row.transformers_ms, row.transformers_spread_ms),
            f"[red]{row.ratio:.2f}x[/red]" if missed else f"{row.ratio:.2f}x",
            "" if row.target is None else f"{row.target:.1f}x",
            f"{row.agreement:.0%}",
        )
    return table


def _cell(median_ms: float, spread_ms: tuple[float, float]) -> str:
    return f"{median_ms:.1f} ms ({spread_ms[0]:.1f} to {spread_ms[1]:.1f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kvferry.bench.floor", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a known name, a model directory or a .gguf file")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    with progress_bar() as progress:
        model_dir = resolve_model(options.model, progress)
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    rows = measure(model_dir, options.rounds, options.threads)
    if options.json:
        print(json.dumps({"machine": machine(options.threads), "rows": [asdict(row) for row in rows]}))
    else:
        Console().print(as_table(rows))


if __name__ == "__main__":
    main()
