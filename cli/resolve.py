"""`kvferry resolve`: what would this model run with, and why. A dry run: nothing is started, torch is not imported."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from kvferry.core import ConfigError
from kvferry.resolution import (
    ResolutionError,
    ResolveRequest,
    build_gaps,
    card_named,
    example_config,
    failed_resolution_dict,
    original_architecture,
    prefix_reuse_enabled,
    probe_libraries,
    read_config,
    resolution_dict,
    resolve,
)

EXIT_REFUSED = 2


def resolve_command(
    arch: Annotated[str | None, typer.Option(help="An architecture, such as LlamaForCausalLM.")] = None,
    model: Annotated[str | None, typer.Option(help="A checkpoint directory, or a known model's name.")] = None,
    backend: Annotated[
        str, typer.Option(help="NONE, DEFAULT, NIXL, UCX, MOONCAKE, SHM or a third party's.")
    ] = "DEFAULT",
    runtime: Annotated[str, typer.Option(help="auto, CPP or PYTHON.")] = "auto",
    manager: Annotated[str, typer.Option(help="auto, V1 or V2.")] = "auto",
    transfer_timeout_ms: Annotated[str, typer.Option(help="Milliseconds, or null for none.")] = "60000",
    beam_width: Annotated[int, typer.Option(help="Beams per request.")] = 1,
    kv_connector: Annotated[str | None, typer.Option(help="An external KV connector in use.")] = None,
    speculative: Annotated[str | None, typer.Option(help="two-model: speculative decoding with a draft model.")] = None,
    prefix_reuse: Annotated[str | None, typer.Option(help="on or off; left out: what suits the model.")] = None,
    show_all: Annotated[bool, typer.Option("--all", help="List every known architecture and transceiver.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which transceiver runtime and KV cache manager a model would run with, and why."""
    if show_all:
        _print_all(as_json)
        return
    answer: dict[str, Any]
    try:
        config = _config(arch, model)
        request = ResolveRequest(
            architecture=original_architecture(config),
            config=config,
            backend=backend,
            runtime=runtime,
            manager=manager,
            transfer_timeout_ms=_timeout(transfer_timeout_ms),
            beam_width=beam_width,
            kv_connector=kv_connector,
            speculative=speculative,
            prefix_reuse=_switch(prefix_reuse),
            environ=os.environ,
            missing_libraries=probe_libraries(backend, os.environ),
        )
        answer = _resolved(request)
    except ConfigError as error:
        answer = failed_resolution_dict(arch or model or "", error, backend=backend)
    _print_answer(answer, as_json)
    if answer["error"]:
        raise typer.Exit(EXIT_REFUSED)


def _config(arch: str | None, model: str | None) -> Mapping[str, Any]:
    if (arch is None) == (model is None):
        raise ResolutionError("name either an architecture (--arch) or a model (--model)", field="model")
    return example_config(arch) if arch is not None else read_config(model or "")


def _timeout(value: str) -> int | None:
    if value.strip().lower() in ("null", "none"):
        return None
    try:
        return int(value)
    except ValueError:
        raise ResolutionError(
            f"transfer_timeout_ms must be a whole number of milliseconds or null, got {value!r}",
            field="transceiver.transfer_timeout_ms",
        ) from None


def _switch(value: str | None) -> bool | None:
    if value is None:
        return None
    if value.lower() not in ("on", "off"):
        raise ResolutionError(f"prefix_reuse must be on or off, got {value!r}", field="kv_cache.prefix_reuse")
    return value.lower() == "on"


def _resolved(request: ResolveRequest) -> dict[str, Any]:
    resolution = resolve(request)
    answer = resolution_dict(resolution)
    gaps = build_gaps(resolution, request)
    answer["warnings"] += [gap.message for gap in gaps]
    answer["prefix_reuse"] = prefix_reuse_enabled(request.config, resolution.manager, request.prefix_reuse)
    answer["implemented"] = not gaps and card_named(resolution.architecture).implementation is not None
    return answer


def _print_answer(answer: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer, indent=2))
        return
    if answer["error"]:
        print(f"error: {answer['error']}", file=sys.stderr)
        return
    for label, value in (
        ("model", answer["architecture"]),
        ("transceiver", f"{answer['transceiver']} ({answer['runtime_source'] or 'aggregated'})"),
        ("KV manager", f"{answer['manager']} ({answer['manager_source']})"),
        ("prefix reuse", "on" if answer["prefix_reuse"] else "off"),
        ("disaggregation", answer["disaggregation"]),
        ("reason", answer["reason"]),
    ):
        print(f"{label:<15} {value}")
    for warning in answer["warnings"]:
        print(f"{'warning':<15} {warning}")


def _print_all(as_json: bool) -> None:
    from kvferry.resolution.table import ARCHITECTURE_COLUMNS, TRANSCEIVER_COLUMNS, architecture_rows, transceiver_cells

    rows = architecture_rows()
    if as_json:
        transceivers = [dict(zip(TRANSCEIVER_COLUMNS, cells, strict=True)) for cells in transceiver_cells()]
        print(json.dumps({"architectures": [row.as_dict() for row in rows], "transceivers": transceivers}, indent=2))
        return
    _print_columns(TRANSCEIVER_COLUMNS, transceiver_cells())
    print()
    _print_columns(ARCHITECTURE_COLUMNS, [row.cells() for row in rows])


def _print_columns(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned, never cut: names are there to be copied and grepped."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
