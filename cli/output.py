"""How the command talks: facts on stdout (JSON on request), everything else on stderr; exit codes."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import typer

from kvferry.core import ConfigError, InternalError, KVFerryError

logger = logging.getLogger(__name__)

REFUSED = 2


def print_json(value: Any) -> None:
    sys.stdout.write(printable(json.dumps(value, ensure_ascii=False)) + "\n")
    sys.stdout.flush()


def printable(text: str) -> str:
    """Bytes that are no text (an argument quoted in an error) as escapes, which JSON reads too."""
    return text.encode(errors="backslashreplace").decode()


def say(message: str) -> None:
    """Progress and notices: never on stdout, where scripts read."""
    sys.stderr.write(printable(message) + "\n")
    sys.stderr.flush()


def error_dict(error: KVFerryError) -> dict[str, Any]:
    return {"error": {"code": error.code.name, "message": error.message, "field": error.field or None}}


@contextlib.contextmanager
def refusals(as_json: bool) -> Iterator[None]:
    """Turns KVFerryError into exit code 2 and its message, or ``{"error": {code, message, field}}``.

    So too what the operating system refuses, and what the command's own code did not foresee.
    """
    try:
        yield
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except Exception as error:
        refuse(_as_ours(error), as_json)
        raise typer.Exit(REFUSED) from None


def refuse(error: KVFerryError, as_json: bool) -> None:
    if as_json:
        print_json(error_dict(error))
    else:
        say(f"error: {error.message}")


def _as_ours(error: Exception) -> KVFerryError:
    if isinstance(error, KVFerryError):
        return error
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return ConfigError(f"{where}{error.strerror or error}")
    logger.error("a fault of kvferry itself", exc_info=error)
    return InternalError(f"a fault of kvferry itself: {type(error).__name__}: {error}")
