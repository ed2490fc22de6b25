"""The table of settings in docs/configuration.md: ``python -P -m kvferry.cluster.config_docs FILE`` rewrites it."""

from __future__ import annotations

import sys
from typing import Any

from pydantic.fields import FieldInfo

from kvferry.cluster.config_sources import SHORT_FLAGS, config_keys
from kvferry.core.generated_page import replace_part, rewrite_page

BEGIN = "<!-- settings: generated -->"
END = "<!-- settings: end -->"


def settings_table() -> str:
    """Markdown: one row per key, overrides of roles left out (they are the same keys behind a prefix)."""
    short = {key: flag for flag, key in SHORT_FLAGS.items()}
    rows = ["| key | default | short flag | meaning |", "|---|---|---|---|"]
    for key, field in config_keys():
        if key.count(".") < 2:
            flag = f"`--{short[key]}`" if key in short else ""
            rows.append(f"| `{key}` | `{_default(field)}` | {flag} | {field.description} |")
    return "\n".join(rows)


def with_table(document: str) -> str:
    """The document with the table between its two marks replaced. Raises ValueError when it has no marks."""
    return replace_part(document, BEGIN, END, f"{BEGIN}\n{settings_table()}\n{END}")


def _default(field: FieldInfo) -> str:
    value: Any = field.default
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value >> 20}MiB"
    return str(list(value) if isinstance(value, tuple) else value)


if __name__ == "__main__":
    raise SystemExit(rewrite_page("kvferry.cluster.config_docs", sys.argv[1:], with_table, sys.stderr.write))
