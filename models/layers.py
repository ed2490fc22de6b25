"""Layers that families share. They hold weights and compute; none of them knows about block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.models.base import Attention, Linear, LinearFactory, Weights
from kvferry.models.operators import RMSNormOperator, SiluProduct
from kvferry.models.rope import Rope
from kvferry.models.sharding import completed


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / rms(x) * weight over the last axis, computed in float32."""

    operator: RMSNormOperator
    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.operator(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One projection of several that share an input: `name`.weight is [rows, columns], `name`.bias [rows]."""

    name: str
    rows: int
    bias: bool = False
    rope: Rope | None = None


def load_packed(weights: Weights, parts: Sequence[PackedRow], columns: int, linear: LinearFactory) -> Linear:
    """One linear that computes every part at once, outputs side by side in the order given."""
    matrices, biases = [], []
    for part in parts:
        weight = weights.get(f"{part.name}.weight", (part.rows, columns))
        matrices.append(part.rope.interleave(weight) if part.rope else weight)
        if part.bias:
            bias = weights.get(f"{part.name}.bias", (part.rows,))
            biases.append(part.rope.interleave(bias) if part.rope else bias)
        else:
            biases.append(weight.new_zeros(part.rows))
    packed_bias = torch.cat(biases) if any(part.bias for part in parts) else None
    packed = linear(torch.cat(matrices) if len(matrices) > 1 else matrices[0], packed_bias)
    return completed(weights, parts[0].name, packed)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """residual += down(silu(gate(x)) * up(x))."""

    gate_up: Linear
    silu_product: SiluProduct
    down: Linear

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.down(self.silu_product(self.gate_up(x)), add_to=residual)


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """residual += grouped-query attention over the paged cache. q_norm, k_norm: per-head norms before the rotation."""

    layer: int
    qkv: Linear
    out: Linear
    heads: int
    kv_heads: int
    head_dim: int
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

    def __call__(
        self, x: torch.Tensor, turn: torch.Tensor, attention: Attention, residual: torch.Tensor
    ) -> torch.Tensor:
        qkv = self.qkv(x).view(x.shape[0], self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = torch.split(qkv, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = attention(self.layer, q, k, v, self.head_dim**-0.5, turn)
        return self.out(mixed.reshape(x.shape[0], self.heads * self.head_dim), add_to=residual)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A norm and self-attention, a norm and a gated MLP: Llama's layer."""

    attention_norm: RMSNorm
    attention: SelfAttention
    mlp_norm: RMSNorm
    mlp: GatedMLP

    def __call__(self, x: torch.Tensor, turn: torch.Tensor, attention: Attention) -> torch.Tensor:
        x = self.attention(self.attention_norm(x), turn, attention, x)
        return self.mlp(self.mlp_norm(x), x)
