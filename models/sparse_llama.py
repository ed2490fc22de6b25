"""Llama shapes whose feed-forward is a mixture of experts: Mixtral and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import softmax

from kvferry.core import CheckpointError
from kvferry.models.attention import GroupedAttention, HeadShape, load_head_norm, load_out, load_qkv
from kvferry.models.base import Config, Linear, Weights
from kvferry.models.checked import Shape, count
from kvferry.models.feedforward import (
    Experts,
    FeedForward,
    Gate,
    MixtureOfExperts,
    Routing,
    gate_named,
    load_feed_forward,
)
from kvferry.models.layers import PackedRow, RMSNorm, load_packed
from kvferry.models.llama import windows_of
from kvferry.models.operators import Operators
from kvferry.models.rope import Rope, rope_from_config
from kvferry.models.stack import LayerCache, ResidualLayer, ResidualStack, load_norm


@dataclass(frozen=True, slots=True)
class Traits:
    """What an architecture fixes beside its config. block: where a layer's experts stand; names: gate, up and down of
    one; width_key: of their width; always_normalised: whether the chosen shares sum to 1 whatever the config says."""

    block: str
    names: tuple[str, str, str]
    width_key: str
    always_normalised: bool
    qk_norm: bool


TRAITS: Mapping[str, Traits] = {
    "MixtralForCausalLM": Traits("block_sparse_moe.", ("w1", "w3", "w2"), "intermediate_size", True, False),
    "Qwen3MoeForCausalLM": Traits("mlp.", ("gate_proj", "up_proj", "down_proj"), "moe_intermediate_size", False, True),
}


@dataclass(frozen=True, slots=True)
class SparseLlamaConfig:
    """config.json, checked. sparse: which layers have experts; windows: per layer, how far it looks back."""

    shape: Shape
    traits: Traits
    rope: Rope
    windows: tuple[int | None, ...]
    sparse: frozenset[int]
    experts: int
    chosen: int
    normalised: bool
    expert_width: int
    dense_width: int
    gate: Gate
    bias: bool

    @classmethod
    def from_json(cls, config: Config) -> SparseLlamaConfig:
        """Raises CheckpointError naming the key that is missing or bad."""
        name = (config.get("architectures") or [""])[0]
        if name not in TRAITS:
            raise CheckpointError(
                f"config.json: {name} is no Llama shape with experts; those are {', '.join(TRAITS)}",
                field="architectures",
            )
        traits, shape = TRAITS[name], Shape.from_json(config)
        key = "num_local_experts" if "num_local_experts" in config else "num_experts"
        experts, every = count(config, key), count(config, "decoder_sparse_step", 1)
        dense = frozenset(config.get("mlp_only_layers") or ())
        # max_window_layers spares layers of the dense models only.
        windowed = {key: value for key, value in config.items() if key != "max_window_layers"}
        return cls(
            shape=shape,
            traits=traits,
            rope=rope_from_config(config, shape.head_dim),
            windows=windows_of(windowed, shape.layers),
            sparse=frozenset(n for n in range(shape.layers) if (n + 1) % every == 0 and n not in dense),
            experts=experts,
            chosen=min(experts, count(config, "num_experts_per_tok", 2)),
            normalised=traits.always_normalised or bool(config.get("norm_topk_prob", False)),
            expert_width=count(config, traits.width_key),
            dense_width=count(config, "intermediate_size"),
            gate=gate_named(config, "hidden_act", "silu"),
            bias=bool(config.get("attention_bias", False)),
        )


class SparseLlama(ResidualStack):
    def __init__(self, config: Config, weights: Weights, operators: Operators) -> None:
        c = SparseLlamaConfig.from_json(config)
        caches = [LayerCache.attending(c.shape.kv_heads, c.shape.head_dim, window) for window in c.windows]
        super().__init__(c.shape, caches, [c.rope], weights, operators)
        self._layers = [_load_layer(c, f"{self.prefix}layers.{i}.", i, weights, operators) for i in self.held]


@dataclass(frozen=True, slots=True)
class _Router:
    """Shares are a softmax over all experts, of which the chosen ones keep theirs, or all of it among them."""

    logits: Linear
    chosen: int
    normalised: bool

    def __call__(self, x: torch.Tensor) -> Routing:
        best = softmax(self.logits(x).float(), dim=-1).topk(self.chosen, dim=-1)
        shares = best.values / best.values.sum(-1, keepdim=True) if self.normalised else best.values
        return Routing(best.indices, shares)


def _load_layer(c: SparseLlamaConfig, prefix: str, index: int, weights: Weights, operators: Operators) -> ResidualLayer:
    hidden = c.shape.hidden_size
    first, second = (
        load_norm(operators, weights, f"{prefix}{name}_layernorm", hidden, c.shape.norm_eps)
        for name in ("input", "post_attention")
    )
    feed_forward: FeedForward | MixtureOfExperts
    if index in c.sparse:
        feed_forward = _load_experts(c, f"{prefix}{c.traits.block}", weights, operators)
    else:
        feed_forward = load_feed_forward(weights, f"{prefix}mlp.", hidden, c.dense_width, c.gate, operators.linear)
    return ResidualLayer(
        first, _load_attention(c, f"{prefix}self_attn.", index, weights, operators), second, feed_forward
    )


def _load_attention(
    c: SparseLlamaConfig, prefix: str, index: int, weights: Weights, operators: Operators
) -> GroupedAttention:
    heads, hidden = HeadShape(c.shape.heads, c.shape.kv_heads, c.shape.head_dim), c.shape.hidden_size

    def norm(name: str) -> RMSNorm | None:
        return (
            load_head_norm(operators, weights, f"{prefix}{name}", c.rope, c.shape.norm_eps)
            if c.traits.qk_norm
            else None
        )

    return GroupedAttention(
        layer=index,
        qkv=load_qkv(weights, prefix, heads, hidden, c.bias, c.rope, operators.linear),
        out=load_out(weights, prefix, heads, hidden, c.bias, operators.linear),
        shape=heads,
        scale=heads.head_dim**-0.5,
        q_norm=norm("q_norm"),
        k_norm=norm("k_norm"),
    )


def _load_experts(c: SparseLlamaConfig, prefix: str, weights: Weights, operators: Operators) -> MixtureOfExperts:
    hidden = c.shape.hidden_size
    router = _Router(
        load_packed(weights, [PackedRow(f"{prefix}gate", c.experts)], hidden, operators.exact_linear),
        c.chosen,
        c.normalised,
    )
    experts = [
        load_feed_forward(
            weights, f"{prefix}experts.{expert}.", hidden, c.expert_width, c.gate, operators.linear, c.traits.names
        )
        for expert in range(c.experts)
    ]
    return MixtureOfExperts(router, Experts(experts))
