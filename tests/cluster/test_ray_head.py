"""The secret of a Ray cluster of our own: who gets it, and who can read it."""

from __future__ import annotations

import stat
from pathlib import Path

from kvferry.cluster.ray_head import _write_token, token_environ


def test_the_token_is_for_its_owner_alone_and_new_each_time(tmp_path: Path) -> None:
    tokens = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        _write_token(tmp_path / name)
        environ = token_environ({}, tmp_path / name)
        file = Path(environ["RAY_AUTH_TOKEN_PATH"])
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        tokens.add(file.read_text())
    assert len(tokens) == 2
    assert all(len(token) == 64 for token in tokens)


def test_nothing_in_the_environment_takes_the_tokens_place(tmp_path: Path) -> None:
    environ = token_environ({"RAY_AUTH_TOKEN": "another", "RAY_AUTH_MODE": "disabled", "HOME": "/h"}, tmp_path)
    assert environ == {
        "HOME": "/h",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "auth_token"),
    }
