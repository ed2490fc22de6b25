"""Pages of the manual that hold a generated part between two marker lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path


def replace_part(page: str, begin: str, end: str, made: str) -> str:
    """`page` with everything from marker `begin` to marker `end`, both included, replaced by `made`.

    Raises ValueError when a marker is missing: the page has no generated part.
    """
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the page has no generated part: it needs the lines {begin!r} and {end!r}")
    return before + made + after


def rewrite_page(
    module: str, arguments: Sequence[str], made_anew: Callable[[str], str], write: Callable[[str], object]
) -> int:
    """The command ``python -m MODULE PAGE``: rewrites the page in place. Returns the exit code."""
    if len(arguments) != 1:
        write(f"usage: python -m {module} PAGE\n")
        return 2
    path = Path(arguments[0])
    path.write_text(made_anew(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0
