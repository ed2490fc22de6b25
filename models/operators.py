"""The operators a model computes with, supplied by the engine per device; here in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import linear, silu

from kvferry.models.base import Attention, Layer, Linear, LinearFactory, StackFactory


class RMSNormOperator(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last axis, computed in float32. A new tensor of x's shape and type."""
        ...


class SiluProduct(Protocol):
    def __call__(self, both: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, where a row of `both` [rows, 2 * width] is gate beside up. Returns [rows, width]."""
        ...


@dataclass(frozen=True, slots=True)
class Operators:
    """linear: packs weights for the device, rounded where the precision is a low one. exact_linear: never rounded, for
    routers, which choose by small differences and are small themselves. stack: of layers whose parts these are."""

    linear: LinearFactory
    exact_linear: LinearFactory
    rms_norm: RMSNormOperator
    silu_product: SiluProduct
    stack: StackFactory


@dataclass(frozen=True, slots=True)
class PlainStack:
    """One layer after the other."""

    layers: Sequence[Layer]

    def __call__(self, x: torch.Tensor, turn: torch.Tensor, attention: Attention) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, turn, attention)
        return x


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """The weight as it is."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        y = linear(x, self.weight, self.bias)
        return y if add_to is None else add_to.add_(y)


def plain_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    return PlainLinear(weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse).to(x.dtype) * weight


def silu_product(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def torch_operators(linear: LinearFactory = plain_linear, exact_linear: LinearFactory | None = None) -> Operators:
    """What any device can run. exact_linear: None is the same as `linear`."""
    return Operators(linear, exact_linear or linear, rms_norm, silu_product, PlainStack)
