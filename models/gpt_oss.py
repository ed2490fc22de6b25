"""GPT-OSS: attention sinks, sliding and full layers in turn, every layer a mixture of experts, weights in MXFP4."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.models.attention import GroupedAttention, HeadShape, load_out, load_qkv
from kvferry.models.base import Config, Linear, Weights
from kvferry.models.checked import FULL, SLIDING, Shape, count, layer_kinds, number
from kvferry.models.feedforward import Experts, MixtureOfExperts, Routing, TransposedExperts
from kvferry.models.layers import PackedRow, load_packed
from kvferry.models.mxfp4 import load_mxfp4
from kvferry.models.operators import Operators
from kvferry.models.rope import Rope, rope_from_config
from kvferry.models.stack import LayerCache, ResidualLayer, ResidualStack, load_norm

_EPS = 1e-5
_USUAL_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_USUAL_THETA = 150_000.0


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """(up + 1) * gate * sigmoid(alpha * gate), both sides held within `limit`."""

    alpha: float
    limit: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


@dataclass(frozen=True, slots=True)
class GptOssConfig:
    """config.json, checked. windows: per layer, how far it looks back (None: all the way)."""

    shape: Shape
    windows: tuple[int | None, ...]
    rope: Rope
    width: int
    experts: int
    chosen: int
    gate: ClampedGate
    bias: bool

    @classmethod
    def from_json(cls, config: Config) -> GptOssConfig:
        """Raises CheckpointError naming the key that is missing or bad."""
        shape = Shape.from_json(config, {"head_dim": 64}, eps=_EPS)
        kinds = layer_kinds(config, shape.layers, (SLIDING, FULL), lambda layer: FULL if layer % 2 else SLIDING)
        window = count(config, "sliding_window", 128)
        experts = count(config, "num_local_experts", 128)
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or _USUAL_YARN
        rope = {**config, "rope_parameters": {"rope_theta": config.get("rope_theta") or _USUAL_THETA, **scaling}}
        return cls(
            shape=shape,
            windows=tuple(window if kind == SLIDING else None for kind in kinds),
            rope=rope_from_config(rope, shape.head_dim),
            width=count(config, "intermediate_size"),
            experts=experts,
            chosen=min(experts, count(config, "num_experts_per_tok", 4)),
            gate=ClampedGate(number(config, "swiglu_alpha", 1.702), number(config, "swiglu_limit", 7.0)),
            bias=bool(config.get("attention_bias", True)),
        )


class GptOss(ResidualStack):
    """Experts are dequantised as they are loaded."""

    def __init__(self, config: Config, weights: Weights, operators: Operators) -> None:
        c = GptOssConfig.from_json(config)
        caches = [LayerCache.attending(c.shape.kv_heads, c.shape.head_dim, window) for window in c.windows]
        super().__init__(c.shape, caches, [c.rope], weights, operators)
        self._layers = [
            _load_layer(c, f"{self.prefix}layers.{i}.", i, weights, operators) for i in range(c.shape.layers)
        ]


@dataclass(frozen=True, slots=True)
class _Router:
    """Shares are a softmax over the chosen experts alone."""

    logits: Linear
    chosen: int

    def __call__(self, x: torch.Tensor) -> Routing:
        best = self.logits(x).topk(self.chosen, dim=-1)
        return Routing(best.indices, best.values.softmax(-1))


def _load_layer(c: GptOssConfig, prefix: str, index: int, weights: Weights, operators: Operators) -> ResidualLayer:
    shape, attention = c.shape, f"{prefix}self_attn."
    heads = HeadShape(shape.heads, shape.kv_heads, shape.head_dim)
    grouped = GroupedAttention(
        layer=index,
        qkv=load_qkv(weights, attention, heads, shape.hidden_size, c.bias, c.rope, operators.linear),
        out=load_out(weights, attention, heads, shape.hidden_size, c.bias, operators.linear),
        shape=heads,
        scale=shape.head_dim**-0.5,
        sinks=weights.get(f"{attention}sinks", (shape.heads,)),
    )
    norms = [
        load_norm(operators, weights, f"{prefix}{name}_layernorm", shape.hidden_size, shape.norm_eps)
        for name in ("input", "post_attention")
    ]
    router = load_packed(
        weights, [PackedRow(f"{prefix}mlp.router", c.experts, True)], shape.hidden_size, operators.exact_linear
    )
    stored = _stored_experts(c, f"{prefix}mlp.experts.", weights)
    experts = MixtureOfExperts(_Router(router, c.chosen), Experts(stored.pack(c.gate, operators.linear)))
    return ResidualLayer(norms[0], grouped, norms[1], experts)


def _stored_experts(c: GptOssConfig, prefix: str, weights: Weights) -> TransposedExperts:
    hidden, width = c.shape.hidden_size, c.width

    def stored(name: str, rows: int, columns: int) -> torch.Tensor:
        if f"{prefix}{name}_blocks" in weights:
            return load_mxfp4(weights, f"{prefix}{name}", c.experts, columns, rows).transpose(1, 2)
        return weights.get(f"{prefix}{name}", (c.experts, rows, columns))

    return TransposedExperts(
        gate_up=stored("gate_up_proj", hidden, 2 * width),
        down=stored("down_proj", width, hidden),
        gate_up_bias=weights.get(f"{prefix}gate_up_proj_bias", (c.experts, 2 * width)),
        down_bias=weights.get(f"{prefix}down_proj_bias", (c.experts, hidden)),
        interleaved=True,
    )
