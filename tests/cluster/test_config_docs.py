"""The manual's table of settings is the code's."""

from __future__ import annotations

from pathlib import Path

from kvferry.cluster.config_docs import settings_table, with_table

MANUAL = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_manual_is_up_to_date() -> None:
    text = MANUAL.read_text(encoding="utf-8")
    assert text == with_table(text), "run: .venv/bin/python -P -m kvferry.cluster.config_docs docs/configuration.md"


def test_the_table_shows_defaults_as_they_are_written() -> None:
    table = settings_table()
    assert "| `kv_cache.bytes` | `512MiB` |" in table
    assert "| `engine.max_step_ms` | `250.0` |" in table
    assert "| `prefill.count` | `1` | `--prefill` |" in table
