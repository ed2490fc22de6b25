"""What the families have in common around their layers: embedding, final norm, head, and who caches what."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding

from kvferry.core import CheckpointError, DType, GroupKind, KVLayout, ModelLimits
from kvferry.models.base import Attention, CausalLM, ForwardBatch, Weights
from kvferry.models.checked import Shape
from kvferry.models.layers import RMSNorm
from kvferry.models.operators import Operators
from kvferry.models.rope import Rope

PREFIXES = ("model.", "model.language_model.", "language_model.model.")
"""Where a backbone's tensors stand: alone, and inside a wrapper as it is written now and as it used to be."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer caches. Layers that say the same share a layer group."""

    kind: GroupKind
    kv_heads: int
    head_dim: int
    window: int | None = None
    planes: int = 2

    @classmethod
    def attending(cls, kv_heads: int, head_dim: int, window: int | None) -> LayerCache:
        kind = GroupKind.FULL if window is None else GroupKind.WINDOW
        return cls(kind, kv_heads, head_dim, window)


def group_layers(caches: Sequence[LayerCache | None], tokens_per_block: int, kv_dtype: DType) -> tuple[KVLayout, ...]:
    """One layout per distinct cache, in the order of first appearance; None is a layer that caches nothing."""
    return tuple(
        KVLayout(
            kind=cache.kind,
            layers=tuple(layer for layer, own in enumerate(caches) if own == cache),
            kv_heads=cache.kv_heads,
            head_dim=cache.head_dim,
            dtype=kv_dtype,
            tokens_per_block=tokens_per_block,
            window=cache.window,
            planes=cache.planes,
        )
        for cache in dict.fromkeys(own for own in caches if own is not None)
    )


@dataclass(frozen=True, slots=True)
class Step:
    """One step as the layers see it. turns: the rotation of each of the model's ropes, [tokens, 1, head_dim / 2]."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    turns: tuple[torch.Tensor, ...]
    attention: Attention


class LayerStack(CausalLM):
    """A family sets `_ropes` and says in `_run` how its layers turn embeddings into hidden states."""

    def __init__(
        self,
        shape: Shape,
        caches: Sequence[LayerCache | None],
        ropes: Sequence[Rope],
        weights: Weights,
        operators: Operators,
        *,
        norm_offset: float = 0.0,
        embedding_scale: float = 1.0,
        logit_cap: float | None = None,
    ) -> None:
        self.shape = shape
        self.prefix = find_prefix(weights)
        self._caches = tuple(caches)
        self._ropes = tuple(ropes)
        self._embedding_scale, self._logit_cap = embedding_scale, logit_cap
        size = (shape.vocab_size, shape.hidden_size)
        self._embedding = weights.get(f"{self.prefix}embed_tokens.weight", size)
        self._norm = load_norm(operators, weights, f"{self.prefix}norm", shape.hidden_size, shape.norm_eps, norm_offset)
        head = self._embedding if shape.tied else weights.get(_head_name(self.prefix), size)
        self._head = operators.linear(head, None)

    @property
    def limits(self) -> ModelLimits:
        return ModelLimits(self.shape.vocab_size, self.shape.max_context_tokens)

    def layouts(self, tokens_per_block: int, kv_dtype: DType) -> tuple[KVLayout, ...]:
        return group_layers(self._caches, tokens_per_block, kv_dtype)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        with torch.inference_mode():
            x = embedding(batch.token_ids, self._embedding)
            if self._embedding_scale != 1.0:
                x = x * self._embedding_scale
            turns = tuple(rope.turn(batch.positions) for rope in self._ropes)
            x = self._run(x, Step(batch.token_ids, batch.positions, turns, batch.attention))
            logits = self._head(self._norm(x.index_select(0, batch.logit_rows))).float()
            return logits if self._logit_cap is None else torch.tanh(logits / self._logit_cap) * self._logit_cap

    @abstractmethod
    def _run(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x: [tokens, hidden]. The hidden states before the final norm."""


def find_prefix(weights: Weights) -> str:
    """Raises CheckpointError when the embedding is nowhere."""
    for prefix in PREFIXES:
        if f"{prefix}embed_tokens.weight" in weights:
            return prefix
    names = ", ".join(f"{prefix}embed_tokens.weight" for prefix in PREFIXES)
    raise CheckpointError(f"the checkpoint has none of the tensors {names}", field="model")


def _head_name(prefix: str) -> str:
    return "language_model.lm_head.weight" if prefix == "language_model.model." else "lm_head.weight"


def load_norm(operators: Operators, weights: Weights, name: str, size: int, eps: float, offset: float = 0.0) -> RMSNorm:
    """offset: what the family adds to the weight as it is stored."""
    return RMSNorm(operators.rms_norm, weights.get(f"{name}.weight", (size,)) + offset, eps)
