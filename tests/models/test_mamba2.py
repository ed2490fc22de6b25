"""The recurrence as matrix products over stretches of tokens is the recurrence token by token."""

from __future__ import annotations

import pytest
import torch

from kvferry.core import GroupKind
from kvferry.models.mamba2 import SCAN_TOKENS, GroupedNorm, MambaShape, recur

SEQUENCES, HEADS, HEAD_DIM, GROUPS, STATE_DIM = 2, 6, 5, 2, 4


class Inputs:
    """Random ones of a few sequences. decay: as logarithms, from slow to so fast that a token forgets all before."""

    def __init__(self, length: int, fastest: float = 0.2) -> None:
        generator = torch.Generator().manual_seed(length)
        self.x = torch.randn(SEQUENCES, length, HEADS, HEAD_DIM, generator=generator)
        self.decay = -fastest * torch.rand(SEQUENCES, length, HEADS, generator=generator)
        self.b = torch.randn(SEQUENCES, length, GROUPS, STATE_DIM, generator=generator)
        self.c = torch.randn(SEQUENCES, length, GROUPS, STATE_DIM, generator=generator)
        self.state = torch.randn(SEQUENCES, HEADS, STATE_DIM, HEAD_DIM, generator=generator)

    def run(self, start: int, stop: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        part = slice(start, stop)
        return recur(self.x[:, part], self.decay[:, part], self.b[:, part], self.c[:, part], state)

    def token_by_token(self) -> tuple[torch.Tensor, torch.Tensor]:
        """In float64, head by head."""
        state, outputs = self.state.double(), torch.zeros(self.x.shape, dtype=torch.float64)
        for token in range(self.x.shape[1]):
            for head in range(HEADS):
                group = head * GROUPS // HEADS
                for n in range(SEQUENCES):
                    kept = state[n, head] * float(self.decay[n, token, head].double().exp())
                    state[n, head] = kept + torch.outer(self.b[n, token, group], self.x[n, token, head]).double()
                    outputs[n, token, head] = self.c[n, token, group].double() @ state[n, head]
        return outputs, state


@pytest.mark.parametrize("length", [1, 2, SCAN_TOKENS - 1, SCAN_TOKENS, SCAN_TOKENS + 1, 2 * SCAN_TOKENS + 5])
@pytest.mark.parametrize("fastest", [0.02, 200.0])
def test_stretches_equal_token_by_token(length: int, fastest: float) -> None:
    inputs = Inputs(length, fastest)
    y, state = inputs.run(0, length, inputs.state)
    expected, left = inputs.token_by_token()
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(state.double(), left, rtol=0, atol=1e-4)


@pytest.mark.parametrize("cut", [1, 17, SCAN_TOKENS, 99])
def test_what_one_part_leaves_behind_the_next_goes_on_from(cut: int) -> None:
    inputs = Inputs(100)
    whole, end = inputs.run(0, 100, inputs.state)
    first, between = inputs.run(0, cut, inputs.state)
    second, left = inputs.run(cut, 100, between)
    torch.testing.assert_close(torch.cat((first, second), dim=1), whole, rtol=0, atol=1e-4)
    torch.testing.assert_close(left, end, rtol=0, atol=1e-4)


def test_the_states_of_a_layer_are_those_of_its_shape() -> None:
    shape = MambaShape(heads=6, head_dim=5, groups=2, state_dim=4, kernel=3, least_step=0.001)
    conv, ssm = shape.caches
    assert (shape.inner, shape.channels) == (30, 30 + 2 * 2 * 4)
    assert (conv.kind, conv.kv_heads, conv.head_dim, conv.planes) == (GroupKind.CONV, 1, 2 * 46, 1)
    assert (ssm.kind, ssm.kv_heads, ssm.head_dim, ssm.planes) == (GroupKind.SSM, 6, 4 * 5, 1)


def test_each_group_is_normalised_on_its_own() -> None:
    norm = GroupedNorm(torch.tensor([1.0, 1.0, 2.0, 2.0]), groups=2, eps=0.0)
    y = torch.tensor([[3.0, 4.0, 300.0, 400.0]])
    gate = torch.full((1, 4), 50.0)  # silu(50) is 50: the norm takes it out again
    expected = torch.tensor([[3.0, 4.0, 6.0, 8.0]]) / (12.5**0.5)
    torch.testing.assert_close(norm(y, gate), expected)
