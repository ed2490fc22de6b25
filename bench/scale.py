"""How a step's time grows: decode over batch and context, prefill over length, beside what the machine allows.

The bound of a decoding step is its bytes (packed weights once, every sequence's K and V once) over the bandwidth that
this process reads large memory with; that of a prompt is the arithmetic of its linears over the rate of torch's matrix
product. Both are measured in the same run. Caches hold random values: how long a step takes does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from kvferry.bench.bounds import arithmetic, bandwidth, wait
from kvferry.bench.floor import TOKENS_PER_BLOCK, machine
from kvferry.engine import KV_DTYPES
from kvferry.engine.attention import PagedAttention
from kvferry.engine.kv_rows import encode_rows
from kvferry.engine.linear import PRECISIONS
from kvferry.engine.operators import operators_for
from kvferry.engine.spans import AttentionChunk
from kvferry.kvcache.pool import build_pool
from kvferry.models import ForwardBatch, Linear, load_model, progress_bar, resolve_model

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 2048, 8192)
PROMPTS = (128, 512, 2048)


@dataclass(frozen=True, slots=True)
class Choice:
    """What is measured. most_kv_bytes: combinations of batch and context that need more are left out."""

    precision: str = "fp32"
    kv_dtype: str = "fp32"
    device: str = "cpu"
    rounds: int = 9
    most_kv_bytes: int = 2 << 30


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """One step: `batch` sequences decode one token each behind `context` others, or a prompt of `context` tokens.
    fraction: the bound over what was measured; both are null where no bound is known (int8 arithmetic)."""

    step: str
    batch: int
    context: int
    ms: float
    best_ms: float
    bound_ms: float | None
    fraction: float | None


class ScaledModel:
    """The model over pools of random values. weights: of all linears; weights_per_token: without the head, which a
    prompt's last token alone goes through."""

    def __init__(self, model_dir: Path, choice: Choice) -> None:
        self.choice, self.device = choice, torch.device(choice.device)
        operators = operators_for(choice.device, choice.precision)
        shapes: list[tuple[int, int]] = []

        def noted(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
            shapes.append((weight.shape[0], weight.shape[1]))
            return operators.linear(weight, bias)

        dtype = PRECISIONS.get(choice.precision).dtype
        self.model = load_model(model_dir, replace(operators, linear=noted), dtype, choice.device)
        vocabulary = self.model.limits.vocab_size
        self.weights = sum(outputs * columns for outputs, columns in shapes)
        self.weights_per_token = sum(outputs * columns for outputs, columns in shapes if outputs != vocabulary)
        self.layouts = self.model.layouts(TOKENS_PER_BLOCK, KV_DTYPES[choice.kv_dtype])
        self.token_nbytes = sum(layout.token_nbytes for layout in self.layouts)

    @property
    def weight_nbytes(self) -> float:
        return self.weights * PRECISIONS.get(self.choice.precision).nbytes_per_weight

    def step(self, batch: int, start: int, length: int) -> Callable[[], None]:
        """A step of `batch` sequences of `length` tokens each, behind `start` others."""
        blocks = -(-(start + length) // TOKENS_PER_BLOCK)
        pools = [build_pool(layout, batch * blocks, self.choice.device) for layout in self.layouts]
        for pool in pools:
            noise = torch.randn(*pool.view.shape[3:-1], pool.layout.head_dim, device=self.device)
            pool.view.copy_(encode_rows(noise, pool.layout.dtype).expand_as(pool.view))
        tables = [tuple(range(number, batch * blocks, batch)) for number in range(batch)]  # never in one piece
        chunks = [AttentionChunk(start, length, (table,) * len(pools), (0,) * len(pools)) for table in tables]
        vocabulary = self.model.limits.vocab_size
        ids = torch.randint(0, vocabulary, (batch * length,), device=self.device)
        positions = torch.arange(start, start + length, device=self.device).repeat(batch)
        rows = torch.arange(length - 1, batch * length, length, device=self.device)

        def run() -> None:
            self.model.forward(ForwardBatch(ids, positions, rows, PagedAttention(pools, chunks)))
            wait(self.device)

        return run


def measure(model_dir: Path, choice: Choice) -> list[ScaleRow]:
    scaled = ScaledModel(model_dir, choice)
    bytes_per_s = bandwidth(scaled.device)
    dtype = PRECISIONS.get(choice.precision).dtype
    flops_per_s = None if choice.precision == "int8" else arithmetic(scaled.device, dtype)
    longest = scaled.model.limits.max_context_tokens
    rows = []
    for context in (context for context in CONTEXTS if context < longest):
        for batch in BATCHES:
            kv_nbytes = batch * (context + 1) * scaled.token_nbytes
            if kv_nbytes <= choice.most_kv_bytes:
                bound = (scaled.weight_nbytes + kv_nbytes) / bytes_per_s
                rows.append(_row("decode", batch, context, _times(scaled.step(batch, context, 1), choice), bound))
    for prompt in (prompt for prompt in PROMPTS if prompt <= longest):
        bound_s = None if flops_per_s is None else 2 * scaled.weights_per_token * prompt / flops_per_s
        rows.append(_row("prefill", 1, prompt, _times(scaled.step(1, 0, prompt), choice), bound_s))
    return rows


def _times(run: Callable[[], None], choice: Choice) -> list[float]:
    run()
    times = []
    for _ in range(choice.rounds):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return times


def _row(step: str, batch: int, context: int, seconds: Sequence[float], bound_s: float | None) -> ScaleRow:
    median = statistics.median(seconds)
    return ScaleRow(
        step=step,
        batch=batch,
        context=context,
        ms=median * 1e3,
        best_ms=min(seconds) * 1e3,
        bound_ms=None if bound_s is None else bound_s * 1e3,
        fraction=None if bound_s is None else bound_s / median,
    )


def as_table(rows: Sequence[ScaleRow], choice: Choice) -> Table:
    table = Table(title=f"one step, {choice.precision}, K and V in {choice.kv_dtype}, on {choice.device}: median")
    for name in ("step", "batch", "context", "time", "best", "bound", "bound / time"):
        table.add_column(name, justify="left" if name == "step" else "right")
    for row in rows:
        table.add_row(
            row.step,
            str(row.batch),
            str(row.context),
            f"{row.ms:.1f} ms",
            f"{row.best_ms:.1f} ms",
            "" if row.bound_ms is None else f"{row.bound_ms:.1f} ms",
            "" if row.fraction is None else f"{row.fraction:.2f}",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kvferry.bench.scale", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a known name, a model directory or a .gguf file")
    parser.add_argument("--precision", default="fp32", choices=PRECISIONS.names())
    parser.add_argument("--kv-dtype", default="fp32", choices=list(KV_DTYPES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--most-kv-bytes", type=int, default=2 << 30, help="larger caches are left out")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    choice = Choice(options.precision, options.kv_dtype, options.device, options.rounds, options.most_kv_bytes)
    with progress_bar() as progress:
        model_dir = resolve_model(options.model, progress)
    torch.set_num_threads(options.threads)
    rows = measure(model_dir, choice)
    if options.json:
        facts = machine(options.threads) | {"precision": choice.precision, "kv_dtype": choice.kv_dtype}
        print(json.dumps({"machine": facts, "rows": [asdict(row) for row in rows]}))
    else:
        Console().print(as_table(rows, choice))


if __name__ == "__main__":
    main()
