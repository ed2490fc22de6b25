"""`kvferry chat`: a conversation in the terminal. Each turn reuses the KV of the ones before."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvferry.cli.client import Completed, GenerationClient, Message, chat_request
from kvferry.cli.generate import route_line
from kvferry.cli.options import Endpoint, StateDir, find_endpoint
from kvferry.cli.output import refusals, say
from kvferry.core import SamplingParams


def chat_command(
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="At most this many tokens per answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 0.95,
    endpoint: Endpoint = None,
    state_dir: StateDir = None,
) -> None:
    """Talk to the model. An empty line, Ctrl-D or Ctrl-C leaves."""
    messages: list[Message] = [("system", system)] if system else []
    with refusals(False):
        sampling = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens)
        with GenerationClient(find_endpoint(endpoint, state_dir)) as client:
            while line := _read_line():
                messages.append(("user", line))
                try:
                    completed = _answer(client, messages, sampling)
                except KeyboardInterrupt:
                    break
                messages.append(("assistant", completed.text))
                say(route_line(completed))


def _read_line() -> str:
    if sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    try:
        return sys.stdin.readline().strip()
    except KeyboardInterrupt:
        return ""


def _answer(client: GenerationClient, messages: list[Message], sampling: SamplingParams) -> Completed:
    completed = Completed()
    for message in client.stream(chat_request(messages, sampling)):
        completed.add(message)
        sys.stdout.write(message.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return completed
