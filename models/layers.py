"""Layers that families share. They hold weights and compute; none of them knows about block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from kvferry.models.base import Attention, Linear, LinearFactory, Weights
from kvferry.models.rope import Rope, rotate


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / rms(x) * weight over the last axis, computed in float32."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * inverse).to(x.dtype) * self.weight


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
    return linear(torch.cat(matrices) if len(matrices) > 1 else matrices[0], packed_bias)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(silu(gate(x)) * up(x))."""

    gate_up: Linear
    down: Linear
    width: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up(x)
        gate = silu(both[:, : self.width])
        return self.down(gate.mul_(both[:, self.width :]))


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Grouped-query attention over the paged cache. q_norm, k_norm: per-head norms before the rotation."""

    layer: int
    qkv: Linear
    out: Linear
    heads: int
    kv_heads: int
    head_dim: int
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

    def __call__(self, x: torch.Tensor, turn: torch.Tensor, attention: Attention) -> torch.Tensor:
        qkv = self.qkv(x).view(x.shape[0], self.heads + 2 * self.kv_heads, self.head_dim)
        rotated = self._rotated(qkv[:, : self.heads + self.kv_heads], turn)
        q, k = rotated[:, : self.heads], rotated[:, self.heads :]
        v = qkv[:, self.heads + self.kv_heads :]
        mixed = attention(self.layer, q, k, v, self.head_dim**-0.5)
        return self.out(mixed.reshape(x.shape[0], self.heads * self.head_dim))

    def _rotated(self, qk: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        if self.q_norm is None or self.k_norm is None:
            return rotate(qk, turn)
        q, k = self.q_norm(qk[:, : self.heads]), self.k_norm(qk[:, self.heads :])
        return rotate(torch.cat((q, k), dim=1), turn)
