"""Whatever is wrong with a command line ends in exit code 2 and one message: never in a traceback."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.main import main
from kvferry.cli.output import refusals

Run = Callable[..., Any]
NOT_TEXT = "a\udcff"  # what Python makes of the byte 0xff on a command line


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--prompt", "a", "--max-tokens", "99999999999"], "max_tokens"),
        (["--prompt", "a", "--top-k", "99999999999"], "top_k"),
        (["--prompt", "a", "--stop", NOT_TEXT], "stop"),
        (["--prompt", NOT_TEXT], "prompt"),
        (["--chat", NOT_TEXT], "chat"),
        (["--prompt", "a", "--model", NOT_TEXT], "model"),
        (["--prompt", "a", "--timeout", "-1"], "timeout"),
        (["--prompt", "a", "--timeout", "nan"], "timeout"),
        (["--prompt", "a", "--timeout", "inf"], "timeout"),
    ],
)
def test_generate_names_what_cannot_be_sent(router: Any, kvferry: Run, arguments: list[str], field: str) -> None:
    result = kvferry("generate", "--endpoint", router.endpoint, "--json", *arguments)
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert (error["code"], error["field"]) == ("INVALID_ARGUMENT", field)
    assert router.requests == []


@pytest.mark.parametrize("directory", ["/proc/x", "/dev/null/x"])
def test_up_names_a_state_directory_that_cannot_be_written(kvferry: Run, directory: str) -> None:
    result = kvferry("up", "--state-dir", directory, "--detach", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["field"] == "state_dir"


def test_what_the_parser_refuses_is_json_too(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    for arguments, field in (
        (["generate", "--prompt", "a", "--temperature", "abc", "--json"], "temperature"),
        (["generate", "--prompt", "a", "--no-such-option", "--json"], "--no-such-option"),
    ):
        monkeypatch.setattr(sys, "argv", ["kvferry", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        error = json.loads(capsys.readouterr().out)["error"]
        assert (error["code"], error["field"]) == ("INVALID_ARGUMENT", field)


def test_exit_codes_pass_through_json_mode(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Path
) -> None:
    for arguments, code in ((["status", "--state-dir", str(tmp_path), "--json"], 2), (["down", "--json"], 0)):
        monkeypatch.setenv("KVFERRY_STATE_DIR", str(tmp_path))
        monkeypatch.setattr(sys, "argv", ["kvferry", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == code
        json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (FileNotFoundError(2, "No such file or directory", "/x/y"), "INVALID_ARGUMENT", "/x/y: No such file"),
        (ZeroDivisionError("division by zero"), "INTERNAL", "a fault of kvferry itself: ZeroDivisionError"),
    ],
)
def test_what_nobody_foresaw_is_told_the_same_way(
    capsys: pytest.CaptureFixture[str], error: Exception, code: str, words: str
) -> None:
    import typer

    with pytest.raises(typer.Exit) as ended, refusals(as_json=True):
        raise error
    assert ended.value.exit_code == 2
    told = json.loads(capsys.readouterr().out)["error"]
    assert told["code"] == code
    assert told["message"].startswith(words)
