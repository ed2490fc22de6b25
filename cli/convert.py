"""`kvferry convert`: GGUF to a Hugging Face directory, once."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.cli.options import Json
from kvferry.cli.output import print_json, refusals


def convert_command(
    model: Annotated[str, typer.Argument(help="A .gguf file, or a known name such as smollm2.")],
    as_json: Json = False,
) -> None:
    """Unpack a checkpoint into the cache ($KVFERRY_CACHE, else ~/.cache/kvferry) and print where it is."""
    from kvferry.models import progress_bar, resolve_model  # torch

    with refusals(as_json):
        with progress_bar() as progress:
            directory = resolve_model(model, progress)
        if as_json:
            print_json({"model": model, "directory": str(directory)})
        else:
            typer.echo(str(directory))
