"""What a KV cache block looks like in memory, and the small value types around it.

A *slot* holds one block for all layers of its group, contiguous as
``[layer][K|V][head][token][dim]`` (or ``[layer][K|V][token][head][dim]``, see `AxisOrder`), so that
moving a block is one copy, not one per layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum


class GroupKind(Enum):
    """What a layer group caches. The last two hold fixed-size state, not one entry per token."""

    FULL = "full"
    WINDOW = "window"
    CHUNKED = "chunked"
    MLA = "mla"
    CONV = "conv"
    SSM = "ssm"

    @property
    def is_state(self) -> bool:
        return self in (GroupKind.CONV, GroupKind.SSM)


class DType(Enum):
    """Element types by their torch names."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8 = "float8_e4m3fn"
    INT8 = "int8"

    @property
    def nbytes(self) -> int:
        return _DTYPE_NBYTES[self]

    @property
    def row_scale_nbytes(self) -> int:
        """What stands behind each row of K or V of this type: one float32 that scales the row, or nothing."""
        return 4 if self is DType.INT8 else 0


_DTYPE_NBYTES = {DType.FLOAT32: 4, DType.BFLOAT16: 2, DType.FLOAT16: 2, DType.FLOAT8: 1, DType.INT8: 1}


class AxisOrder(Enum):
    """The order of the inner axes of a slot. HEAD_TOKEN keeps one head's tokens together."""

    HEAD_TOKEN = "head_token"
    TOKEN_HEAD = "token_head"


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Token positions [start, stop)."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"not a token range: [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class MemRegion:
    """Bytes [addr, addr + nbytes) of this process on `device` ("cpu", "cuda:0")."""

    addr: int
    nbytes: int
    device: str = "cpu"


def head_range(heads: int, tp_rank: int, tp_size: int) -> range:
    """Which of a layer's kv heads tensor-parallel rank `tp_rank` of `tp_size` needs for its share of the query heads.
    Ranges of neighbours overlap where a head's queries are on several ranks: that head is replicated."""
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tensor-parallel rank {tp_rank} of {tp_size}")
    return range(tp_rank * heads // tp_size, -(-(tp_rank + 1) * heads // tp_size))


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One layer group: its layers share a window, a shape and a dtype, hence one pool and one slot size.

    layers: global layer ids, in the order they stand in a slot. window: tokens a layer looks back,
    itself included (None: all). planes: 2 for K and V, 1 where one tensor serves as both (MLA).
    kv_heads: of one layer, in a slot. A tensor-parallel rank holds some of the model's: those from first_head on,
    of all_heads (None: kv_heads, this is all).
    """

    kind: GroupKind
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: DType = DType.FLOAT32
    tokens_per_block: int = 16
    axis_order: AxisOrder = AxisOrder.HEAD_TOKEN
    window: int | None = None
    planes: int = 2
    first_head: int = 0
    all_heads: int | None = None

    def __post_init__(self) -> None:
        sizes = {
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "tokens_per_block": self.tokens_per_block,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if not self.layers:
            raise ValueError("a layer group needs at least one layer")
        if not 0 <= self.first_head <= self.model_heads - self.kv_heads:
            raise ValueError(f"kv heads {self.first_head} and {self.kv_heads - 1} more of {self.model_heads}")

    @property
    def model_heads(self) -> int:
        """The kv heads of one layer, on all tensor-parallel ranks together, each counted once."""
        return self.kv_heads if self.all_heads is None else self.all_heads

    @property
    def heads(self) -> range:
        """The model's numbers of the heads in a slot, in slot order."""
        return range(self.first_head, self.first_head + self.kv_heads)

    def shard(self, tp_rank: int, tp_size: int, layers: Collection[int] | None = None) -> KVLayout | None:
        """What one rank holds of this (unsharded) group: its heads, and the layers among `layers` (None: all).
        None when it holds no layer of it."""
        held = tuple(layer for layer in self.layers if layers is None or layer in layers)
        if not held:
            return None
        heads = head_range(self.kv_heads, tp_rank, tp_size)
        if tp_size == 1:
            return replace(self, layers=held)
        return replace(self, layers=held, kv_heads=len(heads), first_head=heads.start, all_heads=self.kv_heads)

    @property
    def row_nbytes(self) -> int:
        """One token of one head of one plane of one layer, its scale included, so that it moves with what it scales.
        States have no scales."""
        return self.head_dim * self.dtype.nbytes + (0 if self.kind.is_state else self.dtype.row_scale_nbytes)

    @property
    def plane_nbytes(self) -> int:
        """K or V of one layer of one block."""
        return self.kv_heads * self.tokens_per_block * self.row_nbytes

    @property
    def layer_nbytes(self) -> int:
        return self.planes * self.plane_nbytes

    @property
    def slot_nbytes(self) -> int:
        """One block of all layers of the group."""
        return len(self.layers) * self.layer_nbytes

    @property
    def token_nbytes(self) -> int:
        """What one token costs in this group, all layers together."""
        return self.slot_nbytes // self.tokens_per_block

    def blocks_for(self, tokens: int) -> int:
        """ceil(tokens / tokens_per_block)."""
        return -(-tokens // self.tokens_per_block)

    def fingerprint(self) -> str:
        """Equal exactly for layouts whose slots are byte-compatible."""
        text = "|".join(
            str(part)
            for part in (
                self.kind.value,
                self.layers,
                self.kv_heads,
                self.head_dim,
                self.dtype.value,
                self.tokens_per_block,
                self.axis_order.value,
                self.window,
                self.planes,
                self.first_head,
                self.model_heads,
            )
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]
