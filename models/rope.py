"""Rotary position embedding: the frequencies of every scaling kind, and the rotation itself.

A head's dimensions i and i + rotary_dim / 2 rotate together. Here such a pair stands side by side: the loader
reorders the rows of W_q and W_k once (`interleave`), and rotating is one complex multiplication. Scores are
unchanged, because q and k are reordered alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.core import CheckpointError


@dataclass(frozen=True, slots=True)
class Rope:
    """inv_freq: float64 [head_dim / 2], zero where nothing rotates; scale: factor on cos and sin (yarn)."""

    head_dim: int
    rotary_dim: int
    inv_freq: torch.Tensor
    scale: float = 1.0

    def table(self, positions: int, device: torch.device) -> torch.Tensor:
        """cos + i sin for every position: complex64 [positions, head_dim / 2]."""
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), self.inv_freq.float())
        # A pair that does not rotate is not scaled either.
        scale = torch.where(self.inv_freq > 0, self.scale, 1.0).float().expand_as(angles)
        return torch.polar(scale.contiguous(), angles).to(device)

    def turn(self, positions: torch.Tensor) -> torch.Tensor:
        """The same for the positions given, int64 [tokens]: complex64 [tokens, 1, head_dim / 2]. No table is kept,
        which for a context of a million tokens would be larger than many a model."""
        inv_freq = self.inv_freq.to(positions.device)
        angles = torch.outer(positions.float(), inv_freq.float())
        scale = torch.where(inv_freq > 0, self.scale, 1.0).float().expand_as(angles)
        return torch.polar(scale.contiguous(), angles).unsqueeze(1)

    def interleave(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorders the first axis, [heads * head_dim, ...], so that pairs stand side by side in each head."""
        half = self.rotary_dim // 2
        order = torch.arange(self.head_dim)
        order[: self.rotary_dim] = torch.arange(self.rotary_dim).view(2, half).t().reshape(-1)
        heads = rows.reshape(-1, self.head_dim, *rows.shape[1:])
        return heads.index_select(1, order.to(rows.device)).reshape(rows.shape)


def rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, head_dim], pairs side by side; turn: complex64 [tokens, 1, head_dim / 2]. A new tensor."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


def rope_from_config(config: Mapping[str, Any], head_dim: int) -> Rope:
    """Reads rope_theta and rope_scaling, or the newer rope_parameters. Raises CheckpointError naming the key."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise CheckpointError(f"config.json: rope_scaling must be an object, got {scaling!r}", field="rope_scaling")
    theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    fraction = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    base, rotary_dim = _number("rope_theta", theta), int(head_dim * _number("partial_rotary_factor", fraction))
    if head_dim % 2 or rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise CheckpointError(f"config.json: cannot rotate {rotary_dim} of head_dim {head_dim}", field="head_dim")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    inv_freq = 1.0 / base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    scale = 1.0
    if kind == "linear":
        inv_freq = inv_freq / _required(scaling, "factor")
    elif kind == "llama3":
        inv_freq = _llama3(inv_freq, scaling)
    elif kind == "proportional":
        # The turning pairs are spaced as if all dimensions turned, and partners stand half a head apart.
        turning = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / head_dim
        inv_freq = 1.0 / base**turning / _number("rope_scaling.factor", scaling.get("factor", 1.0))
        inv_freq = torch.cat((inv_freq, torch.zeros((head_dim - rotary_dim) // 2, dtype=torch.float64)))
        rotary_dim = head_dim
    elif kind == "yarn":
        original = scaling.get("original_max_position_embeddings") or config.get("max_position_embeddings", 0)
        inv_freq, scale = _yarn(inv_freq, scaling, base, float(original))
    elif kind == "longrope":
        inv_freq, scale = _longrope(inv_freq, scaling, config)
    elif kind not in ("default", "dynamic"):  # dynamic differs only beyond max_position_embeddings, our limit
        raise CheckpointError(
            f"config.json: rope_type {kind!r} is not known; known: default, dynamic, linear, llama3, "
            "longrope, proportional, yarn",
            field="rope_scaling",
        )
    still = torch.zeros((head_dim - rotary_dim) // 2, dtype=torch.float64)
    return Rope(head_dim, rotary_dim, torch.cat((inv_freq, still)), scale)


def _llama3(inv_freq: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, those between blended."""
    factor, low = _required(scaling, "factor"), _required(scaling, "low_freq_factor")
    high, original = _required(scaling, "high_freq_factor"), _required(scaling, "original_max_position_embeddings")
    turns = original * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * (keep + (1 - keep) / factor)


def _longrope(
    inv_freq: torch.Tensor, scaling: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    """Every pair has a factor of its own, one for short and one for long contexts. Which is in force is the model's
    context to say, not a request's length: cached keys are shared among requests of all lengths."""
    longest = _number("max_position_embeddings", config.get("max_position_embeddings"))
    given = scaling.get("original_max_position_embeddings", config.get("original_max_position_embeddings", longest))
    original = _number("rope_scaling.original_max_position_embeddings", given)
    key = "long_factor" if longest > original else "short_factor"
    factors = scaling.get(key)
    if not isinstance(factors, list | tuple) or len(factors) != len(inv_freq):
        raise CheckpointError(
            f"config.json: rope_scaling.{key} must be a list of {len(inv_freq)} numbers, got {factors!r}",
            field=f"rope_scaling.{key}",
        )
    divisors = torch.tensor([_number(f"rope_scaling.{key}", each) for each in factors], dtype=torch.float64)
    factor = _number("rope_scaling.factor", scaling.get("factor") or longest / original)
    sharpened = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    attention_factor = scaling.get("attention_factor")
    scale = sharpened if attention_factor is None else _number("rope_scaling.attention_factor", attention_factor)
    return inv_freq / divisors, scale


def _yarn(
    inv_freq: torch.Tensor, scaling: Mapping[str, Any], base: float, original: float
) -> tuple[torch.Tensor, float]:
    """Dimensions that turn often are kept, slow ones interpolated; attention is sharpened by the scale."""
    factor, dim = _required(scaling, "factor"), 2 * len(inv_freq)

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(float(scaling.get("beta_fast") or 32)), dimension(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    slow = ((torch.arange(dim // 2, dtype=torch.float64) - low) / span).clamp(0, 1)
    return inv_freq * (1 - slow) + inv_freq / factor * slow, _yarn_scale(scaling, factor)


def _yarn_scale(scaling: Mapping[str, Any], factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = scaling.get("attention_factor")
    if given is not None:
        return _number("rope_scaling.attention_factor", given)
    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)


def _required(scaling: Mapping[str, Any], key: str) -> float:
    if key not in scaling:
        raise CheckpointError(f"config.json: rope_scaling lacks {key}", field=f"rope_scaling.{key}")
    return _number(f"rope_scaling.{key}", scaling[key])


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"config.json: {key} must be a number above 0, got {value!r}", field=key)
    return float(value)
