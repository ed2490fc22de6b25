"""A model under test without an engine: plain linears, attention without pages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_checkpoint

from kvferry.core import DType, GroupKind, KVLayout
from kvferry.models import ForwardBatch, Shard, StateRun, load_model, torch_operators
from kvferry.models.rope import rotate

Logits = Callable[[Path, Sequence[int]], torch.Tensor]
Checkpoint = Callable[..., Path]


def _dense_attention(layouts: Sequence[KVLayout]) -> Callable[..., torch.Tensor]:
    """Causal attention of one whole sequence over itself, by the textbook."""
    layout_of = {layer: layout for layout in layouts for layer in layout.layers}

    def attend(
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        turn: torch.Tensor | None = None,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        layout = layout_of[layer]
        assert k.shape[1:] == (layout.kv_heads, layout.head_dim)
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        v = k if layout.planes == 1 else v
        share, n = q.shape[1] // k.shape[1], len(q)
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        rows, columns = torch.arange(n).view(-1, 1), torch.arange(n)
        hidden = columns > rows
        if layout.window is not None and layout.kind is GroupKind.CHUNKED:
            hidden |= rows // layout.window != columns // layout.window
        elif layout.window is not None:
            hidden |= rows - columns >= layout.window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, n, 1)), dim=-1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :n], v)

    return attend


class FreshStates:
    """One sequence from its first token on: what it reads is zero, unless it has been written before."""

    def __init__(self, layouts: Sequence[KVLayout]) -> None:
        self._layouts = {(layer, layout.kind): layout for layout in layouts for layer in layout.layers}
        self._written: dict[tuple[int, GroupKind], torch.Tensor] = {}
        self.runs: tuple[StateRun, ...] = ()

    def next(self, tokens: int) -> FreshStates:
        """Ready for a step of so many tokens."""
        self.runs = (StateRun((0,), tokens, torch.arange(tokens)),)
        return self

    def read(self, layer: int, kind: GroupKind, run: StateRun) -> torch.Tensor:
        layout = self._layouts[layer, kind]
        found = self._written.get((layer, kind), torch.zeros(1, layout.kv_heads, layout.head_dim))
        return found.view(1, layout.kv_heads, layout.head_dim).clone()

    def write(self, layer: int, kind: GroupKind, run: StateRun, states: torch.Tensor) -> None:
        self._written[layer, kind] = states.clone()


@pytest.fixture(scope="session")
def fresh_states() -> type[FreshStates]:
    return FreshStates


@pytest.fixture(scope="session")
def our_logits() -> Logits:
    """`our_logits(model_dir, token_ids)`: float32 [tokens, vocab] of the native model."""

    def run(model_dir: Path, token_ids: Sequence[int]) -> torch.Tensor:
        model = load_model(model_dir, torch_operators())
        rows = torch.arange(len(token_ids))
        layouts = model.layouts(16, DType.FLOAT32)
        states = FreshStates(layouts).next(len(rows))
        batch = ForwardBatch(torch.tensor(list(token_ids)), rows, rows, _dense_attention(layouts), states)
        return model.forward(batch)

    return run


class _Together:
    """Collectives of the ranks of one stage, each on a thread of its own."""

    def __init__(self, tp_size: int) -> None:
        self.given: list[torch.Tensor] = [torch.empty(0)] * tp_size
        self.barrier = threading.Barrier(tp_size, timeout=20)

    def of_rank(self, tp_rank: int) -> _Member:
        return _Member(self, tp_rank)


class _Member:
    def __init__(self, together: _Together, tp_rank: int) -> None:
        self._together, self._tp_rank = together, tp_rank

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._together.given[self._tp_rank] = x.clone()
        self._together.barrier.wait()
        given = list(self._together.given)
        self._together.barrier.wait()
        return given

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._exchange(x)).sum(0))

    def side_by_side(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        parts = self._exchange(x)
        assert [part.shape[1] for part in parts] == list(widths)
        return torch.cat(parts, dim=1)


@pytest.fixture(scope="session")
def sharded_logits() -> Callable[..., list[torch.Tensor]]:
    """`sharded_logits(model_dir, token_ids, tp_size, pp_size)`: as `our_logits`, of each rank of the last stage."""

    def run(model_dir: Path, token_ids: Sequence[int], tp_size: int, pp_size: int) -> list[torch.Tensor]:
        rows, hidden = torch.arange(len(token_ids)), [None] * tp_size
        for stage in range(pp_size):
            together = _Together(tp_size)

            def forward(tp_rank: int, given: Any, stage: int = stage, together: _Together = together) -> torch.Tensor:
                shard = Shard(tp_rank, tp_size, stage, pp_size)
                model = load_model(model_dir, torch_operators(), shard=shard, collectives=together.of_rank(tp_rank))
                attention = _dense_attention(model.layouts(16, DType.FLOAT32))
                return model.forward(ForwardBatch(torch.tensor(list(token_ids)), rows, rows, attention, hidden=given))

            with ThreadPoolExecutor(tp_size) as threads:
                hidden = list(threads.map(forward, range(tp_size), hidden))
        return hidden

    return run


@pytest.fixture(scope="session")
def assert_logits(our_logits: Logits, reference: Any) -> Callable[..., None]:
    """`assert_logits(model_dir)`: at every one of 100 positions the logits are those of transformers. within: the
    tolerance, in shares of the largest logit."""

    def check(model_dir: Path, within: float = 1e-4) -> None:
        model = reference.load(model_dir)
        vocab = model.config.get_text_config().vocab_size
        token_ids = torch.randint(3, vocab, (100,), generator=torch.Generator().manual_seed(7)).tolist()
        expected = reference.logits(model, token_ids)
        assert expected.std() > 0.1, "a flat reference would prove nothing"
        tolerance = within * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(our_logits(model_dir, token_ids), expected, rtol=0, atol=tolerance)

    return check


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """`checkpoint(transformers_config)`: a random checkpoint of it, every weight (norms and biases too) drawn."""
    return lambda config, auto="AutoModelForCausalLM": random_checkpoint(config, tmp_path / "checkpoint", auto)
