"""What the transfer benchmark moves: cache shapes, and how their blocks lie in the pools."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvferry.core import DType, GroupKind, KVLayout, Registry, Resolution, Source
from kvferry.kvcache import KVPool

PLACEMENTS = ("contiguous", "fragmented")


@dataclass(frozen=True, slots=True)
class Shape:
    """tokens: the prompt lengths that are measured with this cache. placements: how its blocks lie."""

    layout: KVLayout
    tokens: tuple[int, ...]
    placements: tuple[str, ...] = PLACEMENTS

    @property
    def blocks(self) -> int:
        return self.layout.blocks_for(max(self.tokens))


SHAPES: Registry[Shape] = Registry("cache shape", "shape")
SHAPES.register(
    "smollm2",
    Shape(KVLayout(GroupKind.FULL, layers=tuple(range(30)), kv_heads=3, head_dim=64), (128, 512, 2048, 8192)),
)
SHAPES.register(
    "llama-3-8b",
    Shape(
        KVLayout(GroupKind.FULL, layers=tuple(range(32)), kv_heads=8, head_dim=128, dtype=DType.BFLOAT16),
        (2048,),
    ),
)
SHAPES.register(
    "pieces-16k",  # blocks of 16 KiB: what libraries that move layer by layer are asked for
    Shape(KVLayout(GroupKind.FULL, layers=(0, 1), kv_heads=2, head_dim=32), (16_384,), ("fragmented",)),
)


def place(placement: str, blocks: int, of: int, seed: int) -> tuple[int, ...]:
    """Block ids of a request: in one piece, or no two neighbours in order."""
    if placement == "contiguous":
        return tuple(range(blocks))
    ids = list(range(of))
    random.Random(seed).shuffle(ids)
    return tuple(ids[:blocks])


def make_pool(layout: KVLayout, blocks: int, allocate: Callable[[int], torch.Tensor] | None) -> KVPool:
    """Touched all over, so that no page is met for the first time while the clock runs."""
    take = allocate or (lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    buffer, generations = take(blocks * layout.slot_nbytes), take(8 * blocks).view(torch.int64)
    buffer.view(torch.int64).copy_(torch.arange(buffer.numel() // 8))
    return KVPool(layout, blocks, buffer, buffer, generations)


def route_resolution(route: str) -> Resolution:
    """`NIXL/CPP` as a resolution; CPP drives V1, PYTHON is measured with V2."""
    backend, _, runtime = route.partition("/")
    manager = "V1" if runtime == "CPP" else "V2"
    return Resolution("LlamaForCausalLM", backend, runtime, Source.USER, manager, Source.USER, "benchmark")
