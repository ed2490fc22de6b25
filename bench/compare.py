"""Prefill and decode of kvferry's engine beside llama.cpp, vLLM and transformers: same weights, prompts and cores.

Every system runs in a process of its own, which is stopped while another has its turn; turns alternate round by round.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table

from kvferry.bench.bounds import Bounds, ModelSize, best, decode_bound_s, measure_bounds, prefill_bound_s
from kvferry.bench.child import ChildFailedError
from kvferry.bench.comparison import chosen_model, comparison_parser, conclude
from kvferry.bench.figures import LeftOut, Report, percentile_ms
from kvferry.bench.flags import counts, names, note, positive
from kvferry.bench.floor import machine
from kvferry.bench.peers.home import PeersHome
from kvferry.bench.peers.step_loop import StepTimes, Tokens
from kvferry.bench.pictures import Bars, draw_bars
from kvferry.bench.prompts import PromptSource
from kvferry.bench.step_child import StepChild
from kvferry.bench.step_systems import KVFERRY, SYSTEMS, StepShape
from kvferry.core import ConfigError
from kvferry.resolution import read_config
from kvferry.text import Tokenizer

PREFILL_TOKENS = 512
CONTEXT_TOKENS = 256
WARM_UPS = 3

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Workload:
    """batch 0: the time to the first token of a new prompt. Otherwise: steps of so many sequences, each with
    CONTEXT_TOKENS behind it. target: how many times each other system's speed kvferry's has to be."""

    name: str
    batch: int
    target: float


# Larger batches first: a smaller one is then a part of what is cached already.
WORKLOADS = (
    Workload("prefill 512", 0, 1.1),
    Workload("decode, batch 16", 16, 1.2),
    Workload("decode, batch 8", 8, 1.2),
    Workload("decode, batch 4", 4, 1.2),
    Workload("decode, batch 1", 1, 1.0),
)


@dataclass(frozen=True, slots=True)
class Effort:
    """rounds: turns of every system in every workload. steps: timed decode steps of one turn."""

    rounds: int
    steps: int


FULL = Effort(rounds=7, steps=24)
QUICK = Effort(rounds=3, steps=16)


@dataclass(frozen=True, slots=True)
class CompareRow:
    """One system's figures; of a prefill workload those of decoding are None, and the other way round.

    ratio: kvferry's tokens/s over this system's in the same run; target: what it has to be. spread: 10th to 90th
    percentile of tokens/s. bound_fraction: of what memory reads and fp32 multiplications would allow on this machine.
    same_tokens: share of greedy tokens equal to kvferry's, up to each prompt's first difference and beyond.
    """

    system: str
    precision: str
    workload: str
    threads: int
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    ttft_ms_p50: float | None
    ttft_ms_p99: float | None
    itl_ms_p50: float | None
    itl_ms_p99: float | None
    ratio: float | None
    target: float | None
    spread: tuple[float, float]
    bound_fraction: float | None
    same_tokens: float | None


@dataclass(slots=True)
class Samples:
    """What one system did in one workload, all rounds."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, load: Workload, times: StepTimes) -> None:
        self.seconds += times.steps_s if load.batch else [times.first_s]
        for row in times.tokens:
            self.tokens += row


class Comparison:
    """One precision on one number of threads."""

    def __init__(self, shape: StepShape, systems: Sequence[str], home: PeersHome, say: Say) -> None:
        self._shape = shape
        self._systems = systems
        self._home = home
        self._say = say
        self._prompts = PromptSource(Tokenizer.load(shape.model_dir))
        self.left_out: list[LeftOut] = []
        self.about: dict[str, str] = {}

    def run(self, effort: Effort, logs: Path) -> dict[str, dict[str, Samples]]:
        """workload -> system -> samples. A system that fails is left out from then on, and the others go on."""
        with ExitStack() as stack:
            children = self._load(stack, logs)
            held = [self._prompts.take(CONTEXT_TOKENS) for _ in range(self._shape.sequences)]
            measured = {}
            for load in WORKLOADS:
                self._say(f"  {load.name}")
                measured[load.name] = self._measure(load, effort, children, held)
            return measured

    def _load(self, stack: ExitStack, logs: Path) -> dict[str, StepChild]:
        children = {}
        for name in self._systems:
            if self._shape.precision not in SYSTEMS.get(name).precisions:
                continue
            self._say(f"  loading {name}")
            try:
                command = SYSTEMS.get(name).command(self._home, self._shape)
                log = logs / f"{name}-{self._shape.precision}-{self._shape.threads}.log"
                child = StepChild(name, command.words, command.environ, self._shape.cores, log)
                stack.enter_context(child)
                self.about[name] = child.load()
                children[name] = child
            except (ChildFailedError, ConfigError) as error:
                self._leave_out(name, error.message)
        return children

    def _leave_out(self, name: str, reason: str) -> None:
        self._say(f"  {name} is left out: {reason}")
        described = f"{name}, {self._shape.precision}, {self._shape.threads} threads"
        self.left_out.append(LeftOut(described, reason))

    def _measure(
        self, load: Workload, effort: Effort, children: dict[str, StepChild], held: Sequence[Tokens]
    ) -> dict[str, Samples]:
        samples = {name: Samples() for name in children}
        for number in range(-WARM_UPS, effort.rounds):
            prompts = held[: load.batch] if load.batch else [self._prompts.take(PREFILL_TOKENS)]
            # Prompts that are not cached yet get their first tokens one after the other; most steps are then not whole.
            steps, least = (effort.steps, effort.steps // 2) if number >= 0 else (2, 0)
            for name in alternated(list(children), number):
                try:
                    times = (
                        children[name].run(prompts, 1 + steps, least) if load.batch else children[name].run(prompts, 1)
                    )
                except ChildFailedError as error:
                    self._leave_out(name, error.message)
                    del children[name], samples[name]
                    continue
                if number >= 0:
                    samples[name].add(load, times)
        return samples


def alternated(names: Sequence[str], number: int) -> list[str]:
    """Each round begins with another one, and every second round goes backwards."""
    if not names:
        return []
    turned = number % len(names)
    order = [*names[turned:], *names[:turned]]
    return order if number % 2 == 0 else order[::-1]


def rows_of(
    measured: dict[str, dict[str, Samples]], precision: str, threads: int, size: ModelSize, bounds: Bounds, steps: int
) -> list[CompareRow]:
    rows = []
    for load in WORKLOADS:
        of_load = measured[load.name]
        ours = of_load.get(KVFERRY)
        for name, samples in of_load.items():
            rows.append(
                _row(load, name, samples, ours, (precision, threads), _bound_s(load, precision, size, bounds, steps))
            )
    return rows


def _bound_s(load: Workload, precision: str, size: ModelSize, bounds: Bounds, steps: int) -> float | None:
    """None where no bound was measured: prompts in int8 are not limited by fp32 multiplications."""
    if load.batch:
        return decode_bound_s(size, bounds, load.batch, CONTEXT_TOKENS + steps // 2, precision)
    return prefill_bound_s(size, bounds, PREFILL_TOKENS) if precision == "fp32" else None


def _row(
    load: Workload, name: str, samples: Samples, ours: Samples | None, setting: tuple[str, int], bound_s: float | None
) -> CompareRow:
    tokens = load.batch or PREFILL_TOKENS
    median = statistics.median(samples.seconds)
    speeds = sorted(tokens / seconds for seconds in samples.seconds)
    figures = (percentile_ms(samples.seconds, 50), percentile_ms(samples.seconds, 99))
    nothing = (None, None)
    ttft, itl = (nothing, figures) if load.batch else (figures, nothing)
    return CompareRow(
        system=name,
        precision=setting[0],
        workload=load.name,
        threads=setting[1],
        prefill_tokens_per_s=None if load.batch else tokens / median,
        decode_tokens_per_s=tokens / median if load.batch else None,
        ttft_ms_p50=ttft[0],
        ttft_ms_p99=ttft[1],
        itl_ms_p50=itl[0],
        itl_ms_p99=itl[1],
        ratio=median / statistics.median(ours.seconds) if ours else None,
        target=None if name == KVFERRY else load.target,
        spread=(speeds[len(speeds) // 10], speeds[-1 - len(speeds) // 10]),
        bound_fraction=None if bound_s is None else bound_s / median,
        same_tokens=_agreement(samples.tokens, ours.tokens) if ours else None,
    )


def _agreement(tokens: Sequence[int], reference: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(tokens, reference, strict=True)) / len(reference)


def compare(
    model_dir: Path,
    home: PeersHome,
    systems: Sequence[str],
    precisions: Sequence[str],
    threads: Sequence[int],
    effort: Effort,
    say: Say,
) -> Report:
    """All precisions on all numbers of threads, one after the other. Raises ConfigError for more threads than cores."""
    cores = sorted(os.sched_getaffinity(0))
    if max(threads) > len(cores):
        raise ConfigError(f"{max(threads)} threads on {len(cores)} cores", field="threads")
    size = ModelSize.of(read_config(model_dir))
    report = Report({**machine(max(threads)), "precision": list(precisions)})
    with tempfile.TemporaryDirectory(prefix="kvferry-compare-") as folder:
        logs = Path(folder)
        for count in threads:
            pinned = tuple(cores[-count:])
            before = measure_bounds(count, pinned, logs / "bounds.log")
            measured = {}
            for precision in precisions:
                say(f"{precision}, {count} threads")
                tokens = max(PREFILL_TOKENS, CONTEXT_TOKENS + effort.steps) + 2
                shape = StepShape(model_dir, precision, count, pinned, max(w.batch for w in WORKLOADS), tokens)
                comparison = Comparison(shape, systems, home, say)
                measured[precision] = comparison.run(effort, logs)
                report.left_out += comparison.left_out
                report.machine.setdefault("systems", {}).update(comparison.about)
            bounds = best(before, measure_bounds(count, pinned, logs / "bounds.log"))
            report.machine[f"bounds, {count} threads"] = asdict(bounds)
            for precision, of_precision in measured.items():
                report.rows += rows_of(of_precision, precision, count, size, bounds, effort.steps)
    return report


def as_table(rows: Iterable[CompareRow]) -> Table:
    table = Table(title="tokens/s: median (10th to 90th percentile of all turns or steps)")
    for name in ("precision", "threads", "workload", "system", "tokens/s", "of the bound", "same tokens", "kvferry is"):
        table.add_column(name, justify="left" if name in ("workload", "system") else "right")
    for row in rows:
        speed = row.prefill_tokens_per_s or row.decode_tokens_per_s or 0.0
        ratio = "" if row.ratio is None or row.target is None else f"{row.ratio:.2f}x"
        missed = row.ratio is not None and row.target is not None and row.ratio < row.target
        table.add_row(
            row.precision,
            str(row.threads),
            row.workload,
            row.system,
            f"{speed:.1f} ({row.spread[0]:.1f} to {row.spread[1]:.1f})",
            "" if row.bound_fraction is None else f"{row.bound_fraction:.0%}",
            "" if row.same_tokens is None else f"{row.same_tokens:.0%}",
            f"[red]{ratio}[/red]" if missed else ratio,
        )
    return table


def draw(report: Report, path: Path) -> None:
    panels = []
    for precision, threads in dict.fromkeys((row.precision, row.threads) for row in report.rows):
        rows = [row for row in report.rows if (row.precision, row.threads) == (precision, threads)]
        values = {
            name: [_speed(rows, name, load.name) for load in WORKLOADS]
            for name in SYSTEMS.names()
            if any(row.system == name for row in rows)
        }
        plural = "s" if threads > 1 else ""
        panels.append(Bars(f"{precision}, {threads} thread{plural}", "tokens/s", [w.name for w in WORKLOADS], values))
    draw_bars(path, f"{report.machine['model']}: tokens per second", panels)


def _speed(rows: Iterable[CompareRow], system: str, workload: str) -> float | None:
    for row in rows:
        if (row.system, row.workload) == (system, workload):
            return row.prefill_tokens_per_s or row.decode_tokens_per_s
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = comparison_parser("compare", __doc__, SYSTEMS, "fewer rounds and steps")
    parser.add_argument("--precision", type=names, default=["fp32"], help="fp32, int8 or both, comma-separated")
    parser.add_argument("--threads", type=counts, default=[1, 2], help="comma-separated numbers of threads")
    parser.add_argument("--rounds", type=positive, help="turns of every system in every workload")
    options = parser.parse_args(arguments)
    effort = QUICK if options.quick else FULL
    if options.rounds:
        effort = Effort(options.rounds, effort.steps)
    model_dir, home = chosen_model(options, SYSTEMS), PeersHome(options.peers)
    report = compare(model_dir, home, options.systems, options.precision, options.threads, effort, note)
    conclude(report, options, "compare", draw, as_table)
