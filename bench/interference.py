"""What long prompts do to running streams: 4 streams, and a prompt of 2,000 tokens every 3 seconds.

kvferry with one core for prefill and one for decode, beside servers that share both cores between the two. Each of
those runs once with every chunk size asked for, since a smaller chunk is what they have against this.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from kvferry.bench.child import ChildFailedError
from kvferry.bench.comparison import chosen_model, comparison_parser, conclude
from kvferry.bench.figures import LeftOut, Report, percentile_ms
from kvferry.bench.flags import counts, note
from kvferry.bench.floor import machine
from kvferry.bench.load import Ask, Call, CallFailedError, Client, Window
from kvferry.bench.peers.home import PeersHome
from kvferry.bench.pictures import Bars, draw_bars
from kvferry.bench.prompts import PromptSource
from kvferry.bench.serve import milliseconds
from kvferry.bench.servers import KVFERRY_PAIR, SERVERS, ServeShape
from kvferry.core import ConfigError
from kvferry.text import Tokenizer

STREAMS = 4
STREAM_PROMPT_TOKENS, STREAM_TOKENS = 64, 512
LONG_TOKENS = 2000
LONG_ANSWER_TOKENS = 4
TARGET = 3.0
_MOST_LONG_AT_ONCE = 8

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class InterferenceRow:
    """One server with one chunk size (None: its default, or none to choose).

    itl: of the streams while long prompts come in. itl_alone: before the first one came. stream_tokens_per_s and
    long_prompts_per_s: done meanwhile; total_tokens_per_s: the streams' tokens and the finished long prompts' together.
    long_sent, long_done: long prompts in the window; those not done were still waiting when it closed.
    ratio: this ITL p99 over that of kvferry's prefill and decode pair. best: the lowest p99 of the servers that share
    the cores, which is what the pair is held against.
    """

    system: str
    precision: str
    chunk: int | None
    itl_ms_p50: float | None
    itl_ms_p99: float | None
    itl_alone_ms_p50: float | None
    itl_alone_ms_p99: float | None
    stream_tokens_per_s: float
    total_tokens_per_s: float
    long_prompts_per_s: float
    long_ttft_ms_p50: float | None
    long_sent: int
    long_done: int
    failed: int
    ratio: float | None = None
    best: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """alone_s: streams by themselves. seconds: with a long prompt every `every_s`."""

    alone_s: float
    seconds: float
    every_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """alone and crowded hold the same streams' calls; long: the long prompts' own."""

    alone: Window
    crowded: Window
    long: tuple[Call, ...]


async def interfere(client: Client, prompts: PromptSource, plan: Plan) -> Outcome:
    """Runs the plan. Streams start anew when they have made their tokens; what still runs at the end is cancelled."""
    streams: list[Call] = []
    long: list[Call] = []

    async def stream() -> None:
        while True:
            if not await _followed(client, Ask(prompts.take(STREAM_PROMPT_TOKENS), STREAM_TOKENS), streams):
                return

    async def long_prompt() -> None:
        await _followed(client, Ask(prompts.take(LONG_TOKENS), LONG_ANSWER_TOKENS), long)

    tasks = [asyncio.create_task(stream()) for _ in range(STREAMS)]
    try:
        while not (len(streams) >= STREAMS and all(call.arrivals or call.failure for call in streams)):
            await asyncio.sleep(0.05)
        alone = time.perf_counter()
        await asyncio.sleep(plan.alone_s)
        start = time.perf_counter()
        sent = 0
        while sent * plan.every_s < plan.seconds:
            tasks.append(asyncio.create_task(long_prompt()))
            sent += 1
            pause = start + min(sent * plan.every_s, plan.seconds) - time.perf_counter()
            await asyncio.sleep(max(0.0, pause))
        stop = time.perf_counter()
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
    return Outcome(Window(alone, start, streams), Window(start, stop, streams), tuple(long))


async def _followed(client: Client, ask: Ask, calls: list[Call]) -> bool:
    """One call, noted in `calls` from its start; whether it succeeded."""
    call = Call(time.perf_counter())
    calls.append(call)
    try:
        await client.follow(call, ask)
    except CallFailedError as error:
        call.failure = str(error)
    return not call.failure


def row_of(system: str, precision: str, chunk: int | None, outcome: Outcome) -> InterferenceRow:
    gaps, alone = _gaps_s(outcome.crowded), _gaps_s(outcome.alone)
    window = outcome.crowded
    done = [call for call in outcome.long if call.finished and call.arrivals[0] < window.stop]
    tokens = sum(window.start <= when < window.stop for call in window.calls for when in call.arrivals)
    seconds = window.seconds
    ttfts = [call.ttft_s for call in done]
    return InterferenceRow(
        system=system,
        precision=precision,
        chunk=chunk,
        itl_ms_p50=percentile_ms(gaps, 50),
        itl_ms_p99=percentile_ms(gaps, 99),
        itl_alone_ms_p50=percentile_ms(alone, 50),
        itl_alone_ms_p99=percentile_ms(alone, 99),
        stream_tokens_per_s=tokens / seconds,
        total_tokens_per_s=(tokens + LONG_TOKENS * len(done)) / seconds,
        long_prompts_per_s=len(done) / seconds,
        long_ttft_ms_p50=percentile_ms(ttfts, 50),
        long_sent=len(outcome.long),
        long_done=len(done),
        failed=sum(bool(call.failure) for call in (*window.calls, *outcome.long)),
    )


def _gaps_s(window: Window) -> list[float]:
    """Of all streams, those cut off at the end of the run included; and, for a stream that stands still when the
    window closes, how long it has waited by then."""
    gaps = []
    for call in window.calls:
        gaps += [gap for end, gap in call.gaps_s if window.start <= end < window.stop]
        before = [when for when in call.arrivals if when < window.stop]
        if before and len(before) == len(call.arrivals) and not call.finished:
            gaps.append(window.stop - before[-1])
    return gaps


def judged(rows: Sequence[InterferenceRow]) -> list[InterferenceRow]:
    """The rows with `ratio` and `best` filled in."""
    pair = next((row.itl_ms_p99 for row in rows if row.system == KVFERRY_PAIR), None)
    sharing = [row.itl_ms_p99 for row in rows if row.system != KVFERRY_PAIR and row.itl_ms_p99 is not None]
    return [
        replace(
            row,
            ratio=row.itl_ms_p99 / pair if pair and row.itl_ms_p99 is not None else None,
            best=row.system != KVFERRY_PAIR and bool(sharing) and row.itl_ms_p99 == min(sharing),
        )
        for row in rows
    ]


def measure(
    model_dir: Path,
    home: PeersHome,
    systems: Sequence[str],
    precision: str,
    chunks: Sequence[int],
    plan: Plan,
    say: Say,
) -> Report:
    """One server after the other, each alone on the machine."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    report = Report(
        {
            **machine(len(cores)),
            "precision": precision,
            "cores": len(cores),
            "every_s": plan.every_s,
        }
    )
    tokenizer = Tokenizer.load(model_dir)
    shape = ServeShape(model_dir, precision, cores, STREAMS + _MOST_LONG_AT_ONCE, LONG_TOKENS + STREAM_TOKENS)
    with tempfile.TemporaryDirectory(prefix="kvferry-interference-") as folder:
        for name in systems:
            if precision not in SERVERS.get(name).precisions:
                continue
            for chunk in [None] if name == KVFERRY_PAIR else chunks:
                described = name if chunk is None else f"{name}, chunks of {chunk}"
                say(described)
                try:
                    with SERVERS.get(name).start(replace(shape, chunk=chunk), home, Path(folder)) as server:
                        outcome = asyncio.run(_run(server.client("http"), PromptSource(tokenizer), plan))
                except (ChildFailedError, ConfigError) as error:
                    say(f"  left out: {error.message}")
                    report.left_out.append(LeftOut(described, error.message))
                    continue
                report.rows.append(row_of(name, precision, chunk, outcome))
                for call in (*outcome.crowded.calls, *outcome.long):
                    if call.failure:
                        say(f"  failed: {call.failure}")
    report.rows = judged(report.rows)
    return report


async def _run(client: Client, prompts: PromptSource, plan: Plan) -> Outcome:
    try:
        warm = await client.call(Ask(prompts.take(STREAM_PROMPT_TOKENS), 2))
        long = await client.call(Ask(prompts.take(LONG_TOKENS), LONG_ANSWER_TOKENS))
        if failure := warm.failure or long.failure:
            raise ChildFailedError(f"the first call failed: {failure}")
        limit = plan.alone_s + plan.seconds + 120.0
        try:
            async with asyncio.timeout(limit):
                return await interfere(client, prompts, plan)
        except TimeoutError:
            raise ChildFailedError(f"no streams, or no end, within {limit:.0f} s") from None
    finally:
        await client.close()


def as_table(rows: Sequence[InterferenceRow]) -> Table:
    title = f"{STREAMS} streams and prompts of {LONG_TOKENS} tokens: inter-token latency of the streams"
    table = Table(title=title)
    columns = (
        "system",
        "chunk",
        "ITL p50 / p99",
        "alone p50 / p99",
        "streams tok/s",
        "all tok/s",
        "long TTFT",
        "long done",
        "p99 against 1+1",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "system" else "right")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.1f}x"
        missed = row.best and row.ratio is not None and row.ratio < TARGET
        table.add_row(
            f"{row.system}, best of those" if row.best else row.system,
            "" if row.chunk is None else str(row.chunk),
            f"{milliseconds(row.itl_ms_p50)} / {milliseconds(row.itl_ms_p99)}",
            f"{milliseconds(row.itl_alone_ms_p50)} / {milliseconds(row.itl_alone_ms_p99)}",
            f"{row.stream_tokens_per_s:.1f}",
            f"{row.total_tokens_per_s:.0f}",
            milliseconds(row.long_ttft_ms_p50),
            f"{row.long_done} of {row.long_sent}",
            f"[red]{ratio}[/red]" if missed else ratio,
        )
    return table


def draw(report: Report, path: Path) -> None:
    labels = {f"{row.system}{'' if row.chunk is None else f', {row.chunk}'}": row for row in report.rows}
    waits = Bars(
        "inter-token latency of the streams",
        "ms",
        ["p50", "p99"],
        {name: [row.itl_ms_p50, row.itl_ms_p99] for name, row in labels.items()},
    )
    speed = Bars(
        "what it costs",
        "tokens/s",
        ["streams", "prompts and streams"],
        {name: [row.stream_tokens_per_s, row.total_tokens_per_s] for name, row in labels.items()},
    )
    title = f"{STREAMS} streams, a prompt of {LONG_TOKENS} tokens every {report.machine['every_s']:g} s"
    draw_bars(path, f"{report.machine['model']}: {title}", [waits, speed])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = comparison_parser("interference", __doc__, SERVERS, "shorter")
    parser.add_argument("--precision", default="fp32", help="fp32 or int8")
    parser.add_argument("--chunks", type=counts, default=[64, 256], help="comma-separated; of servers that share cores")
    parser.add_argument("--seconds", type=float, help="with long prompts, per server and chunk size")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two long prompts")
    options = parser.parse_args(arguments)
    seconds = options.seconds or (24.0 if options.quick else 60.0)
    plan = Plan(alone_s=min(8.0, seconds / 3), seconds=seconds, every_s=options.every)
    model_dir, home = chosen_model(options, SERVERS), PeersHome(options.peers)
    report = measure(model_dir, home, options.systems, options.precision, options.chunks, plan, note)
    conclude(report, options, "interference", draw, as_table)
