"""What a model is to the engine, and what the engine is to a model.

A model declares the layouts of its caches and computes; it never sees block tables. Attention over the
paged cache and the packed linears are operators the engine supplies per device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvferry.core import DType, GroupKind, KVLayout, ModelLimits


class Attention(Protocol):
    """Writes this step's K and V to the paged cache and attends over everything each sequence has there."""

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        turn: torch.Tensor | None = None,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """layer: global layer id. q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]. Where the layer's
        cache has one plane, k stands for both and v is not looked at.
        turn: complex64 [tokens, 1, head_dim / 2], by which q and k are rotated first (see `rope.rotate`).
        sinks: [heads], one more logit in each head's softmax, with nothing behind it.
        Returns [tokens, heads, head_dim]. Rows are the step's tokens, all sequences concatenated."""
        ...


@dataclass(frozen=True, slots=True)
class StateRun:
    """Sequences of a step that compute equally many tokens, so that they go through a recurrence together.

    sequences: their places in the step; length: tokens of each; rows: int64 [sequences * length], the step's rows that
    are theirs, one sequence after the other.
    """

    sequences: tuple[int, ...]
    length: int
    rows: torch.Tensor


class States(Protocol):
    """The recurrent states of a step's sequences: what each layer left behind at the end of the step before, zeros
    where a sequence begins."""

    @property
    def runs(self) -> Sequence[StateRun]:
        """Every sequence stands in one of them."""
        ...

    def read(self, layer: int, kind: GroupKind, run: StateRun) -> torch.Tensor:
        """A copy, [sequences, kv_heads, head_dim] as the layout of the layer's group of this kind says."""
        ...

    def write(self, layer: int, kind: GroupKind, run: StateRun, states: torch.Tensor) -> None:
        """What `read` will give in the next step; any shape with a first dimension of sequences."""
        ...


class Linear(Protocol):
    """y = x W^T (+ b), weights packed once for the device."""

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """x: [rows, in]. Returns [rows, out]: a new tensor, or `add_to` with y added in place."""
        ...


class LinearFactory(Protocol):
    """Packs a weight [out, in] for this device; the caller gives up its reference to the plain one."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear: ...


class Layer(Protocol):
    """One layer of a decoder, with what stands around its parts: norms and residual sums."""

    def __call__(self, x: torch.Tensor, turn: torch.Tensor, attention: Attention) -> torch.Tensor:
        """x: [tokens, hidden], which it may write over. turn: as `Attention` has it. Returns [tokens, hidden]."""
        ...


class StackFactory(Protocol):
    """Makes one layer of several, which it computes in their order."""

    def __call__(self, layers: Sequence[Layer]) -> Layer: ...


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's tokens, all sequences concatenated.

    token_ids, positions: int64 [tokens]. logit_rows: int64 [rows], which tokens need logits.
    attention: the paged-attention operator bound to this step's block tables. states: the recurrent ones; None where
    the model's layouts have none. hidden: [tokens, hidden], what the pipeline stage before this one made of the tokens;
    None on the first stage.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    attention: Attention
    states: States | None = None
    hidden: torch.Tensor | None = None


class CausalLM(ABC):
    """A text backbone. Built by the loader from (config, weights, operators); stateless between steps."""

    @property
    @abstractmethod
    def limits(self) -> ModelLimits: ...

    @abstractmethod
    def layouts(self, tokens_per_block: int, kv_dtype: DType) -> tuple[KVLayout, ...]:
        """One KVLayout per layer group, of the layers and heads this model holds."""

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits, float32 [rows, vocab], for batch.logit_rows; on a pipeline stage before the last, hidden states of
        every token, [tokens, hidden], for the next."""


class Weights(Protocol):
    """The tensors of a checkpoint, read on demand. CheckpointError names a missing or misshapen one."""

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor: ...

    def __contains__(self, name: str) -> bool: ...


Config = Mapping[str, Any]
"""A checkpoint's config.json, as read."""
