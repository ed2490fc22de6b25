"""Gemma4's text backbone: heads of another size in full layers, last layers that attend to earlier ones' KV, an
embedding of its own for every layer, and experts beside the dense feed-forward where configured."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding, softmax

from kvferry.models.attention import HeadShape, load_head_norm, load_out
from kvferry.models.base import Config, Linear, Weights
from kvferry.models.checked import FULL
from kvferry.models.feedforward import Experts, FeedForward, Gate, Routing, load_feed_forward
from kvferry.models.gemma3 import KINDS
from kvferry.models.gemma4_config import ExpertShape, Gemma4Config
from kvferry.models.layers import PackedRow, RMSNorm, load_packed
from kvferry.models.operators import Operators
from kvferry.models.rope import Rope, rotate
from kvferry.models.stack import LayerStack, Step, load_norm

KeysAndValues = dict[str, tuple[int, torch.Tensor, torch.Tensor]]
"""Per kind of layer: the last one with KV of its own, and this step's k and v of it."""


class Gemma4(LayerStack):
    """Alone, or the text part of a multimodal Gemma4."""

    def __init__(self, config: Config, weights: Weights, operators: Operators) -> None:
        c = Gemma4Config.from_json(config)
        caches = [c.cache_of(layer) for layer in range(c.shape.layers)]
        scale = c.shape.hidden_size**0.5
        super().__init__(c.shape, caches, c.ropes, weights, operators, embedding_scale=scale, logit_cap=c.logit_cap)
        self._per_layer = PerLayerInputs.load(c, self.prefix, weights, operators) if c.per_layer_size else None
        self._layers = [
            _Layer.load(c, f"{self.prefix}layers.{index}.", index, weights, operators)
            for index in range(c.shape.layers)
        ]

    def _run(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        inputs = self._per_layer(x, step.token_ids) if self._per_layer is not None else None
        shared: KeysAndValues = {}
        for index, layer in enumerate(self._layers):
            x = layer(x, step, shared, None if inputs is None else inputs[:, index])
        return x


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """[tokens, layers, size]: what every layer is told about a token, from its id and from its embedding."""

    table: torch.Tensor
    projection: Linear
    norm: RMSNorm
    layers: int
    size: int

    def __call__(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        shape = (len(x), self.layers, self.size)
        identity = embedding(token_ids, self.table).view(shape) * math.sqrt(self.size)
        context = self.norm((self.projection(x) * math.sqrt(1 / x.shape[1])).view(shape))
        return (context + identity) * math.sqrt(0.5)

    @classmethod
    def load(cls, c: Gemma4Config, prefix: str, weights: Weights, operators: Operators) -> PerLayerInputs:
        layers, size, hidden = c.shape.layers, c.per_layer_size, c.shape.hidden_size
        projection = [PackedRow(f"{prefix}per_layer_model_projection", layers * size)]
        return cls(
            weights.get(f"{prefix}embed_tokens_per_layer.weight", (c.per_layer_vocab, layers * size)),
            load_packed(weights, projection, hidden, operators.linear),
            load_norm(operators, weights, f"{prefix}per_layer_projection_norm", size, c.shape.norm_eps),
            layers,
            size,
        )


@dataclass(frozen=True, slots=True)
class _KeyValue:
    """values None: the keys, before their norm, are the values too."""

    keys: Linear
    values: Linear | None
    key_norm: RMSNorm
    value_norm: RMSNorm


@dataclass(frozen=True, slots=True)
class _Attention:
    """own None: attends to the KV of the last layer of its kind that has some."""

    layer: int
    kind: str
    shape: HeadShape
    query: Linear
    query_norm: RMSNorm
    own: _KeyValue | None
    out: Linear

    def __call__(self, x: torch.Tensor, step: Step, shared: KeysAndValues) -> torch.Tensor:
        turn = step.turns[KINDS.index(self.kind)]
        q = rotate(self.query_norm(self.query(x).view(len(x), -1, self.shape.head_dim)), turn)
        if self.own is not None:
            keys = self.own.keys(x).view(len(x), -1, self.shape.head_dim)
            values = keys if self.own.values is None else self.own.values(x).view(keys.shape)
            k, v = rotate(self.own.key_norm(keys), turn), self.own.value_norm(values)
            shared[self.kind] = (self.layer, k, v)
        # A sharing layer hands the same k and v in again: they are written over themselves.
        layer, k, v = shared[self.kind]
        mixed = step.attention(layer, q, k, v, 1.0)
        return self.out(mixed.reshape(len(x), -1))


@dataclass(frozen=True, slots=True)
class _Mixture:
    """Experts beside the dense feed-forward, each with norms of their own."""

    norm: RMSNorm
    logits: Linear
    expert_scale: torch.Tensor
    chosen: int
    before: RMSNorm
    experts: Experts
    after: RMSNorm
    after_dense: RMSNorm

    def __call__(self, x: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        best = softmax(self.logits(self.norm(x)).float(), dim=-1).topk(self.chosen, dim=-1)
        shares = best.values / best.values.sum(-1, keepdim=True) * self.expert_scale[best.indices]
        mixed = self.experts(self.before(x), Routing(best.indices, shares))
        return self.after_dense(dense) + self.after(mixed)


@dataclass(frozen=True, slots=True)
class _PerLayerGate:
    gate: Linear
    activation: Gate
    out: Linear
    norm: RMSNorm

    def __call__(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.out(self.activation(self.gate(x), inputs)))


@dataclass(frozen=True, slots=True)
class _Layer:
    before_attention: RMSNorm
    attention: _Attention
    after_attention: RMSNorm
    before_mlp: RMSNorm
    mlp: FeedForward
    mixture: _Mixture | None
    after_mlp: RMSNorm
    per_layer: _PerLayerGate | None
    scalar: torch.Tensor

    def __call__(self, x: torch.Tensor, step: Step, shared: KeysAndValues, inputs: torch.Tensor | None) -> torch.Tensor:
        x = x + self.after_attention(self.attention(self.before_attention(x), step, shared))
        dense = self.mlp(self.before_mlp(x))
        x = x + self.after_mlp(dense if self.mixture is None else self.mixture(x, dense))
        if self.per_layer is not None and inputs is not None:
            x = x + self.per_layer(x, inputs)
        return x * self.scalar

    @classmethod
    def load(cls, c: Gemma4Config, prefix: str, index: int, weights: Weights, operators: Operators) -> _Layer:
        hidden = c.shape.hidden_size

        def norm(name: str) -> RMSNorm:
            return load_norm(operators, weights, f"{prefix}{name}_layernorm", hidden, c.shape.norm_eps)

        width = c.width if index < c.own_kv else c.shared_width
        return cls(
            norm("input"),
            _load_attention(c, f"{prefix}self_attn.", index, weights, operators),
            norm("post_attention"),
            norm("pre_feedforward"),
            load_feed_forward(weights, f"{prefix}mlp.", hidden, width, c.gate, operators.linear),
            _load_mixture(c, c.experts, prefix, weights, operators) if c.experts is not None else None,
            norm("post_feedforward"),
            _load_per_layer_gate(c, prefix, weights, operators) if c.per_layer_size else None,
            weights.get(f"{prefix}layer_scalar", (1,)),
        )


def _load_attention(c: Gemma4Config, prefix: str, index: int, weights: Weights, operators: Operators) -> _Attention:
    kind, heads, hidden = c.kinds[index], c.heads[index], c.shape.hidden_size
    rope, kv_rows = c.ropes[KINDS.index(kind)], heads.kv_heads * heads.head_dim
    own = None
    if index < c.own_kv:
        values = None
        if not (c.keys_are_values and kind == FULL):
            values = load_packed(weights, [PackedRow(f"{prefix}v_proj", kv_rows, c.bias)], hidden, operators.linear)
        own = _KeyValue(
            load_packed(weights, [PackedRow(f"{prefix}k_proj", kv_rows, c.bias, rope)], hidden, operators.linear),
            values,
            load_head_norm(operators, weights, f"{prefix}k_norm", rope, c.shape.norm_eps),
            RMSNorm(operators.rms_norm, torch.ones(heads.head_dim), c.shape.norm_eps),
        )
    query = [PackedRow(f"{prefix}q_proj", heads.heads * heads.head_dim, c.bias, rope)]
    return _Attention(
        layer=index,
        kind=kind,
        shape=heads,
        query=load_packed(weights, query, hidden, operators.linear),
        query_norm=load_head_norm(operators, weights, f"{prefix}q_norm", rope, c.shape.norm_eps),
        own=own,
        out=_load_out(c, prefix, heads, rope if c.keys_are_values and kind == FULL else None, weights, operators),
    )


def _load_out(
    c: Gemma4Config, prefix: str, heads: HeadShape, values_as: Rope | None, weights: Weights, operators: Operators
) -> Linear:
    """values_as: values that are keys come in the order of the keys' rows, so the columns are reordered alike."""
    if values_as is None:
        return load_out(weights, prefix, heads, c.shape.hidden_size, c.bias, operators.linear)
    shape = (c.shape.hidden_size, heads.heads * heads.head_dim)
    weight = values_as.interleave(weights.get(f"{prefix}o_proj.weight", shape).t()).t().contiguous()
    return operators.linear(weight, weights.get(f"{prefix}o_proj.bias", shape[:1]) if c.bias else None)


def _load_mixture(c: Gemma4Config, shape: ExpertShape, prefix: str, weights: Weights, operators: Operators) -> _Mixture:
    hidden, eps = c.shape.hidden_size, c.shape.norm_eps

    def norm(name: str) -> RMSNorm:
        return load_norm(operators, weights, f"{prefix}{name}", hidden, eps)

    gate_up = weights.get(f"{prefix}experts.gate_up_proj", (shape.experts, 2 * shape.width, hidden))
    down = weights.get(f"{prefix}experts.down_proj", (shape.experts, hidden, shape.width))
    experts = [
        FeedForward(
            operators.linear(gate_up[expert].clone(), None), operators.linear(down[expert].clone(), None), c.gate
        )
        for expert in range(shape.experts)
    ]
    return _Mixture(
        norm=RMSNorm(operators.rms_norm, weights.get(f"{prefix}router.scale", (hidden,)) * hidden**-0.5, eps),
        logits=load_packed(weights, [PackedRow(f"{prefix}router.proj", shape.experts)], hidden, operators.exact_linear),
        expert_scale=weights.get(f"{prefix}router.per_expert_scale", (shape.experts,)).float(),
        chosen=shape.chosen,
        before=norm("pre_feedforward_layernorm_2"),
        experts=Experts(experts),
        after=norm("post_feedforward_layernorm_2"),
        after_dense=norm("post_feedforward_layernorm_1"),
    )


def _load_per_layer_gate(c: Gemma4Config, prefix: str, weights: Weights, operators: Operators) -> _PerLayerGate:
    hidden, size = c.shape.hidden_size, c.per_layer_size
    return _PerLayerGate(
        load_packed(weights, [PackedRow(f"{prefix}per_layer_input_gate", size)], hidden, operators.linear),
        c.gate,
        load_packed(weights, [PackedRow(f"{prefix}per_layer_projection", hidden)], size, operators.linear),
        load_norm(operators, weights, f"{prefix}post_per_layer_input_norm", hidden, c.shape.norm_eps),
    )
