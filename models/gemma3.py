"""Gemma3's text backbone: local and global layers with a RoPE base each, four norms per layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.models.attention import GroupedAttention, HeadShape, load_head_norm, load_out, load_qkv
from kvferry.models.base import Config, Weights
from kvferry.models.checked import FULL, SLIDING, Shape, cap, count, layer_kinds, number, refuse, text_config
from kvferry.models.feedforward import FeedForward, Gate, gate_named, load_feed_forward
from kvferry.models.layers import RMSNorm
from kvferry.models.operators import Operators
from kvferry.models.rope import Rope, rope_from_config
from kvferry.models.stack import LayerCache, LayerStack, Step, load_norm

KINDS = (SLIDING, FULL)
"""In the order of the model's ropes."""

_USUAL = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
"""What a checkpoint means by leaving a size out; those written as wrappers do."""
_NORM_OFFSET = 1.0
_THETAS = {SLIDING: ("rope_local_base_freq", 10_000.0), FULL: ("rope_theta", 1_000_000.0)}


@dataclass(frozen=True, slots=True)
class Gemma3Config:
    """config.json, checked. kinds: SLIDING or FULL of each layer; ropes: one per kind, in the order of KINDS."""

    shape: Shape
    kinds: tuple[str, ...]
    window: int
    ropes: tuple[Rope, ...]
    intermediate_size: int
    gate: Gate
    scale: float
    bias: bool
    logit_cap: float | None

    @classmethod
    def from_json(cls, config: Config) -> Gemma3Config:
        """`config` may be a wrapper's. Raises CheckpointError naming the key that is missing, bad or not supported."""
        config = text_config(config)
        refuse(config, "attn_logit_softcapping", "soft caps on attention scores are not built")
        refuse(config, "use_bidirectional_attention", "only causal models generate text")
        shape = Shape.from_json(config, _USUAL, tied=True)
        pattern = count(config, "sliding_window_pattern", 6)
        return cls(
            shape=shape,
            kinds=layer_kinds(config, shape.layers, KINDS, lambda layer: SLIDING if (layer + 1) % pattern else FULL),
            window=count(config, "sliding_window", 4096),
            ropes=tuple(rope_from_config(kind_rope(config, kind, _THETAS), shape.head_dim) for kind in KINDS),
            intermediate_size=count(config, "intermediate_size", 9216),
            gate=gate_named(config, "hidden_activation", "gelu_pytorch_tanh"),
            scale=number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
            bias=bool(config.get("attention_bias", False)),
            logit_cap=cap(config, "final_logit_softcapping"),
        )

    def cache_of(self, layer: int) -> LayerCache:
        window = self.window if self.kinds[layer] == SLIDING else None
        return LayerCache.attending(self.shape.kv_heads, self.shape.head_dim, window)


def kind_rope(config: Config, kind: str, thetas: Mapping[str, tuple[str, float]]) -> Config:
    """The rope settings of one kind of layer, under the keys of a model that has only one.

    thetas: per kind, the older key and the usual value. An older config's rope_scaling is for full layers alone.
    """
    key, usual = thetas[kind]
    nested = config.get("rope_parameters")
    own: dict[str, Any] = {}
    if isinstance(nested, Mapping) and (KINDS[0] in nested or KINDS[1] in nested):
        own = dict(nested.get(kind) or {})
    elif kind == FULL:
        own = dict(nested or config.get("rope_scaling") or {})
    own.setdefault("rope_theta", config.get(key) or usual)
    return {"rope_parameters": own, "max_position_embeddings": config.get("max_position_embeddings", 0)}


class Gemma3(LayerStack):
    """Alone, or the text part of Gemma3ForConditionalGeneration."""

    def __init__(self, config: Config, weights: Weights, operators: Operators) -> None:
        c = Gemma3Config.from_json(config)
        super().__init__(
            c.shape,
            [c.cache_of(layer) for layer in range(c.shape.layers)],
            c.ropes,
            weights,
            operators,
            norm_offset=_NORM_OFFSET,
            embedding_scale=c.shape.hidden_size**0.5,
            logit_cap=c.logit_cap,
        )
        self._layers = [_Layer.load(c, self.prefix, index, weights, operators) for index in self.held]

    def _run(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        for layer in self._layers:
            x = layer(x, step)
        return x


@dataclass(frozen=True, slots=True)
class _Layer:
    before_attention: RMSNorm
    attention: GroupedAttention
    after_attention: RMSNorm
    before_mlp: RMSNorm
    mlp: FeedForward
    after_mlp: RMSNorm

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        x = x + self.after_attention(self.attention(self.before_attention(x), step))
        return x + self.after_mlp(self.mlp(self.before_mlp(x)))

    @classmethod
    def load(cls, c: Gemma3Config, prefix: str, index: int, weights: Weights, operators: Operators) -> _Layer:
        name, shape = f"{prefix}layers.{index}.", c.shape

        def norm(which: str) -> RMSNorm:
            return load_norm(
                operators, weights, f"{name}{which}_layernorm", shape.hidden_size, shape.norm_eps, _NORM_OFFSET
            )

        return cls(
            norm("input"),
            _load_attention(c, f"{name}self_attn.", index, weights, operators),
            norm("post_attention"),
            norm("pre_feedforward"),
            load_feed_forward(weights, f"{name}mlp.", shape.hidden_size, c.intermediate_size, c.gate, operators.linear),
            norm("post_feedforward"),
        )


def _load_attention(
    c: Gemma3Config, prefix: str, index: int, weights: Weights, operators: Operators
) -> GroupedAttention:
    shape, which = c.shape, KINDS.index(c.kinds[index])
    rope, heads = c.ropes[which], HeadShape(shape.heads, shape.kv_heads, shape.head_dim)
    return GroupedAttention(
        layer=index,
        qkv=load_qkv(weights, prefix, heads, shape.hidden_size, c.bias, rope, operators.linear),
        out=load_out(weights, prefix, heads, shape.hidden_size, c.bias, operators.linear),
        shape=heads,
        scale=c.scale,
        rope=which,
        q_norm=load_head_norm(operators, weights, f"{prefix}q_norm", rope, shape.norm_eps, _NORM_OFFSET),
        k_norm=load_head_norm(operators, weights, f"{prefix}k_norm", rope, shape.norm_eps, _NORM_OFFSET),
    )
