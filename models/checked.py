"""Values of a config.json, checked: each error is a CheckpointError that names the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.core import CheckpointError
from kvferry.models.base import Config

SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"


def count(config: Config, key: str, default: int | None = None, least: int = 1) -> int:
    """A whole number of at least `least`; `default` where the key is missing or null."""
    value: Any = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json lacks {key}", field=key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CheckpointError(
            f"config.json: {key} must be a whole number of at least {least}, got {value!r}", field=key
        )
    return value


def number(config: Config, key: str, default: float) -> float:
    """A number above 0; `default` where the key is missing or null."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"config.json: {key} must be a number above 0, got {value!r}", field=key)
    return float(value)


def cap(config: Config, key: str) -> float | None:
    """A soft cap: a number above 0, or None where it is not set."""
    return None if config.get(key) is None else number(config, key, 1.0)


def refuse(config: Config, key: str, why: str) -> None:
    """Raises for a feature this implementation lacks, when the checkpoint has it switched on."""
    if config.get(key):
        raise CheckpointError(f"config.json: {key} is {config[key]!r}: {why}", field=key)


def layer_kinds(config: Config, layers: int, known: tuple[str, ...], usual: Callable[[int], str]) -> tuple[str, ...]:
    """layer_types, or `usual` of each layer where the config does not list them."""
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(usual(layer) for layer in range(layers))
    if not isinstance(kinds, list | tuple) or len(kinds) != layers or not set(kinds) <= set(known):
        raise CheckpointError(
            f"config.json: bad layer_types for {layers} layers (known: {', '.join(known)}): {kinds!r}",
            field="layer_types",
        )
    return tuple(kinds)


def text_config(config: Config) -> Config:
    """The text backbone's part of a wrapper's config, or the config itself."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


@dataclass(frozen=True, slots=True)
class Shape:
    """What every text backbone says about itself."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context_tokens: int
    norm_eps: float
    tied: bool

    @classmethod
    def from_json(
        cls, config: Config, usual: Mapping[str, int] | None = None, *, eps: float = 1e-6, tied: bool = False
    ) -> Shape:
        """usual, eps, tied: what the architecture means by a missing key; wrappers leave out what is usual."""
        usual = usual or {}

        def size(key: str, default: int | None = None) -> int:
            return count(config, key, usual.get(key, default))

        heads, hidden = size("num_attention_heads"), size("hidden_size")
        kv_heads = size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads ({heads}) is no multiple of num_key_value_heads ({kv_heads})",
                field="num_key_value_heads",
            )
        return cls(
            vocab_size=size("vocab_size"),
            hidden_size=hidden,
            layers=size("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=size("head_dim", hidden // heads),
            max_context_tokens=size("max_position_embeddings"),
            norm_eps=number(config, "rms_norm_eps", eps),
            tied=bool(config.get("tie_word_embeddings", tied)),
        )
