"""Closed-loop serving: 8 clients that each send a prompt of 256 tokens and read 32 back, again and again.

All servers are up on the same cores, and one at a time has work; turns alternate. What they cost meanwhile is printed.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from kvferry.bench.child import ChildFailedError
from kvferry.bench.compare import alternated
from kvferry.bench.comparison import chosen_model, comparison_parser, conclude
from kvferry.bench.figures import LeftOut, Report, percentile_ms
from kvferry.bench.flags import note, positive
from kvferry.bench.floor import machine
from kvferry.bench.load import Window, closed_loop
from kvferry.bench.peers.home import PeersHome
from kvferry.bench.pictures import Bars, draw_bars
from kvferry.bench.prompts import PromptSource
from kvferry.bench.servers import KVFERRY_AGGREGATED, KVFERRY_PAIR, SERVERS, Server, ServeShape
from kvferry.core import ConfigError
from kvferry.text import Tokenizer

PROMPT_TOKENS = 256
ANSWER_TOKENS = 32
IDLE_S = 2.0
TARGET, ITL_TARGET = 1.3, 0.7
OURS = (KVFERRY_PAIR, KVFERRY_AGGREGATED)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ServeRow:
    """One server over one transport, all its turns together.

    spread: the lowest and the highest turn's tokens/s. requests: that ended within the turns or right after; failed:
    refused, broken off, or with other usage figures than asked for, and none of those is in the other figures.
    ratio, itl_ratio: output tokens/s and ITL p50 of kvferry over this one's, kvferry being the faster of its two
    ways to serve over HTTP.
    """

    system: str
    precision: str
    workload: str
    transport: str
    clients: int
    output_tokens_per_s: float
    spread: tuple[float, float]
    ttft_ms_p50: float | None
    ttft_ms_p99: float | None
    itl_ms_p50: float | None
    itl_ms_p99: float | None
    requests: int
    failed: int
    ratio: float | None = None
    itl_ratio: float | None = None


COLUMNS = (
    "system",
    "transport",
    "output tokens/s",
    "TTFT p50 / p99",
    "ITL p50 / p99",
    "requests",
    "failed",
    "tokens/s",
    "ITL p50",
)

Turn = tuple[str, str]
"""(server, transport)"""


def serve(
    model_dir: Path,
    home: PeersHome,
    systems: Sequence[str],
    precision: str,
    clients: int,
    rounds: int,
    seconds: float,
    say: Say,
) -> Report:
    cores = tuple(sorted(os.sched_getaffinity(0)))
    shape = ServeShape(model_dir, precision, cores, clients, PROMPT_TOKENS + ANSWER_TOKENS + 16)
    report = Report(
        {
            **machine(len(cores)),
            "precision": precision,
            "cores": len(cores),
            "seconds": seconds,
        }
    )
    prompts = PromptSource(Tokenizer.load(model_dir)).endless(PROMPT_TOKENS)
    with tempfile.TemporaryDirectory(prefix="kvferry-serve-") as folder, ExitStack() as stack:
        servers = start_all(stack, systems, shape, home, Path(folder), report, say)
        report.machine["idle_cores"] = _idle_cores(servers)
        turns = [(server, transport) for server in servers for transport in SERVERS.get(server).transports]
        windows: dict[Turn, list[Window]] = {turn: [] for turn in turns}
        for number in range(rounds):
            for server, transport in ordered(turns, number):
                say(f"turn {number + 1}: {server} over {transport}")
                try:
                    window = asyncio.run(_turn(servers[server], transport, prompts, clients, seconds))
                    servers[server].check_alive()
                except ChildFailedError as error:
                    report.left_out.append(LeftOut(server, error.message))
                    turns = [turn for turn in turns if turn[0] != server]
                    continue
                windows[server, transport].append(window)
                for failure in sorted(set(window.failures)):
                    say(f"  {len(window.failures)} failed: {failure}")
        report.rows = rows_of({turn: done for turn, done in windows.items() if done}, precision, clients)
    return report


def ordered(turns: Sequence[Turn], number: int) -> list[Turn]:
    places = alternated([str(place) for place in range(len(turns))], number)
    return [turns[int(place)] for place in places]


def start_all(
    stack: ExitStack,
    systems: Iterable[str],
    shape: ServeShape,
    home: PeersHome,
    logs: Path,
    report: Report,
    say: Say,
) -> dict[str, Server]:
    """What can be started; the rest is in `report.left_out`."""
    servers = {}
    for name in systems:
        if shape.precision not in SERVERS.get(name).precisions:
            continue
        say(f"starting {name}")
        try:
            servers[name] = stack.enter_context(SERVERS.get(name).start(shape, home, logs))
        except (ChildFailedError, ConfigError) as error:
            say(f"  {name} is left out: {error.message}")
            report.left_out.append(LeftOut(name, error.message))
    return servers


async def _turn(
    server: Server, transport: str, prompts: Iterator[Sequence[int]], clients: int, seconds: float
) -> Window:
    client = server.client(transport)
    try:
        return await closed_loop(client, prompts, clients, ANSWER_TOKENS, seconds)
    finally:
        await client.close()


def _idle_cores(servers: dict[str, Server]) -> dict[str, float]:
    """server -> share of one core that it takes without any work."""
    before = {name: _cpu_s(server) for name, server in servers.items()}
    time.sleep(IDLE_S)
    return {name: round((_cpu_s(server) - before[name]) / IDLE_S, 3) for name, server in servers.items()}


def _cpu_s(server: Server) -> float:
    """Of all processes in the sessions of this server's children."""
    sessions = {child.process.pid for child in server.children}
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[3]) in sessions:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def rows_of(windows: dict[Turn, list[Window]], precision: str, clients: int) -> list[ServeRow]:
    rows = [_row(turn, done, precision, clients) for turn, done in windows.items()]
    ours = [row for row in rows if row.system in OURS and row.transport == "http" and row.output_tokens_per_s]
    best = max(ours, key=lambda row: row.output_tokens_per_s, default=None)
    return rows if best is None else [_against(row, best) for row in rows]


def _row(turn: Turn, windows: Sequence[Window], precision: str, clients: int) -> ServeRow:
    each = [window.tokens() / window.seconds for window in windows]
    ttfts = [value for window in windows for value in window.ttfts_s()]
    gaps = [value for window in windows for value in window.gaps_s()]
    return ServeRow(
        system=turn[0],
        precision=precision,
        workload=f"{PROMPT_TOKENS} + {ANSWER_TOKENS} tokens",
        transport=turn[1],
        clients=clients,
        output_tokens_per_s=sum(window.tokens() for window in windows) / sum(window.seconds for window in windows),
        spread=(min(each), max(each)),
        ttft_ms_p50=percentile_ms(ttfts, 50),
        ttft_ms_p99=percentile_ms(ttfts, 99),
        itl_ms_p50=percentile_ms(gaps, 50),
        itl_ms_p99=percentile_ms(gaps, 99),
        requests=sum(len(window.calls) for window in windows),
        failed=sum(len(window.failures) for window in windows),
    )


def _against(row: ServeRow, best: ServeRow) -> ServeRow:
    if not row.output_tokens_per_s or not row.itl_ms_p50 or not best.itl_ms_p50:
        return row
    ratio = best.output_tokens_per_s / row.output_tokens_per_s
    return replace(row, ratio=ratio, itl_ratio=best.itl_ms_p50 / row.itl_ms_p50)


def as_table(rows: Sequence[ServeRow]) -> Table:
    clients = rows[0].clients if rows else 0
    table = Table(title=f"{clients} clients, {PROMPT_TOKENS} + {ANSWER_TOKENS} tokens each; kvferry against each: last")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("system", "transport") else "right")
    for row in rows:
        speed = _judged(row, row.ratio, (row.ratio or 0.0) < TARGET)
        wait = _judged(row, row.itl_ratio, (row.itl_ratio or 0.0) > ITL_TARGET)
        table.add_row(
            row.system,
            row.transport,
            f"{row.output_tokens_per_s:.1f} ({row.spread[0]:.1f} to {row.spread[1]:.1f})",
            f"{milliseconds(row.ttft_ms_p50)} / {milliseconds(row.ttft_ms_p99)}",
            f"{milliseconds(row.itl_ms_p50)} / {milliseconds(row.itl_ms_p99)}",
            str(row.requests),
            f"[red]{row.failed}[/red]" if row.failed else "0",
            speed,
            wait,
        )
    return table


def _judged(row: ServeRow, ratio: float | None, missed: bool) -> str:
    """kvferry's own rows are held against nothing."""
    if ratio is None or row.system in OURS:
        return ""
    return f"[red]{ratio:.2f}x[/red]" if missed else f"{ratio:.2f}x"


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


def draw(report: Report, path: Path) -> None:
    labels = {f"{row.system}, {row.transport}": row for row in report.rows}
    speed = Bars("output", "tokens/s", [""], {name: [row.output_tokens_per_s] for name, row in labels.items()})
    waits = Bars(
        "inter-token latency",
        "ms",
        ["p50", "p99"],
        {name: [row.itl_ms_p50, row.itl_ms_p99] for name, row in labels.items()},
    )
    first = Bars(
        "time to first token",
        "ms",
        ["p50", "p99"],
        {name: [row.ttft_ms_p50, row.ttft_ms_p99] for name, row in labels.items()},
    )
    draw_bars(
        path, f"{report.machine['model']}: closed loop, {PROMPT_TOKENS} + {ANSWER_TOKENS} tokens", [speed, first, waits]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = comparison_parser("serve", __doc__, SERVERS, "shorter turns")
    parser.add_argument("--precision", default="fp32", help="fp32 or int8")
    parser.add_argument("--clients", type=positive, default=8)
    parser.add_argument("--rounds", type=positive, help="turns of every server")
    parser.add_argument("--seconds", type=float, help="of one turn")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (2 if options.quick else 4)
    seconds = options.seconds or (12.0 if options.quick else 25.0)
    model_dir, home = chosen_model(options, SERVERS), PeersHome(options.peers)
    report = serve(model_dir, home, options.systems, options.precision, options.clients, rounds, seconds, note)
    conclude(report, options, "serve", draw, as_table)
