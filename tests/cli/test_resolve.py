"""`kvferry resolve` as scripts see it: output, exit code, and what it does not import."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvferry.cli.resolve import resolve_command

APP = typer.Typer()
APP.command()(resolve_command)


def run(*arguments: str, environ: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(APP, [*arguments, "--json"], env=environ)
    return result.exit_code, json.loads(result.stdout)


def test_an_architecture() -> None:
    code, answer = run("--arch", "LlamaForCausalLM")
    assert code == 0
    assert (answer["backend"], answer["runtime"], answer["manager"]) == ("NIXL", "PYTHON", "V2")
    assert (answer["runtime_source"], answer["manager_source"]) == ("model", "model")
    assert (answer["warnings"], answer["error"], answer["disaggregation"]) == ([], None, "validated")
    assert (answer["prefix_reuse"], answer["implemented"]) == (True, True)


def test_a_model_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MiniMaxM2ForCausalLM"]}')
    code, answer = run("--model", str(tmp_path))
    assert (code, answer["architecture"], answer["disaggregation"]) == (0, "MiniMaxM2ForCausalLM", "unvalidated")
    assert any("not validated" in warning for warning in answer["warnings"])


def test_every_setting_is_heard() -> None:
    code, answer = run("--model", "smollm2", "--backend", "SHM", "--runtime", "CPP", "--manager", "V1")
    assert (code, answer["transceiver"], answer["manager_source"]) == (0, "SHM/CPP", "user")
    assert run("--arch", "LlamaForCausalLM", "--transfer-timeout-ms", "null")[1]["runtime"] == "CPP"
    assert run("--arch", "LlamaForCausalLM", "--beam-width", "2")[1]["manager_source"] == "demoted"
    assert run("--arch", "LlamaForCausalLM", "--kv-connector", "x")[1]["manager_source"] == "demoted"
    assert run("--arch", "LlamaForCausalLM", "--speculative", "two-model")[1]["manager_source"] == "demoted"
    assert run("--arch", "LlamaForCausalLM", "--prefix-reuse", "off")[1]["prefix_reuse"] is False
    assert run("--arch", "NemotronHForCausalLM", "--prefix-reuse", "on")[1]["prefix_reuse"] is True


def test_the_environment_is_read() -> None:
    code, answer = run("--arch", "LlamaForCausalLM", environ={"KVFERRY_USE_UCX": "1"})
    assert (code, answer["backend"]) == (0, "UCX")
    assert "KVFERRY_USE_UCX=1 chose backend UCX" in answer["warnings"][0]


def test_what_is_not_built_is_a_warning() -> None:
    code, answer = run("--arch", "LlamaForCausalLM", "--beam-width", "4")
    assert (code, answer["error"], answer["implemented"]) == (0, None, False)
    assert any("beam search is served in process only" in warning for warning in answer["warnings"])


@pytest.mark.parametrize(
    ("arguments", "field", "words"),
    [
        (("--arch", "LlamaForCausalLM", "--backend", "UCX", "--runtime", "PYTHON"), "transceiver.runtime", "UCX"),
        (("--arch", "LlamaForCausalLM", "--backend", "MPI"), "transceiver.backend", "not built"),
        (("--arch", "LlamaForCausalLM", "--transfer-timeout-ms", "soon"), "transceiver.transfer_timeout_ms", "'soon'"),
        (("--arch", "LlamaForCausalLM", "--prefix-reuse", "maybe"), "kv_cache.prefix_reuse", "on or off"),
        (("--arch", "LlamaForCausalLMs"), "architectures", "did you mean LlamaForCausalLM"),
        (("--model", "/no/such/directory"), "model", "smollm2"),
        ((), "model", "--arch"),
        (("--arch", "LlamaForCausalLM", "--model", "smollm2"), "model", "either"),
    ],
)
def test_a_refusal_exits_with_2_and_says_why(arguments: tuple[str, ...], field: str, words: str) -> None:
    code, answer = run(*arguments)
    assert (code, answer["field"]) == (2, field)
    assert words in answer["error"]
    assert answer["backend"] == (arguments[3] if "--backend" in arguments else "DEFAULT")
    assert answer["runtime"] is answer["manager"] is None


def test_for_people() -> None:
    result = CliRunner().invoke(APP, ["--arch", "LlamaForCausalLM", "--backend", "UCX"])
    assert result.exit_code == 0
    assert "transceiver     UCX/CPP (demoted)" in result.stdout
    assert "warning         LlamaForCausalLM prefers PYTHON" in result.stdout
    refused = CliRunner().invoke(APP, ["--arch", "LlamaForCausalLM", "--backend", "MPI"])
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: transceiver.backend MPI")
    assert refused.stdout == ""


def test_the_whole_registry() -> None:
    text = CliRunner().invoke(APP, ["--all"]).stdout
    assert "NemotronH_Nano_Omni_Reasoning_V3" in text
    code, answer = run("--all")
    assert code == 0
    rows = {row["architecture"]: row for row in answer["architectures"]}
    assert rows["MiniMaxM2ForCausalLM"]["disaggregation"] == "unvalidated"
    assert {entry["backend"] for entry in answer["transceivers"]} == {"NIXL", "SHM", "UCX", "MOONCAKE", "MPI"}


def test_it_imports_nothing_heavy() -> None:
    script = (
        "import sys, typer\n"
        "from typer.testing import CliRunner\n"
        "from kvferry.cli.resolve import resolve_command\n"
        "app = typer.Typer(); app.command()(resolve_command)\n"
        "result = CliRunner().invoke(app, ['--model', 'smollm2', '--json'])\n"
        "assert result.exit_code == 0, result.output\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'nixl_cu12', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
