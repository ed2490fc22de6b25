"""Llama and the families that differ from it only in data: Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvferry.core import CheckpointError, DType, GroupKind, KVLayout, ModelLimits
from kvferry.models.base import CausalLM, Config, ForwardBatch, Weights
from kvferry.models.checked import count
from kvferry.models.layers import DecoderLayer, GatedMLP, PackedRow, RMSNorm, SelfAttention, load_packed
from kvferry.models.operators import Operators
from kvferry.models.rope import Rope, rope_from_config
from kvferry.models.sharding import embed, load_embedding, load_head, shard_of


@dataclass(frozen=True, slots=True)
class Traits:
    """What an architecture fixes beside its config: biases (None: as the config says) and norms of q and k."""

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False


TRAITS: Mapping[str, Traits] = {
    "LlamaForCausalLM": Traits(mlp_bias=None),
    "MistralForCausalLM": Traits(qkv_bias=False, out_bias=False),
    "Qwen2ForCausalLM": Traits(qkv_bias=True, out_bias=False),
    "Qwen3ForCausalLM": Traits(qk_norm=True),
}


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """config.json, checked. windows: per layer, how far it looks back (None: all the way)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context_tokens: int
    norm_eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]

    @classmethod
    def from_json(cls, config: Config) -> LlamaConfig:
        """Raises CheckpointError naming the key that is missing, bad or not supported."""
        names = config.get("architectures") or ["LlamaForCausalLM"]
        traits = TRAITS.get(names[0])
        if traits is None:
            known = ", ".join(TRAITS)
            raise CheckpointError(
                f"config.json: {names[0]} is no Llama shape; those are {known}", field="architectures"
            )
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise CheckpointError(f"config.json: hidden_act is {activation!r}; known: silu", field="hidden_act")
        heads, hidden = count(config, "num_attention_heads"), count(config, "hidden_size")
        kv_heads = count(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads ({heads}) is no multiple of num_key_value_heads ({kv_heads})",
                field="num_key_value_heads",
            )
        head_dim, layers = count(config, "head_dim", hidden // heads), count(config, "num_hidden_layers")
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            vocab_size=count(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=count(config, "intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_context_tokens=count(config, "max_position_embeddings"),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=rope_from_config(config, head_dim),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias if traits.qkv_bias is None else traits.qkv_bias,
            out_bias=attention_bias if traits.out_bias is None else traits.out_bias,
            mlp_bias=bool(config.get("mlp_bias", False)) if traits.mlp_bias is None else traits.mlp_bias,
            qk_norm=traits.qk_norm,
            windows=windows_of(config, layers),
        )


class Llama(CausalLM):
    """Weights packed by `linear`; everything else as the checkpoint has it."""

    def __init__(self, config: Config, weights: Weights, operators: Operators) -> None:
        self.config = LlamaConfig.from_json(config)
        c = self.config
        size = (c.vocab_size, c.hidden_size)
        self._shard = shard_of(weights)
        self._embedding = load_embedding(weights, "model.embed_tokens.weight", size)
        self._held = self._shard.layers(c.layers)
        self._stack = operators.stack([_load_layer(c, index, weights, operators) for index in self._held])
        self._norm = RMSNorm(operators.rms_norm, weights.get("model.norm.weight", (c.hidden_size,)), c.norm_eps)
        head, at_hand = ("model.embed_tokens.weight", self._embedding) if c.tied else ("lm_head.weight", None)
        self._head = load_head(weights, head, size, at_hand, operators.linear)
        self._turns = c.rope.table(c.max_context_tokens, self._norm.weight.device)

    @property
    def limits(self) -> ModelLimits:
        return ModelLimits(self.config.vocab_size, self.config.max_context_tokens)

    def layouts(self, tokens_per_block: int, kv_dtype: DType) -> tuple[KVLayout, ...]:
        """One group per distinct window, in the order of first appearance."""
        c, held = self.config, self._held
        return tuple(
            KVLayout(
                kind=GroupKind.FULL if window is None else GroupKind.WINDOW,
                layers=tuple(layer for layer in held if c.windows[layer] == window),
                kv_heads=c.kv_heads,
                head_dim=c.head_dim,
                dtype=kv_dtype,
                tokens_per_block=tokens_per_block,
                window=window,
            )
            for window in dict.fromkeys(c.windows[layer] for layer in held)
        )

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        with torch.inference_mode():
            x = embed(batch, self._embedding)
            turn = self._turns.index_select(0, batch.positions).unsqueeze(1)
            x = self._stack(x, turn, batch.attention)
            if self._head is None:
                return x
            rows = x.index_select(0, batch.logit_rows)
            return self._head(self._norm(rows)).float()


def _load_layer(c: LlamaConfig, index: int, weights: Weights, operators: Operators) -> DecoderLayer:
    prefix = f"model.layers.{index}."

    def norm(name: str) -> RMSNorm:
        return RMSNorm(operators.rms_norm, weights.get(f"{prefix}{name}.weight", (c.hidden_size,)), c.norm_eps)

    up = [PackedRow(f"{prefix}mlp.{name}_proj", c.intermediate_size, c.mlp_bias) for name in ("gate", "up")]
    down = [PackedRow(f"{prefix}mlp.down_proj", c.hidden_size, c.mlp_bias)]
    mlp = GatedMLP(
        load_packed(weights, up, c.hidden_size, operators.linear),
        operators.silu_product,
        load_packed(weights, down, c.intermediate_size, operators.linear),
    )
    attention = _load_attention(c, index, weights, operators)
    return DecoderLayer(norm("input_layernorm"), attention, norm("post_attention_layernorm"), mlp)


def _load_attention(c: LlamaConfig, index: int, weights: Weights, operators: Operators) -> SelfAttention:
    prefix = f"model.layers.{index}.self_attn."
    q_rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim
    parts = [
        PackedRow(f"{prefix}q_proj", q_rows, c.qkv_bias, c.rope),
        PackedRow(f"{prefix}k_proj", kv_rows, c.qkv_bias, c.rope),
        PackedRow(f"{prefix}v_proj", kv_rows, c.qkv_bias),
    ]

    def head_norm(name: str) -> RMSNorm:
        weight = c.rope.interleave(weights.get(f"{prefix}{name}.weight", (c.head_dim,)))
        return RMSNorm(operators.rms_norm, weight, c.norm_eps)

    return SelfAttention(
        layer=index,
        qkv=load_packed(weights, parts, c.hidden_size, operators.linear),
        out=load_packed(weights, [PackedRow(f"{prefix}o_proj", c.hidden_size, c.out_bias)], q_rows, operators.linear),
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        q_norm=head_norm("q_norm") if c.qk_norm else None,
        k_norm=head_norm("k_norm") if c.qk_norm else None,
    )


def windows_of(config: Config, layers: int) -> tuple[int | None, ...]:
    """Mistral's window holds for every layer; Qwen's needs use_sliding_window and spares the first layers."""
    window = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", True):
        return (None,) * layers
    size = count(config, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is not None:
        if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
            raise CheckpointError(f"config.json: bad layer_types for {layers} layers: {kinds!r}", field="layer_types")
        return tuple(size if kind == "sliding_attention" else None for kind in kinds)
    spared = count(config, "max_window_layers") if "max_window_layers" in config else 0
    return tuple(None if layer < spared else size for layer in range(layers))
