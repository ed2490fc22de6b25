"""Grouped-query attention with what the families vary: rotation or none, norms of q and k, sinks, scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.models.base import Linear, LinearFactory, Weights
from kvferry.models.layers import PackedRow, RMSNorm, load_packed
from kvferry.models.operators import Operators
from kvferry.models.rope import Rope, rotate
from kvferry.models.stack import Step


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of one layer."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """rope: index into `Step.turns` (None: no positions). q_norm, k_norm: per head, before the rotation.
    sinks: [heads], a logit of each head that takes its share of the softmax and adds nothing."""

    layer: int
    qkv: Linear
    out: Linear
    shape: HeadShape
    scale: float
    rope: int | None = 0
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    sinks: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        q, k, v = self.project(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            both = rotate(torch.cat((q, k), dim=1), step.turns[self.rope])
            q, k = both[:, : self.shape.heads], both[:, self.shape.heads :]
        mixed = step.attention(self.layer, q, k, v, self.scale, sinks=self.sinks)
        return self.out(mixed.reshape(len(x), -1))

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v as [tokens, heads, head_dim]."""
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        qkv = self.qkv(x).view(len(x), heads + 2 * kv_heads, self.shape.head_dim)
        return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]


def load_qkv(
    weights: Weights, prefix: str, shape: HeadShape, hidden: int, bias: bool, rope: Rope | None, linear: LinearFactory
) -> Linear:
    """rope: whose halves the rows of q and k are reordered for; None where pairs stand side by side already."""
    q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    parts = [
        PackedRow(f"{prefix}q_proj", q_rows, bias, rope),
        PackedRow(f"{prefix}k_proj", kv_rows, bias, rope),
        PackedRow(f"{prefix}v_proj", kv_rows, bias),
    ]
    return load_packed(weights, parts, hidden, linear)


def load_out(weights: Weights, prefix: str, shape: HeadShape, hidden: int, bias: bool, linear: LinearFactory) -> Linear:
    return load_packed(weights, [PackedRow(f"{prefix}o_proj", hidden, bias)], shape.heads * shape.head_dim, linear)


def load_head_norm(
    operators: Operators, weights: Weights, name: str, rope: Rope, eps: float, offset: float = 0.0
) -> RMSNorm:
    """A norm of one head, its weight reordered as the rows of q and k are."""
    return RMSNorm(operators.rms_norm, rope.interleave(weights.get(f"{name}.weight", (rope.head_dim,))) + offset, eps)
