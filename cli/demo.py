"""`kvferry demo`: the whole system once, on this machine, in a minute."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvferry.cli.client import Completed, GenerationClient, chat_request
from kvferry.cli.output import refusals, say
from kvferry.cli.up import raise_on_terminate
from kvferry.cluster.config_sources import load_config
from kvferry.cluster.launch import RunningCluster, draw_up, launch, stop
from kvferry.cluster.processes import cluster_processes
from kvferry.core import SamplingParams

QUESTION = "What is the capital of France?"
EXPECTED = "Paris"
MAX_TOKENS = 48
_STAGES = {
    "queue_ms": "waited for prefill",
    "prefill_ms": "prefill computed the prompt",
    "transfer_ms": "decode pulled the KV cache",
    "decode_ms": "decode generated the answer",
    "ttft_ms": "request -> first token",
    "total_ms": "request -> last token",
}


def demo_command(
    model: Annotated[str, typer.Option(help="Known name, Hugging Face directory or .gguf file.")] = "smollm2",
) -> None:
    """Start 1 prefill + 1 decode worker on Ray, ask a question, show where it went, stop everything."""
    with refusals(False), tempfile.TemporaryDirectory(prefix="kvferry-demo-") as directory:
        config = load_config(flags={"model": model, "state_dir": directory})
        lines: list[str] = []

        def note(message: str) -> None:
            lines.append(message)
            say(message)

        raise_on_terminate()
        try:
            running = launch(draw_up(config, note), note)
            try:
                completed = _ask(running)
            finally:
                left = stop(Path(directory), running.state)
        except KeyboardInterrupt:
            say("stopped")
            raise typer.Exit(130) from None
        left += [process.command for process in cluster_processes(running.state.cluster_id)]
        problems = demo_problems(completed, lines, left)
    for problem in problems:
        say(f"demo failed: {problem}")
    if problems:
        raise typer.Exit(1)
    say("everything that was started has been stopped")


def demo_problems(completed: Completed, lines: Sequence[str], left: Sequence[str]) -> list[str]:
    """What keeps the demo from having shown what it is for; empty when it did."""
    problems = []
    if EXPECTED not in completed.text:
        problems.append(f"the answer does not contain {EXPECTED}: {completed.text!r}")
    if not completed.route.get("transferred_bytes"):
        problems.append("no KV bytes moved from prefill to decode")
    problems += [
        f"no resolved line of a {role} worker"
        for role in ("prefill", "decode")
        if not any(line.startswith("resolved ") and f" role={role} " in line for line in lines)
    ]
    return problems + [f"still running: {process}" for process in left]


def _ask(running: RunningCluster) -> Completed:
    say(f"\nQ: {QUESTION}")
    completed = Completed()
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    sys.stdout.write("A: ")
    with GenerationClient(running.state.grpc) as client:
        for message in client.stream(chat_request([("user", QUESTION)], sampling)):
            completed.add(message)
            sys.stdout.write(message.text)
            sys.stdout.flush()
    sys.stdout.write("\n\n" + "\n".join(report_lines(completed)) + "\n\n")
    sys.stdout.flush()
    return completed


def report_lines(completed: Completed) -> list[str]:
    """Route, bytes and the duration of each stage."""
    route, usage = completed.route, completed.usage
    moved = route.get("transferred_bytes", 0)
    lines = [
        f"route    {route.get('prefill')} -> {route.get('decode')}",
        f"moved    {moved:,} bytes of KV cache for {usage.get('prompt_tokens', 0)} prompt tokens",
        f"answer   {usage.get('completion_tokens', 0)} tokens, finished by {completed.as_dict(False)['finish_reason']}",
    ]
    stages = [f"  {completed.timings.get(key, 0.0):9.1f} ms  {label}" for key, label in _STAGES.items()]
    return [*lines, "stages", *stages]
