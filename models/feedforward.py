"""Gated feed-forward layers, dense and as a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import gelu, relu, silu

from kvferry.core import CheckpointError
from kvferry.models.base import Config, Linear, LinearFactory, Weights
from kvferry.models.layers import PackedRow, load_packed

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(gate, up) -> what goes into the down projection."""


def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return silu(gate) * up


def gelu_gate(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return gelu(gate, approximate=approximate) * up


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return relu(x).square()


Activation = Callable[[torch.Tensor], torch.Tensor]

_ACTIVATIONS: dict[str, Activation] = {
    "relu2": squared_relu,
    "relu": relu,
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
}


def activation_named(config: Config, key: str, default: str) -> Activation:
    """An activation without a gate. Raises CheckpointError listing the known ones."""
    name = config.get(key) or default
    if name not in _ACTIVATIONS:
        raise CheckpointError(f"config.json: {key} is {name!r}; known: {', '.join(_ACTIVATIONS)}", field=key)
    return _ACTIVATIONS[name]


_GATES: dict[str, Gate] = {
    "silu": silu_gate,
    "swish": silu_gate,
    "gelu": gelu_gate,
    "gelu_pytorch_tanh": partial(gelu_gate, approximate="tanh"),
}


def gate_named(config: Config, key: str, default: str) -> Gate:
    """The gate of an activation. Raises CheckpointError listing the known ones."""
    name = config.get(key) or default
    if name not in _GATES:
        raise CheckpointError(f"config.json: {key} is {name!r}; known: {', '.join(_GATES)}", field=key)
    return _GATES[name]


@dataclass(frozen=True, slots=True)
class FeedForward:
    """down(gate(...)) of one linear whose outputs are gate and up side by side."""

    gate_up: Linear
    down: Linear
    gate: Gate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.gate(gate, up))


def load_feed_forward(
    weights: Weights,
    prefix: str,
    hidden: int,
    width: int,
    gate: Gate,
    linear: LinearFactory,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> FeedForward:
    up = [PackedRow(f"{prefix}{name}", width) for name in names[:2]]
    down = [PackedRow(f"{prefix}{names[2]}", hidden)]
    return FeedForward(load_packed(weights, up, hidden, linear), load_packed(weights, down, width, linear), gate)


@dataclass(frozen=True, slots=True)
class PlainFeedForward:
    """down(activation(up(x))), without a gate."""

    up: Linear
    down: Linear
    activation: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x)))


def load_plain_feed_forward(
    weights: Weights, prefix: str, hidden: int, width: int, activation: Activation, bias: bool, linear: LinearFactory
) -> PlainFeedForward:
    up = load_packed(weights, [PackedRow(f"{prefix}up_proj", width, bias)], hidden, linear)
    return PlainFeedForward(
        up, load_packed(weights, [PackedRow(f"{prefix}down_proj", hidden, bias)], width, linear), activation
    )


@dataclass(frozen=True, slots=True)
class Routing:
    """experts: int64 [tokens, k], the chosen ones of each token, none twice; shares: [tokens, k], their weights."""

    experts: torch.Tensor
    shares: torch.Tensor


@dataclass(frozen=True, slots=True)
class Experts:
    """The weighted sum of each token's experts. scale_input: the share multiplies what goes into an expert instead."""

    experts: Sequence[FeedForward | PlainFeedForward]
    scale_input: bool = False

    def __call__(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in sorted(set(routing.experts.flatten().tolist())):
            rows, choice = (routing.experts == expert).nonzero(as_tuple=True)
            share = routing.shares[rows, choice].unsqueeze(1).to(x.dtype)
            taken = x.index_select(0, rows)
            result = self.experts[expert](taken * share) if self.scale_input else self.experts[expert](taken) * share
            out.index_add_(0, rows, result)
        return out


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """route(x) decides; shared, where there is one, sees every token."""

    route: Callable[[torch.Tensor], Routing]
    experts: Experts
    shared: FeedForward | PlainFeedForward | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.experts(x, self.route(x))
        return mixed if self.shared is None else mixed + self.shared(x)


@dataclass(frozen=True, slots=True)
class TransposedExperts:
    """All experts of a layer in one tensor each, stored as [experts, in, out]: [gate | up] and down.

    interleaved: gate and up alternate instead of standing one behind the other, and both have biases.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    interleaved: bool = False

    def pack(self, gate: Gate, linear: LinearFactory) -> list[FeedForward]:
        return [self._one(expert, gate, linear) for expert in range(len(self.gate_up))]

    def _one(self, expert: int, gate: Gate, linear: LinearFactory) -> FeedForward:
        rows = self.gate_up[expert].t()
        bias = None if self.gate_up_bias is None else self.gate_up_bias[expert]
        if self.interleaved:
            rows = torch.cat((rows[::2], rows[1::2]))
            bias = None if bias is None else torch.cat((bias[::2], bias[1::2]))
        down_bias = None if self.down_bias is None else self.down_bias[expert].clone()
        down = self.down[expert].t().contiguous()
        return FeedForward(linear(rows.contiguous(), bias), linear(down, down_bias), gate)
