"""DeepSeek V3: multi-head latent attention, and experts chosen within the best groups.

A token's cache is one latent and one rotated key, which all heads share (one plane). Queries are taken into the
latent's space and results back out of it (`kv_b_proj` absorbed into both ends), so that neither prefill nor decode
ever expands cached latents into keys and values per head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.core import GroupKind
from kvferry.models.base import Config, Linear, Weights
from kvferry.models.checked import Shape, count, number
from kvferry.models.feedforward import Experts, FeedForward, Gate, MixtureOfExperts, gate_named, load_feed_forward
from kvferry.models.group_router import RouterShape, load_router
from kvferry.models.layers import PackedRow, RMSNorm, load_packed
from kvferry.models.operators import Operators
from kvferry.models.rope import Rope, rope_from_config, rotate
from kvferry.models.stack import LayerCache, ResidualLayer, ResidualStack, Step, load_norm

_LATENT_EPS = 1e-6
"""Of the norms inside the attention, whatever rms_norm_eps says."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of one head, and of what all heads share. query_rank: of the queries' own latent (None: none)."""

    heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rank: int
    query_rank: int | None

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class DeepseekConfig:
    """config.json, checked. dense_layers: how many come before the first mixture of experts."""

    shape: Shape
    latent: LatentShape
    router: RouterShape
    rope: Rope
    pairs_adjacent: bool
    scale: float
    dense_layers: int
    dense_width: int
    expert_width: int
    shared_width: int
    gate: Gate
    bias: bool

    @classmethod
    def from_json(cls, config: Config) -> DeepseekConfig:
        """Raises CheckpointError naming the key that is missing or bad."""
        heads = count(config, "num_attention_heads")
        rank = config.get("q_lora_rank")
        latent = LatentShape(
            heads=heads,
            nope_dim=count(config, "qk_nope_head_dim", 128),
            rope_dim=count(config, "qk_rope_head_dim", 64),
            value_dim=count(config, "v_head_dim", 128),
            rank=count(config, "kv_lora_rank", 512),
            query_rank=None if rank is None else count(config, "q_lora_rank"),
        )
        expert_width = count(config, "moe_intermediate_size", 2048)
        return cls(
            shape=Shape.from_json({**config, "num_key_value_heads": heads, "head_dim": latent.cached_dim}),
            latent=latent,
            router=RouterShape.from_json(config, chosen=8),
            rope=rope_from_config({**config, "partial_rotary_factor": 1.0}, latent.rope_dim),
            pairs_adjacent=bool(config.get("rope_interleave", True)),
            scale=latent.query_dim**-0.5 * _yarn_sharpening(config),
            dense_layers=count(config, "first_k_dense_replace", 3, least=0),
            dense_width=count(config, "intermediate_size"),
            expert_width=expert_width,
            shared_width=expert_width * count(config, "n_shared_experts", 1),
            gate=gate_named(config, "hidden_act", "silu"),
            bias=bool(config.get("attention_bias", False)),
        )


def _yarn_sharpening(config: Config) -> float:
    """Scores of a stretched context are sharpened by mscale_all_dim, beside what yarn does to the rotation."""
    scaling: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping) or scaling.get("rope_type", scaling.get("type", "default")) == "default":
        return 1.0
    weight, factor = scaling.get("mscale_all_dim") or 0.0, number(scaling, "factor", 1.0)
    return (0.1 * float(weight) * math.log(factor) + 1.0) ** 2 if weight and factor > 1 else 1.0


class Deepseek(ResidualStack):
    """Layers of multi-token prediction behind the last one are not loaded."""

    def __init__(self, config: Config, weights: Weights, operators: Operators) -> None:
        c = DeepseekConfig.from_json(config)
        cache = LayerCache(GroupKind.MLA, kv_heads=1, head_dim=c.latent.cached_dim, planes=1)
        super().__init__(c.shape, [cache] * c.shape.layers, [c.rope], weights, operators)
        self._layers = [
            _load_layer(c, f"{self.prefix}layers.{i}.", i, weights, operators) for i in range(c.shape.layers)
        ]


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """query: queries of all heads, from the hidden state or from `query_norm` of their own latent `query_latent`.
    into_latent: [heads, nope_dim, rank]; out_of_latent: [heads, rank, value_dim]."""

    layer: int
    shape: LatentShape
    query_latent: Linear | None
    query_norm: RMSNorm | None
    query: Linear
    latent: Linear
    latent_norm: RMSNorm
    into_latent: torch.Tensor
    out_of_latent: torch.Tensor
    out: Linear
    scale: float

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        shape, tokens = self.shape, len(x)
        source = x if self.query_latent is None or self.query_norm is None else self.query_norm(self.query_latent(x))
        q = self.query(source).view(tokens, shape.heads, shape.query_dim)
        absorbed = torch.bmm(q[..., : shape.nope_dim].transpose(0, 1), self.into_latent).transpose(0, 1)
        compressed = self.latent(x)
        latent = self.latent_norm(compressed[:, : shape.rank])
        # Sliced out of wider rows, which complex numbers cannot view.
        rotated_q = rotate(q[..., shape.nope_dim :].contiguous(), step.turns[0])
        rotated_k = rotate(compressed[:, None, shape.rank :].contiguous(), step.turns[0])
        k = torch.cat((latent.unsqueeze(1), rotated_k), dim=-1)
        mixed = step.attention(self.layer, torch.cat((absorbed, rotated_q), dim=-1), k, k, self.scale)
        values = torch.bmm(mixed[..., : shape.rank].transpose(0, 1), self.out_of_latent).transpose(0, 1)
        return self.out(values.reshape(tokens, shape.heads * shape.value_dim))


def _load_layer(c: DeepseekConfig, prefix: str, index: int, weights: Weights, operators: Operators) -> ResidualLayer:
    shape = c.shape

    def norm(which: str) -> RMSNorm:
        return load_norm(operators, weights, f"{prefix}{which}_layernorm", shape.hidden_size, shape.norm_eps)

    feed_forward: FeedForward | MixtureOfExperts
    if index < c.dense_layers:
        feed_forward = load_feed_forward(
            weights, f"{prefix}mlp.", shape.hidden_size, c.dense_width, c.gate, operators.linear
        )
    else:
        feed_forward = _load_experts(c, f"{prefix}mlp.", weights, operators)
    attention = _load_attention(c, f"{prefix}self_attn.", index, weights, operators)
    return ResidualLayer(norm("input"), attention, norm("post_attention"), feed_forward)


def _load_attention(
    c: DeepseekConfig, prefix: str, index: int, weights: Weights, operators: Operators
) -> LatentAttention:
    shape, hidden = c.latent, c.shape.hidden_size
    query_latent: Linear | None = None
    query_norm: RMSNorm | None = None
    name, columns = "q_proj", hidden
    if shape.query_rank is not None:
        query_latent = load_packed(
            weights, [PackedRow(f"{prefix}q_a_proj", shape.query_rank, c.bias)], hidden, operators.linear
        )
        query_norm = load_norm(operators, weights, f"{prefix}q_a_layernorm", shape.query_rank, _LATENT_EPS)
        name, columns = "q_b_proj", shape.query_rank
    expand = weights.get(
        f"{prefix}kv_b_proj.weight", (shape.heads * (shape.nope_dim + shape.value_dim), shape.rank)
    ).view(shape.heads, shape.nope_dim + shape.value_dim, shape.rank)
    out = [PackedRow(f"{prefix}o_proj", hidden, c.bias)]
    return LatentAttention(
        layer=index,
        shape=shape,
        query_latent=query_latent,
        query_norm=query_norm,
        query=operators.linear(
            _pairs_together(c, weights, f"{prefix}{name}.weight", shape.heads, shape.query_dim, columns), None
        ),
        latent=_load_latent(c, prefix, weights, operators),
        latent_norm=load_norm(operators, weights, f"{prefix}kv_a_layernorm", shape.rank, _LATENT_EPS),
        into_latent=expand[:, : shape.nope_dim].contiguous(),
        out_of_latent=expand[:, shape.nope_dim :].transpose(1, 2).contiguous(),
        out=load_packed(weights, out, shape.heads * shape.value_dim, operators.linear),
        scale=c.scale,
    )


def _load_latent(c: DeepseekConfig, prefix: str, weights: Weights, operators: Operators) -> Linear:
    name, rows = f"{prefix}kv_a_proj_with_mqa", c.latent.cached_dim
    weight = _pairs_together(c, weights, f"{name}.weight", 1, rows, c.shape.hidden_size)
    bias = _pairs_together(c, weights, f"{name}.bias", 1, rows) if c.bias else None
    return operators.linear(weight, bias)


def _pairs_together(
    c: DeepseekConfig, weights: Weights, name: str, heads: int, head_rows: int, columns: int | None = None
) -> torch.Tensor:
    """A weight or bias whose last rows of each head are rotated, reordered where a pair stands half a head apart."""
    rows = heads * head_rows
    tensor = weights.get(name, (rows,) if columns is None else (rows, columns))
    if c.pairs_adjacent:
        return tensor
    per_head = tensor.view(heads, head_rows, *tensor.shape[1:])
    first = head_rows - c.latent.rope_dim
    still, turning = per_head[:, :first], per_head[:, first:]
    turning = c.rope.interleave(turning.reshape(-1, *tensor.shape[1:])).view(turning.shape)
    return torch.cat((still, turning), dim=1).view(tensor.shape)


def _load_experts(c: DeepseekConfig, prefix: str, weights: Weights, operators: Operators) -> MixtureOfExperts:
    hidden, shape = c.shape.hidden_size, c.router
    router = load_router(weights, f"{prefix}gate", shape, hidden, operators.exact_linear)
    experts = [
        load_feed_forward(weights, f"{prefix}experts.{expert}.", hidden, c.expert_width, c.gate, operators.linear)
        for expert in range(shape.experts)
    ]
    shared = load_feed_forward(weights, f"{prefix}shared_experts.", hidden, c.shared_width, c.gate, operators.linear)
    return MixtureOfExperts(router, Experts(experts), shared)
