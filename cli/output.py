"""How the command talks: facts on stdout (JSON on request), everything else on stderr; exit codes."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import typer

from kvferry.core import KVFerryError

REFUSED = 2


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def say(message: str) -> None:
    """Progress and notices: never on stdout, where scripts read."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def error_dict(error: KVFerryError) -> dict[str, Any]:
    return {"error": {"code": error.code.name, "message": error.message, "field": error.field or None}}


@contextlib.contextmanager
def refusals(as_json: bool) -> Iterator[None]:
    """Turns KVFerryError into exit code 2 and its message, or ``{"error": {code, message, field}}``."""
    try:
        yield
    except KVFerryError as error:
        if as_json:
            print_json(error_dict(error))
        else:
            say(f"error: {error.message}")
        raise typer.Exit(REFUSED) from None
