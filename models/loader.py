"""From a name or path to a model that computes."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from kvferry.core import CheckpointError, ConfigError
from kvferry.models.base import CausalLM, Config, Weights
from kvferry.models.checked import text_config
from kvferry.models.convert import convert_gguf
from kvferry.models.fingerprint import checkpoint_fingerprint
from kvferry.models.header_weights import HeaderWeights, unpacked_linear
from kvferry.models.operators import Operators, torch_operators
from kvferry.models.progress import ProgressCallback
from kvferry.models.shard import WHOLE, Shard
from kvferry.models.sharding import Collectives, ShardedWeights, SlicedWeights, shard_config
from kvferry.models.weights import CheckpointWeights
from kvferry.resolution import KNOWN_MODELS, KnownModel, find_card, read_config, required_implementation

Implementation = Callable[[Config, Weights, Operators], CausalLM]
"""What a card's lazy path names: builds the model, taking every tensor it needs from the weights."""


def _weights_of(name: str, known: KnownModel) -> Path:
    found = importlib.util.find_spec(known.package)  # finds, does not import: its own dependencies may be absent
    for folder in (found.submodule_search_locations or []) if found else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(
        f"the model {name} comes with the package {known.package}, which is not installed: {known.install}",
        field="model",
    )


def resolve_model(name_or_dir: str | Path, progress: ProgressCallback | None = None) -> Path:
    """The HF directory of a known name, a directory or a .gguf file (converted on first use, which may take
    a while). Raises ConfigError or CheckpointError saying what was looked for."""
    known = KNOWN_MODELS.get(str(name_or_dir))
    path = _weights_of(str(name_or_dir), known) if known else Path(name_or_dir).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            inside = sorted(file.name for file in path.glob("*.gguf"))
            hint = f"; name the file itself: {path / inside[0]}" if inside else ""
            raise CheckpointError(f"{path} is no model directory: it has no config.json{hint}", field="model")
        return path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is neither a model directory nor a .gguf file", field="model")
        return convert_gguf(path.resolve(), progress)
    names = ", ".join(sorted(KNOWN_MODELS))
    raise ConfigError(
        f"unknown model {str(name_or_dir)!r}: no such directory or .gguf file, and no known name ({names})",
        field="model",
    )


def load_model(
    model_dir: Path,
    operators: Operators,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    shard: Shard = WHOLE,
    collectives: Collectives | None = None,
) -> CausalLM:
    """The model in `model_dir`, or what `shard` holds of it, its weights read, packed by `operators.linear` and held by
    the result alone. collectives: joins the ranks of a tensor-parallel stage.

    Raises CheckpointError, and ConfigError when the model cannot be divided like that.
    """
    config = read_config(model_dir)
    find_implementation(config)
    _refuse_quantised(config)
    with CheckpointWeights(Path(model_dir), dtype, torch.device(device)) as weights:
        return _build(config, weights, operators, shard, collectives)


def _build(
    config: Config, weights: SlicedWeights, operators: Operators, shard: Shard, collectives: Collectives | None
) -> CausalLM:
    build = find_implementation(config)
    if shard.size == 1:
        return build(config, weights, operators)
    return build(shard_config(config, shard), ShardedWeights(weights, config, shard, collectives), operators)


def _refuse_quantised(config: Config) -> None:
    """Weights that need scales beside them would load, and compute nonsense. Only mxfp4 experts are dequantised."""
    method = (text_config(config).get("quantization_config") or config.get("quantization_config") or {}).get(
        "quant_method"
    )
    if method is not None and method != "mxfp4":
        raise CheckpointError(
            f"config.json: weights quantised by {method!r} cannot be loaded; convert the checkpoint to bfloat16 first",
            field="quantization_config",
        )


def inspect_model(model_dir: Path, shard: Shard = WHOLE) -> CausalLM:
    """The model, or a part of it, as `load_model` would build it, from config.json and the headers of the weights
    alone: it has limits and layouts, and cannot compute.

    Raises CheckpointError naming the key, file or tensor that would stop the load, ConfigError as `load_model`.
    """
    config = read_config(model_dir)
    find_implementation(config)
    _refuse_quantised(config)
    weights = HeaderWeights(Path(model_dir))
    try:
        return _build(config, weights, torch_operators(unpacked_linear), shard, None)
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        path = Path(model_dir) / "config.json"
        raise CheckpointError(
            f"{path} does not describe a model: {type(error).__name__}: {error}", field="model"
        ) from None


def model_fingerprint(model_dir: Path) -> str:
    """Equal exactly for the same model, on any machine; 32 hex digits. Reads a sample of the weights."""
    return checkpoint_fingerprint(Path(model_dir), read_config(model_dir))


def find_implementation(config: Config) -> Implementation:
    """The class that the architecture's card names. Raises ConfigError when there is no card, or no class."""
    path = required_implementation(find_card(config))
    module, _, name = path.partition(":")
    try:
        return cast(Implementation, getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the implementation {path} cannot be imported: {error}", field="model") from error
