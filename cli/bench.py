"""`kvferry bench`: every figure the README quotes, one command each."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from kvferry.cli.output import refusals
from kvferry.core import Registry

Main = Callable[[Sequence[str] | None], None]

# name -> lazy path of a main(arguments) that parses its own flags
BENCHES: Registry[str] = Registry("benchmark", "bench")
BENCHES.register("floor", "kvferry.bench.floor:main")
BENCHES.register("transfer", "kvferry.bench.transfer:main")
BENCHES.register("step", "kvferry.bench.step:main")
BENCHES.register("scale", "kvferry.bench.scale:main")
BENCHES.register("precision", "kvferry.bench.precision:main")
BENCHES.register("kvcache", "kvferry.bench.kvcache:main")
BENCHES.register("wire", "kvferry.bench.wire:main")
BENCHES.register("compare", "kvferry.bench.compare:main")
BENCHES.register("serve", "kvferry.bench.serve:main")
BENCHES.register("interference", "kvferry.bench.interference:main")


def bench_command(
    ctx: typer.Context, name: Annotated[str, typer.Argument(help=f"One of: {', '.join(BENCHES.names())}.")]
) -> None:
    """Run a benchmark. Its own flags follow its name: kvferry bench floor --json."""
    with refusals("--json" in ctx.args):
        module, _, function = BENCHES.get(name).partition(":")
        main: Main = getattr(importlib.import_module(module), function)
        main(ctx.args)


bench_command.takes_settings = True  # type: ignore[attr-defined]
