"""Llama4's text backbone: attention in chunks where positions are rotated, all the way back where they are not;
every n-th layer a mixture of experts with one that sees every token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.core import CheckpointError, GroupKind
from kvferry.models.attention import GroupedAttention, HeadShape, load_out, load_qkv
from kvferry.models.base import Config, Linear, Weights
from kvferry.models.checked import CHUNKED, FULL, Shape, count, layer_kinds, number, text_config
from kvferry.models.feedforward import (
    Experts,
    FeedForward,
    Gate,
    MixtureOfExperts,
    Routing,
    TransposedExperts,
    gate_named,
    load_feed_forward,
)
from kvferry.models.layers import PackedRow, RMSNorm, load_packed
from kvferry.models.operators import Operators
from kvferry.models.rope import Rope, rope_from_config, rotate
from kvferry.models.stack import LayerCache, ResidualLayer, ResidualStack, Step, load_norm

_USUAL = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
}
_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries of layers without positions grow with the logarithm of how far they stand."""

    floor: float
    scale: float

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """[tokens, 1, 1]."""
        stretched = torch.log1p(torch.floor((positions.float() + 1.0) / self.floor)) * self.scale + 1.0
        return stretched.view(-1, 1, 1)


@dataclass(frozen=True, slots=True)
class Llama4Config:
    """config.json, checked. chunks: per layer, tokens of a chunk (None: full attention); rotated: per layer."""

    shape: Shape
    chunks: tuple[int | None, ...]
    rotated: tuple[bool, ...]
    moe_layers: frozenset[int]
    rope: Rope
    qk_norm: bool
    temperature: Temperature | None
    expert_width: int
    dense_width: int
    experts: int
    chosen: int
    gate: Gate
    bias: bool

    @classmethod
    def from_json(cls, config: Config) -> Llama4Config:
        """`config` may be a wrapper's. Raises CheckpointError naming the key that is missing or bad."""
        config = text_config(config)
        shape = Shape.from_json(config, _USUAL, eps=_EPS)
        rotated = _rotated(config, shape.layers)
        size = None if config.get("attention_chunk_size", 8192) is None else count(config, "attention_chunk_size", 8192)
        kinds = layer_kinds(
            config, shape.layers, (CHUNKED, FULL), lambda layer: CHUNKED if rotated[layer] and size else FULL
        )
        step = count(config, "interleave_moe_layer_step", 1)
        listed = config.get("moe_layers")
        tuned = config.get("attn_temperature_tuning", True)
        experts = count(config, "num_local_experts", 16)
        return cls(
            shape=shape,
            chunks=tuple(size if kind == CHUNKED else None for kind in kinds),
            rotated=rotated,
            moe_layers=frozenset(range(step - 1, shape.layers, step) if listed is None else listed),
            rope=rope_from_config({"rope_theta": 500_000.0, **config}, shape.head_dim),
            qk_norm=bool(config.get("use_qk_norm", True)),
            temperature=Temperature(number(config, "floor_scale", 8192), number(config, "attn_scale", 0.1))
            if tuned
            else None,
            expert_width=count(config, "intermediate_size", 8192),
            dense_width=count(config, "intermediate_size_mlp", 16_384),
            experts=experts,
            chosen=min(experts, count(config, "num_experts_per_tok", 1)),
            gate=gate_named(config, "hidden_act", "silu"),
            bias=bool(config.get("attention_bias", False)),
        )

    def cache_of(self, layer: int) -> LayerCache:
        size = self.chunks[layer]
        kind = GroupKind.FULL if size is None else GroupKind.CHUNKED
        return LayerCache(kind, self.shape.kv_heads, self.shape.head_dim, size)


def _rotated(config: Config, layers: int) -> tuple[bool, ...]:
    """no_rope_layers says, against its name, 1 for layers that are rotated."""
    listed = config.get("no_rope_layers")
    if listed:
        if len(listed) != layers:
            raise CheckpointError(
                f"config.json: no_rope_layers lists {len(listed)} of {layers} layers", field="no_rope_layers"
            )
        return tuple(bool(entry) for entry in listed)
    interval = count(config, "no_rope_layer_interval", 4)
    return tuple((layer + 1) % interval != 0 for layer in range(layers))


class Llama4(ResidualStack):
    """Alone, or the text part of Llama4ForConditionalGeneration."""

    def __init__(self, config: Config, weights: Weights, operators: Operators) -> None:
        c = Llama4Config.from_json(config)
        caches = [c.cache_of(layer) for layer in range(c.shape.layers)]
        super().__init__(c.shape, caches, [c.rope], weights, operators)
        self._layers = [
            _load_layer(c, f"{self.prefix}layers.{i}.", i, weights, operators) for i in range(c.shape.layers)
        ]


@dataclass(frozen=True, slots=True)
class _Attention:
    """rotated: with positions. qk_norm: without weights, after the rotation."""

    inner: GroupedAttention
    rotated: bool
    qk_norm: RMSNorm | None
    temperature: Temperature | None

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        q, k, v = self.inner.project(x)
        if self.rotated:
            q, k = rotate(q, step.turns[0]), rotate(k, step.turns[0])
            if self.qk_norm is not None:
                q, k = self.qk_norm(q), self.qk_norm(k)
        elif self.temperature is not None:
            q = q * self.temperature(step.positions).to(q.dtype)
        mixed = step.attention(self.inner.layer, q, k, v, self.inner.scale)
        return self.inner.out(mixed.reshape(len(x), -1))


@dataclass(frozen=True, slots=True)
class _Router:
    """The share of an expert is the sigmoid of its own logit."""

    logits: Linear
    chosen: int

    def __call__(self, x: torch.Tensor) -> Routing:
        best = self.logits(x).topk(self.chosen, dim=-1)
        return Routing(best.indices, torch.sigmoid(best.values.float()))


def _load_layer(c: Llama4Config, prefix: str, index: int, weights: Weights, operators: Operators) -> ResidualLayer:
    shape = c.shape

    def norm(which: str) -> RMSNorm:
        return load_norm(operators, weights, f"{prefix}{which}_layernorm", shape.hidden_size, shape.norm_eps)

    name = f"{prefix}feed_forward."
    feed_forward: FeedForward | MixtureOfExperts
    if index in c.moe_layers:
        feed_forward = _load_experts(c, name, weights, operators)
    else:
        feed_forward = load_feed_forward(weights, name, shape.hidden_size, c.dense_width, c.gate, operators.linear)
    attention = _load_attention(c, f"{prefix}self_attn.", index, weights, operators)
    return ResidualLayer(norm("input"), attention, norm("post_attention"), feed_forward)


def _load_attention(c: Llama4Config, prefix: str, index: int, weights: Weights, operators: Operators) -> _Attention:
    """The checkpoint's pairs stand side by side already."""
    shape = c.shape
    heads = HeadShape(shape.heads, shape.kv_heads, shape.head_dim)
    inner = GroupedAttention(
        layer=index,
        qkv=load_qkv(weights, prefix, heads, shape.hidden_size, c.bias, None, operators.linear),
        out=load_out(weights, prefix, heads, shape.hidden_size, c.bias, operators.linear),
        shape=heads,
        scale=shape.head_dim**-0.5,
    )
    norm = RMSNorm(operators.rms_norm, torch.ones(shape.head_dim), shape.norm_eps) if c.qk_norm else None
    return _Attention(inner, c.rotated[index], norm, c.temperature)


def _load_experts(c: Llama4Config, prefix: str, weights: Weights, operators: Operators) -> MixtureOfExperts:
    hidden, width = c.shape.hidden_size, c.expert_width
    router = load_packed(weights, [PackedRow(f"{prefix}router", c.experts)], hidden, operators.exact_linear)
    stored = TransposedExperts(
        weights.get(f"{prefix}experts.gate_up_proj", (c.experts, hidden, 2 * width)),
        weights.get(f"{prefix}experts.down_proj", (c.experts, width, hidden)),
    )
    shared = load_feed_forward(weights, f"{prefix}shared_expert.", hidden, width, c.gate, operators.linear)
    experts = Experts(stored.pack(c.gate, operators.linear), scale_input=True)
    return MixtureOfExperts(_Router(router, c.chosen), experts, shared)
