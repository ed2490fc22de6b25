"""`kvferry up`: start a cluster and stay, or leave it running with --detach."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from kvferry.cli.options import Json
from kvferry.cli.output import print_json, refusals, say
from kvferry.cluster.config import ClusterConfig
from kvferry.cluster.config_sources import load_config, parse_flags, parse_value
from kvferry.cluster.launch import RunningCluster, draw_up, launch, stop
from kvferry.cluster.state_file import alive
from kvferry.core import UnavailableError

WATCH_S = 0.5


def up_command(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Option("-c", "--config", help="YAML file; flags override it.")] = None,
    model: Annotated[str | None, typer.Option(help="Known name (smollm2), Hugging Face directory or .gguf.")] = None,
    prefill: Annotated[str | None, typer.Option(help="Prefill workers.", metavar="N")] = None,
    decode: Annotated[str | None, typer.Option(help="Decode (on NONE: aggregated) workers.", metavar="N")] = None,
    backend: Annotated[str | None, typer.Option(help="Transceiver backend; NONE: aggregated serving.")] = None,
    runtime: Annotated[str | None, typer.Option(help="Transceiver runtime: auto, CPP or PYTHON.")] = None,
    manager: Annotated[str | None, typer.Option(help="KV cache manager: auto, V1 or V2.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="State file and logs.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when ready; stop with `kvferry down`.")] = False,
    as_json: Json = False,
) -> None:
    """Start a cluster on this machine, or on an existing Ray cluster (--ray-address HOST:PORT).

    Every configuration key is a flag too: --engine.max_batch 16, --decode.kv_cache.bytes 2GiB
    (docs/configuration.md lists them).
    """
    short = {
        "model": model,
        "prefill.count": prefill,
        "decode.count": decode,
        "transceiver.backend": backend,
        "transceiver.runtime": runtime,
        "kv_cache.manager": manager,
        "state_dir": str(state_dir) if state_dir else None,
    }
    with refusals(as_json):
        # A path stays text; everything else is typed as in the file.
        flags = {
            key: value if key in ("model", "state_dir") else parse_value(value)
            for key, value in short.items()
            if value is not None
        }
        settings = load_config(config, {**flags, **parse_flags(ctx.args)})
        raise_on_terminate()
        try:
            running = launch(draw_up(settings, say), say)
        except KeyboardInterrupt:
            say("stopped")
            raise typer.Exit(130) from None
        _announce(running, settings, as_json, detach)
        if not detach:
            _stay(running, settings)


up_command.takes_settings = True  # type: ignore[attr-defined]


def up_dict(running: RunningCluster, settings: ClusterConfig) -> dict[str, Any]:
    keys = ("name", "role", "pid", "endpoint", "incarnation", "resolution")
    return {
        "cluster_id": running.state.cluster_id,
        "grpc": running.state.grpc,
        "http": running.state.http,
        "workers": [{key: worker[key] for key in keys} for worker in running.workers],
        "state_dir": settings.state_dir,
    }


def _announce(running: RunningCluster, settings: ClusterConfig, as_json: bool, detach: bool) -> None:
    if as_json:
        print_json(up_dict(running, settings))
        return
    say(f"cluster {running.state.cluster_id} serves {running.state.model}")
    say(f"  gRPC {running.state.grpc}")
    say(f"  HTTP http://{running.state.http}/v1")
    ending = "kvferry down stops it" if detach else "Ctrl-C stops it"
    say(f"  state and logs in {settings.state_dir}; {ending}")


def _stay(running: RunningCluster, settings: ClusterConfig) -> None:
    """Until Ctrl-C, SIGTERM, or the cluster's own end."""
    directory = Path(settings.state_dir)
    died = False
    try:
        while alive(running.state):
            time.sleep(WATCH_S)
        died = True
    except KeyboardInterrupt:
        say("stopping")
    _uninterrupted(lambda: stop(directory, running.state))
    if died:
        raise UnavailableError(f"the cluster ended by itself; its logs are in {directory / 'logs'}")


def raise_on_terminate() -> None:
    """SIGTERM takes the same way out as Ctrl-C: everything started is stopped."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _uninterrupted(action: Callable[[], list[str]]) -> None:
    """A second Ctrl-C must not leave half a cluster behind."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        left = action()
    finally:
        signal.signal(signal.SIGINT, before)
    if left:
        raise UnavailableError(f"could not be stopped: {', '.join(left)}")
