"""The Mamba2 mixer: a causal convolution over the last few tokens, then a linear recurrence with a state per head.

Several tokens go through the recurrence as matrix products over stretches of `SCAN_TOKENS` (state space duality), a
single one by one step of it; what either leaves behind is the same up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import silu, softplus

from kvferry.core import GroupKind
from kvferry.models.base import Linear, LinearFactory, StateRun, States, Weights
from kvferry.models.layers import PackedRow, load_packed
from kvferry.models.stack import LayerCache, Step

SCAN_TOKENS = 64
"""Long enough for matrix products to pay, short enough for their square to stay small."""


@dataclass(frozen=True, slots=True)
class MambaShape:
    """Heads stand in equal groups that share B and C. kernel: tokens the convolution looks at, its own included;
    least_step: lower bound of the time step."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    kernel: int
    least_step: float

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """What is convolved: x, B and C."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """The convolution's last inputs, and the recurrence's state."""
        return (
            LayerCache.state(GroupKind.CONV, 1, (self.kernel - 1) * self.channels),
            LayerCache.state(GroupKind.SSM, self.heads, self.state_dim * self.head_dim),
        )


@dataclass(frozen=True, slots=True)
class GroupedNorm:
    """y * silu(gate), each group of it normalised on its own. weight: [inner]."""

    weight: torch.Tensor
    groups: int
    eps: float

    def __call__(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        grouped = (y.float() * silu(gate.float())).view(len(y), self.groups, -1)
        inverse = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        return (grouped * inverse).view(y.shape).to(gate.dtype) * self.weight


@dataclass(frozen=True, slots=True)
class Mamba2:
    """taps: [kernel, channels], the last one weighs the token itself. decay: [heads], negative, per unit of time.
    skip: [heads], how much of x goes past the recurrence."""

    layer: int
    shape: MambaShape
    into: Linear
    taps: torch.Tensor
    taps_bias: torch.Tensor | None
    step_bias: torch.Tensor
    decay: torch.Tensor
    skip: torch.Tensor
    norm: GroupedNorm
    out: Linear

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        assert step.states is not None, "whoever runs a model keeps the states its layouts declare"
        shape = self.shape
        gate, inputs, time = torch.split(self.into(x), [shape.inner, shape.channels, shape.heads], dim=-1)
        mixed = torch.empty(len(x), shape.inner, device=x.device)
        for run in step.states.runs:
            sequences = len(run.sequences), run.length
            convolved = self._convolve(inputs[run.rows].view(*sequences, -1), step.states, run)
            mixed[run.rows] = self._recur(convolved, time[run.rows].view(*sequences, -1), step.states, run)
        return self.out(self.norm(mixed, gate))

    def _convolve(self, inputs: torch.Tensor, states: States, run: StateRun) -> torch.Tensor:
        """inputs: [sequences, length, channels]. The same shape, activated."""
        shape = self.shape
        before = states.read(self.layer, GroupKind.CONV, run).view(-1, shape.kernel - 1, shape.channels)
        padded = torch.cat((before, inputs.float()), dim=1)
        states.write(self.layer, GroupKind.CONV, run, padded[:, run.length :])
        total = padded[:, : run.length] * self.taps[0]
        for tap in range(1, shape.kernel):
            total.addcmul_(padded[:, tap : tap + run.length], self.taps[tap])
        return silu(total if self.taps_bias is None else total + self.taps_bias)

    def _recur(self, convolved: torch.Tensor, time: torch.Tensor, states: States, run: StateRun) -> torch.Tensor:
        """[sequences * length, inner]."""
        shape, tokens = self.shape, convolved.shape[:2]
        shared = shape.groups * shape.state_dim
        x, b, c = torch.split(convolved, [shape.inner, shared, shared], dim=-1)
        x = x.reshape(*tokens, shape.heads, shape.head_dim)
        b, c = (part.reshape(*tokens, shape.groups, shape.state_dim) for part in (b, c))
        steps = softplus(time.float() + self.step_bias).clamp(min=shape.least_step)
        state = states.read(self.layer, GroupKind.SSM, run).view(-1, shape.heads, shape.state_dim, shape.head_dim)
        y, state = recur(x * steps.unsqueeze(-1), steps * self.decay, b, c, state)
        states.write(self.layer, GroupKind.SSM, run, state)
        return (y + x * self.skip.unsqueeze(-1)).reshape(-1, shape.inner)


def recur(
    x: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence ``state = exp(decay) state + b x``, ``y = c state``, and the state it ends with.

    x: [sequences, length, heads, head_dim], times the time step; decay: [sequences, length, heads], logarithms;
    b, c: [sequences, length, groups, state_dim]; state: [sequences, heads, state_dim, head_dim], before the first one.
    """
    if x.shape[1] == 1:
        y, state = _one_step(x[:, 0], decay[:, 0], b[:, 0], c[:, 0], state)
        return y.unsqueeze(1), state
    outputs = []
    for start in range(0, x.shape[1], SCAN_TOKENS):
        here = slice(start, start + SCAN_TOKENS)
        y, state = _stretch(x[:, here], decay[:, here], b[:, here], c[:, here], state)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


def _one_step(
    x: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    share = x.shape[1] // b.shape[1]
    b, c = b.repeat_interleave(share, dim=1), c.repeat_interleave(share, dim=1)
    state = state * decay.exp().view(*decay.shape, 1, 1) + b.unsqueeze(-1) * x.unsqueeze(-2)
    return (c.unsqueeze(-2) @ state).squeeze(-2), state


def _stretch(
    x: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `recur`. Below, n: sequences, g: groups, r: heads of a group, l and s: tokens that read and that were read."""
    sequences, length, groups = b.shape[:3]
    by_group = (sequences, groups, x.shape[2] // groups)
    x = x.transpose(1, 2).reshape(*by_group, length, -1)  # [n, g, r, s, head_dim]
    decay = decay.transpose(1, 2).reshape(*by_group, length)  # [n, g, r, l]
    b, c = b.transpose(1, 2).unsqueeze(2), c.transpose(1, 2).unsqueeze(2)  # [n, g, 1, l, state_dim]
    state = state.view(*by_group, *state.shape[2:])
    between = _sums_between(decay).exp_()
    y = (c @ b.transpose(-1, -2) * between) @ x
    total = decay.cumsum(dim=-1).exp()
    y += (c @ state) * total.unsqueeze(-1)
    to_end = between[..., -1, :].unsqueeze(-1)
    state = state * total[..., -1:, None] + b.transpose(-1, -2) @ (x * to_end)
    return y.flatten(1, 2).transpose(1, 2), state.flatten(1, 2)


def _sums_between(decay: torch.Tensor) -> torch.Tensor:
    """decay: [..., l]. [..., l, s]: the sum over the tokens behind s up to l, -inf where s comes after l.

    Each sum starts at its own s: as differences of one running sum, short ones would lose their digits to what came
    before them."""
    length = decay.shape[-1]
    pairs = torch.ones(length, length, dtype=torch.bool, device=decay.device)
    sums = decay.unsqueeze(-1).expand(*decay.shape, length).masked_fill(pairs.triu(), 0.0).cumsum_(dim=-2)
    return sums.masked_fill_(pairs.triu(1), float("-inf"))


def load_mamba2(
    weights: Weights,
    prefix: str,
    layer: int,
    shape: MambaShape,
    hidden: int,
    *,
    bias: bool,
    conv_bias: bool,
    eps: float,
    linear: LinearFactory,
) -> Mamba2:
    """bias: of the two projections; conv_bias: of the convolution."""
    per_head = (shape.heads,)
    rows = shape.inner + shape.channels + shape.heads
    taps = weights.get(f"{prefix}conv1d.weight", (shape.channels, 1, shape.kernel))
    return Mamba2(
        layer=layer,
        shape=shape,
        into=load_packed(weights, [PackedRow(f"{prefix}in_proj", rows, bias)], hidden, linear),
        taps=taps.float()[:, 0].t().contiguous(),
        taps_bias=weights.get(f"{prefix}conv1d.bias", (shape.channels,)).float() if conv_bias else None,
        step_bias=weights.get(f"{prefix}dt_bias", per_head).float(),
        decay=-weights.get(f"{prefix}A_log", per_head).float().exp(),
        skip=weights.get(f"{prefix}D", per_head).float(),
        norm=GroupedNorm(weights.get(f"{prefix}norm.weight", (shape.inner,)), shape.groups, eps),
        out=load_packed(weights, [PackedRow(f"{prefix}out_proj", hidden, bias)], shape.inner, linear),
    )
