"""Pieces of weight memory never overlap, and live as long as they are held."""

from __future__ import annotations

import torch

from kvferry.engine.weight_memory import WeightMemory

MIB = 1 << 20


def test_pieces_are_apart_and_aligned() -> None:
    memory = WeightMemory()
    sizes = [1, 64, 100, 3 * MIB, 40 * MIB, 5, 31 * MIB, 2 * MIB]
    pieces = [memory.take(size) for size in sizes]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        piece.fill_(number)
    for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
        assert piece.shape == (size,)
        assert bool((piece == number).all())


def test_small_pieces_share_huge_pages() -> None:
    memory = WeightMemory()
    first, second = memory.take(MIB), memory.take(MIB)
    assert second.data_ptr() == first.data_ptr() + MIB
    assert first.data_ptr() % (2 * MIB) == 0


def test_a_piece_outlives_its_memory() -> None:
    piece = WeightMemory().take(MIB).view(torch.float32)
    piece.fill_(3.0)
    torch.empty(64 * MIB, dtype=torch.uint8).fill_(0)
    assert float(piece.sum()) == 3.0 * MIB / 4
