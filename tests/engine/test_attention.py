"""Paged attention equals attention over plain tensors, whatever lies in pages nobody wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from kvferry.core import AxisOrder, DType, GroupKind, KVLayout
from kvferry.engine.attention import PagedAttention, decode_batches
from kvferry.engine.kernels import Kernels
from kvferry.engine.operators import operators_for
from kvferry.engine.spans import AttentionChunk
from kvferry.kvcache import KVPool
from kvferry.kvcache.rows import decode_rows, encode_rows
from kvferry.models import CausalLM, ForwardBatch, load_model

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 8
SCALE = 0.3
BLOCKS = 64


def nan_pool(layout: KVLayout, num_blocks: int = BLOCKS) -> KVPool:
    """Every bit set: a NaN in any floating type."""
    buffer = torch.full((num_blocks * layout.slot_nbytes,), 0xFF, dtype=torch.uint8)
    inner = (layout.kv_heads, layout.tokens_per_block)
    if layout.axis_order is AxisOrder.TOKEN_HEAD:
        inner = inner[::-1]
    shape = (num_blocks, len(layout.layers), 2, *inner, layout.row_nbytes // layout.dtype.nbytes)
    view = buffer.view(getattr(torch, layout.dtype.value)).view(shape)
    return KVPool(layout, num_blocks, buffer, view, torch.zeros(num_blocks, dtype=torch.int64))


def layout_of(
    order: AxisOrder = AxisOrder.HEAD_TOKEN, window: int | None = None, dtype: DType = DType.FLOAT32
) -> KVLayout:
    kind = GroupKind.FULL if window is None else GroupKind.WINDOW
    return KVLayout(kind, (0, 1), KV_HEADS, DIM, dtype, BLOCK, order, window)


@dataclass
class Scene:
    """Sequences with random q, k, v for all their tokens, and scattered blocks for them."""

    pool: KVPool
    lengths: Sequence[int]
    kernels: ClassVar[Kernels] = Kernels.AUTO

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(sum(self.lengths))
        shapes = [(2, length, HEADS + 2 * KV_HEADS, DIM) for length in self.lengths]
        self.qkv = [torch.randn(shape, generator=generator) for shape in shapes]
        order = torch.randperm(self.pool.num_blocks, generator=generator).tolist()
        self.tables = []
        for length in self.lengths:
            count = -(-length // BLOCK)
            self.tables.append(order[:count])
            order = order[count:]

    def run(self, ranges: Sequence[tuple[int, int, int]], drop: bool = False) -> list[list[torch.Tensor]]:
        """One step of (sequence, start, stop) chunks; per layer, each chunk's output. drop: leave stale blocks out."""
        chunks = [self._chunk(*span, drop=drop) for span in ranges]
        attention = PagedAttention([self.pool], chunks, self.kernels)
        outputs = []
        for layer in (0, 1):
            rows = torch.cat([self.qkv[sequence][layer, start:stop] for sequence, start, stop in ranges])
            q, k, v = rows.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            out = attention(layer, q, k, v, SCALE)
            outputs.append(list(out.split([stop - start for _, start, stop in ranges])))
        return outputs

    def _chunk(self, sequence: int, start: int, stop: int, drop: bool) -> AttentionChunk:
        window = self.pool.layout.window
        first = max(0, start + 1 - window) // BLOCK if drop and window is not None else 0
        return AttentionChunk(start, stop - start, (self.tables[sequence][first:],), (first,))

    def expected(self, sequence: int, layer: int, start: int, stop: int) -> torch.Tensor:
        """By the textbook, over the tokens as the pool's type keeps them."""
        q, k, v = self.qkv[sequence][layer, :stop].split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        stored = self.pool.layout.dtype
        k, v = (decode_rows(encode_rows(x, stored), stored, torch.float32) for x in (k, v))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[start:], k) * SCALE
        distance = torch.arange(start, stop).view(-1, 1) - torch.arange(stop)
        window = self.pool.layout.window or stop + 1
        scores = scores.masked_fill((distance < 0) | (distance >= window), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)

    def check(self, ranges: Sequence[tuple[int, int, int]], drop: bool = False) -> None:
        for layer, outputs in enumerate(self.run(ranges, drop)):
            for (sequence, start, stop), out in zip(ranges, outputs, strict=True):
                expected = self.expected(sequence, layer, start, stop)
                torch.testing.assert_close(out, expected, rtol=0, atol=2e-6, msg=f"{sequence, layer, start, stop}")


@pytest.fixture(autouse=True, params=[Kernels.NATIVE, Kernels.TORCH], ids=lambda kernels: kernels.value)
def _both_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here holds for the compiled kernels and for torch's."""
    monkeypatch.setattr(Scene, "kernels", request.param)


ORDERS = pytest.mark.parametrize("order", AxisOrder)
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 3)


@ORDERS
@pytest.mark.parametrize("length", LENGTHS)
def test_whole_prompts(order: AxisOrder, length: int) -> None:
    Scene(nan_pool(layout_of(order)), [length]).check([(0, 0, length)])


@ORDERS
@pytest.mark.parametrize("window", [None, 1, 5, BLOCK, 2 * BLOCK + 3])
@pytest.mark.parametrize("size", [3, BLOCK, 11])
def test_chunks_equal_the_whole(order: AxisOrder, window: int | None, size: int) -> None:
    length = 5 * BLOCK + 3
    scene = Scene(nan_pool(layout_of(order, window)), [length])
    for start in range(0, length, size):
        scene.check([(0, start, min(start + size, length))], drop=True)


@ORDERS
@pytest.mark.parametrize("window", [None, 3, BLOCK, 2 * BLOCK + 3])
def test_decode_of_many_lengths_in_one_step(order: AxisOrder, window: int | None) -> None:
    lengths = [1 + 7 * n % 50 for n in range(9)]
    scene = Scene(nan_pool(layout_of(order, window)), lengths)
    for sequence, length in enumerate(lengths):
        if length > 1:
            scene.run([(sequence, 0, length - 1)])
    scene.check([(sequence, length - 1, length) for sequence, length in enumerate(lengths)], drop=True)


@ORDERS
def test_prefill_and_decode_mixed_in_one_step(order: AxisOrder) -> None:
    scene = Scene(nan_pool(layout_of(order)), [20, 30, 9, 40])
    scene.run([(0, 0, 19), (2, 0, 8), (3, 0, 25)])
    scene.check([(1, 0, 30), (0, 19, 20), (3, 25, 40), (2, 8, 9)])


@ORDERS
@pytest.mark.parametrize(("window", "lengths"), [(5, [30]), (19, [26, 30])], ids=["alone", "padded"])
def test_stale_positions_of_a_window_may_hold_anything(order: AxisOrder, window: int, lengths: list[int]) -> None:
    """A transfer moves only what the window still needs: the rest of its first block stays as it was."""
    scene = Scene(nan_pool(layout_of(order, window)), lengths)
    for sequence, length in enumerate(lengths):
        scene.run([(sequence, 0, length - 1)])
        for position in range(length - window):
            block = scene.pool.view[scene.tables[sequence][position // BLOCK]]
            tokens_first = block if order is AxisOrder.TOKEN_HEAD else block.transpose(2, 3)
            tokens_first[:, :, position % BLOCK] = float("nan")
    scene.check([(sequence, length - 1, length) for sequence, length in enumerate(lengths)], drop=True)


@ORDERS
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16, DType.INT8])
def test_lower_precision_pools(order: AxisOrder, dtype: DType) -> None:
    scene = Scene(nan_pool(layout_of(order, dtype=dtype)), [20, 13])
    scene.check([(0, 0, 12), (1, 0, 12)])
    scene.check([(0, 12, 20), (1, 12, 13)])


def test_only_the_steps_own_rows_are_written() -> None:
    scene = Scene(nan_pool(layout_of()), [20])
    scene.run([(0, 0, 20)])
    written = ~scene.pool.view.isnan().all(dim=-1)
    assert int(written.sum()) == 2 * 2 * KV_HEADS * 20
    before = scene.pool.view.clone()
    scene.run([(0, 19, 20)])
    torch.testing.assert_close(scene.pool.view, before, rtol=0, atol=0, equal_nan=True)


def test_two_groups_have_their_own_tables() -> None:
    full = Scene(nan_pool(layout_of()), [30])
    windowed = Scene(nan_pool(KVLayout(GroupKind.WINDOW, (2, 3), KV_HEADS, DIM, window=9, tokens_per_block=4)), [1])
    chunk = AttentionChunk(0, 30, (full.tables[0], range(8)), (0, 0))
    attention = PagedAttention([full.pool, windowed.pool], [chunk], Scene.kernels)
    q, k, v = full.qkv[0][0].split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    torch.testing.assert_close(attention(0, q, k, v, SCALE), full.expected(0, 0, 0, 30), rtol=0, atol=2e-6)
    near = attention(2, q, k, v, SCALE)
    torch.testing.assert_close(near[:9], full.expected(0, 0, 0, 9), rtol=0, atol=2e-6)
    assert not torch.allclose(near[9:], full.expected(0, 0, 0, 30)[9:], atol=1e-3)


def test_batches_weigh_padding_against_calls() -> None:
    assert decode_batches([]) == []
    assert decode_batches([4, 1, 3]) == [[0, 1, 2]]
    assert decode_batches([2, 500, 2, 499, 3]) == [[1, 3], [0, 2, 4]]
    assert decode_batches([17] * 16) == [list(range(16))]
    squares = decode_batches([n * n for n in range(1, 40)])
    assert sorted(index for batch in squares for index in batch) == list(range(39))


def test_groups_of_states_are_left_alone() -> None:
    """The kernels would refuse what is no K and V; a layer of states has nothing to attend over."""
    states = nan_pool(KVLayout(GroupKind.SSM, (5,), KV_HEADS, DIM, tokens_per_block=1))
    full = Scene(nan_pool(layout_of()), [9])
    chunk = AttentionChunk(0, 9, ((0,), full.tables[0]), (0, 0))
    attention = PagedAttention([states, full.pool], [chunk], Scene.kernels)
    q, k, v = full.qkv[0][0].split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    torch.testing.assert_close(attention(0, q, k, v, SCALE), full.expected(0, 0, 0, 9), rtol=0, atol=2e-6)
    with pytest.raises(KeyError):
        attention(5, q, k, v, SCALE)


# -- the real model, against transformers ---------------------------------------------------------------


@dataclass(slots=True)
class Paged:
    """A model over a NaN-filled pool; sequence n owns blocks n * 16 to n * 16 + 15, in reverse."""

    model: CausalLM
    pools: list[KVPool]

    def forward(self, parts: Sequence[tuple[int, int, Sequence[int]]]) -> torch.Tensor:
        """parts: (sequence, start, tokens). Logits of every row."""
        chunks, positions, token_ids = [], [], []
        for sequence, start, tokens in parts:
            table = tuple(range(sequence * 16, (sequence + 1) * 16))[::-1]
            chunks.append(AttentionChunk(start, len(tokens), (table,), (0,)))
            positions += range(start, start + len(tokens))
            token_ids += tokens
        rows = torch.arange(len(token_ids))
        attention = PagedAttention(self.pools, chunks, Scene.kernels)
        return self.model.forward(ForwardBatch(torch.tensor(token_ids), torch.tensor(positions), rows, attention))


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> Paged:
    model = load_model(smollm2_dir, operators_for())
    return Paged(model, [nan_pool(layout, 48) for layout in model.layouts(16, DType.FLOAT32)])


@pytest.fixture(scope="module")
def texts(smollm2_dir: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    prompts = ["Once upon a time, in a small town by the river, there lived a ferryman who", "naïve 東京 🎉 1984:", "A"]
    return [tokenizer.encode(prompt * repeat) for prompt, repeat in zip(prompts, (5, 2, 1), strict=True)]


def assert_logits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * max(1.0, float(expected.abs().max())))


def test_smollm2_logits_at_every_position(
    smollm2: Paged, texts: list[list[int]], smollm2_dir: Path, reference: Any
) -> None:
    tokens = texts[0]
    expected = reference.logits(reference.load(smollm2_dir), tokens)
    assert_logits(smollm2.forward([(0, 0, tokens)]), expected)
    chunked = [smollm2.forward([(1, start, tokens[start : start + 19])]) for start in range(0, len(tokens), 19)]
    assert_logits(torch.cat(chunked), expected)


def test_smollm2_decodes_several_lengths_together(
    smollm2: Paged, texts: list[list[int]], smollm2_dir: Path, reference: Any, assert_golden: Any
) -> None:
    first = smollm2.forward([(sequence, 0, tokens) for sequence, tokens in enumerate(texts)])
    last_rows = torch.tensor([len(tokens) for tokens in texts]).cumsum(0) - 1
    outputs = [[token] for token in first[last_rows].argmax(-1).tolist()]
    for _ in range(31):
        pairs = enumerate(zip(texts, outputs, strict=True))
        step = [(sequence, len(prompt) + len(output) - 1, output[-1:]) for sequence, (prompt, output) in pairs]
        for output, token in zip(outputs, smollm2.forward(step).argmax(-1).tolist(), strict=True):
            output.append(token)
    for prompt, output in zip(texts, outputs, strict=True):
        assert_golden(reference.load(smollm2_dir), prompt, output)
