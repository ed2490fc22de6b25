"""What Gemma4's config.json says, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.core import CheckpointError
from kvferry.models.attention import HeadShape
from kvferry.models.base import Config
from kvferry.models.checked import FULL, SLIDING, Shape, cap, count, layer_kinds, text_config
from kvferry.models.feedforward import Gate, gate_named
from kvferry.models.gemma3 import KINDS, kind_rope
from kvferry.models.rope import Rope, rope_from_config
from kvferry.models.stack import LayerCache

_USUAL = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
_THETAS = {SLIDING: ("rope_local_base_freq", 10_000.0), FULL: ("rope_theta", 1_000_000.0)}
_USUAL_FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
_PATTERN = 6


@dataclass(frozen=True, slots=True)
class ExpertShape:
    experts: int
    chosen: int
    width: int


@dataclass(frozen=True, slots=True)
class Gemma4Config:
    """config.json, checked. heads: of each layer; own_kv: how many layers, from the first, have KV of their own."""

    shape: Shape
    kinds: tuple[str, ...]
    heads: tuple[HeadShape, ...]
    ropes: tuple[Rope, ...]
    window: int
    own_kv: int
    keys_are_values: bool
    width: int
    shared_width: int
    gate: Gate
    experts: ExpertShape | None
    per_layer_size: int
    per_layer_vocab: int
    bias: bool
    logit_cap: float | None

    @classmethod
    def from_json(cls, config: Config) -> Gemma4Config:
        """`config` may be a wrapper's. Raises CheckpointError naming the key that is missing, bad or not supported."""
        config = text_config(config)
        if config.get("use_bidirectional_attention") == "all":
            raise CheckpointError(
                "config.json: use_bidirectional_attention is 'all': only causal models generate text",
                field="use_bidirectional_attention",
            )
        shape = Shape.from_json(config, _USUAL, tied=True)
        kinds = layer_kinds(config, shape.layers, KINDS, lambda layer: _usual_kind(layer, shape.layers))
        heads = tuple(_heads(config, shape, layer, kind) for layer, kind in enumerate(kinds))
        width = count(config, "intermediate_size", 9216)
        return cls(
            shape=shape,
            kinds=kinds,
            heads=heads,
            ropes=tuple(_rope(config, kind, kinds, heads, shape) for kind in KINDS),
            window=count(config, "sliding_window", 512),
            own_kv=_own_kv(config, kinds),
            keys_are_values=bool(config.get("attention_k_eq_v", False)),
            width=width,
            shared_width=width * (2 if config.get("use_double_wide_mlp") else 1),
            gate=gate_named(config, "hidden_activation", "gelu_pytorch_tanh"),
            experts=_experts(config),
            per_layer_size=count(config, "hidden_size_per_layer_input", 256, least=0),
            per_layer_vocab=count(config, "vocab_size_per_layer_input", 262_144),
            bias=bool(config.get("attention_bias", False)),
            logit_cap=cap(config, "final_logit_softcapping"),
        )

    def cache_of(self, layer: int) -> LayerCache | None:
        if layer >= self.own_kv:
            return None
        heads = self.heads[layer]
        return LayerCache.attending(
            heads.kv_heads, heads.head_dim, self.window if self.kinds[layer] == SLIDING else None
        )


def _usual_kind(layer: int, layers: int) -> str:
    return FULL if (layer + 1) % _PATTERN == 0 or layer == layers - 1 else SLIDING


def _heads(config: Config, shape: Shape, layer: int, kind: str) -> HeadShape:
    """per_layer_config says what differs layer by layer; older configs say it for all full layers at once."""
    own: Config = {}
    listed = config.get("per_layer_config")
    if isinstance(listed, Mapping):
        own = listed.get(str(layer)) or {}
    elif kind == FULL:
        own = {"head_dim": count(config, "global_head_dim", 512)}
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
            own = {**own, "num_key_value_heads": count(config, "num_global_key_value_heads")}
    kv_heads = count(own, "num_key_value_heads", shape.kv_heads)
    if shape.heads % kv_heads:
        raise CheckpointError(
            f"config.json: layer {layer} has {kv_heads} KV heads for {shape.heads} heads", field="num_key_value_heads"
        )
    return HeadShape(shape.heads, kv_heads, count(own, "head_dim", shape.head_dim))


def _rope(config: Config, kind: str, kinds: tuple[str, ...], heads: tuple[HeadShape, ...], shape: Shape) -> Rope:
    sizes = {own.head_dim for own, its in zip(heads, kinds, strict=True) if its == kind} or {shape.head_dim}
    if len(sizes) > 1:
        raise CheckpointError(f"config.json: {kind} layers have heads of sizes {sorted(sizes)}", field="head_dim")
    if config.get("rope_parameters") is None and kind == FULL:
        config = {**config, "rope_parameters": {FULL: _USUAL_FULL_ROPE}}
    return rope_from_config(kind_rope(config, kind, _THETAS), sizes.pop())


def _own_kv(config: Config, kinds: tuple[str, ...]) -> int:
    own = len(kinds) - count(config, "num_kv_shared_layers", 0, least=0)
    if own < 1 or not set(kinds[own:]) <= set(kinds[:own]):
        raise CheckpointError(
            f"config.json: num_kv_shared_layers leaves {max(own, 0)} of {len(kinds)} layers with KV of their own: "
            "each kind of layer needs one",
            field="num_kv_shared_layers",
        )
    return own


def _experts(config: Config) -> ExpertShape | None:
    if not config.get("enable_moe_block"):
        return None
    experts = count(config, "num_experts")
    return ExpertShape(experts, min(experts, count(config, "top_k_experts")), count(config, "moe_intermediate_size"))
