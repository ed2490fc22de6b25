"""The `kvferry` command. Each subcommand's module is imported when it is called, so that all answer fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.exceptions import TyperException

from kvferry.cli.output import REFUSED, refuse
from kvferry.core import InvalidRequestError

# name -> (function, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("kvferry.cli.up:up_command", "Start a cluster: a router, prefill and decode workers on Ray."),
    "down": ("kvferry.cli.down:down_command", "Stop what `up` started, and nothing else."),
    "status": ("kvferry.cli.status:status_command", "Workers, what each resolved to, blocks and requests."),
    "top": ("kvferry.cli.top:top_command", "The same, live."),
    "generate": ("kvferry.cli.generate:generate_command", "Complete one prompt."),
    "chat": ("kvferry.cli.chat:chat_command", "Talk to the model."),
    "resolve": ("kvferry.cli.resolve:resolve_command", "Dry run: what would a model run with, and why."),
    "drain": ("kvferry.cli.drain:drain_command", "Give a worker no new requests; running ones finish."),
    "logs": ("kvferry.cli.logs:logs_command", "The log of one worker or of the router."),
    "convert": ("kvferry.cli.convert:convert_command", "Unpack a GGUF checkpoint into a Hugging Face directory."),
    "bench": ("kvferry.cli.bench:bench_command", "Measure, and print what the README quotes."),
    "demo": ("kvferry.cli.demo:demo_command", "Start 1 prefill + 1 decode worker, ask a question, stop."),
}


def build_app(called: str | None) -> typer.Typer:
    """The command with all its subcommands named, and `called` imported."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Disaggregated prefill/decode serving for large language models.",
    )
    app.callback()(_root)
    for name, (path, summary) in COMMANDS.items():
        function = _load(path) if name == called else _placeholder
        # Commands that take every configuration key as a flag parse the rest themselves.
        open_ended = getattr(function, "takes_settings", False)
        settings = {"allow_extra_args": True, "ignore_unknown_options": True} if open_ended else {}
        app.command(name, short_help=summary, context_settings=settings)(function)
    return app


def _root() -> None:
    """Disaggregated prefill/decode serving for large language models."""


def _placeholder() -> None:
    raise AssertionError("only the command that was called runs, and that one is imported")


def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def main() -> None:
    called = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    app = build_app(called)
    if "--json" not in sys.argv:
        app()
        return
    try:
        sys.exit(app(standalone_mode=False))
    except TyperException as error:
        refuse(usage_error(error), as_json=True)
        sys.exit(REFUSED)


def usage_error(error: TyperException) -> InvalidRequestError:
    """What the parser of options found wrong, as every other refusal is told; `field` is the option."""
    parameter = getattr(error, "param", None)
    return InvalidRequestError(
        error.format_message(), field=getattr(parameter, "name", None) or getattr(error, "option_name", "") or ""
    )


if __name__ == "__main__":
    main()
