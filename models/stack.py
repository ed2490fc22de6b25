"""What the families have in common around their layers: embedding, final norm, head, and who caches what."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvferry.core import CheckpointError, DType, GroupKind, KVLayout, ModelLimits
from kvferry.models.base import Attention, CausalLM, ForwardBatch, States, Weights
from kvferry.models.checked import Shape
from kvferry.models.layers import RMSNorm
from kvferry.models.operators import Operators
from kvferry.models.rope import Rope
from kvferry.models.sharding import embed, load_embedding, load_head, shard_of


@dataclass(frozen=True, slots=True)
class StackNames:
    """What the tensors around the layers are called. prefixes: where a backbone's tensors may stand."""

    prefixes: tuple[str, ...]
    embedding: str
    norm: str


USUAL_NAMES = StackNames(("model.", "model.language_model.", "language_model.model."), "embed_tokens", "norm")
"""A backbone stands alone, or inside a wrapper as it is written now and as it used to be."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer caches. Layers that say the same share a layer group. dtype: None is that of K and V."""

    kind: GroupKind
    kv_heads: int
    head_dim: int
    window: int | None = None
    planes: int = 2
    dtype: DType | None = None

    @classmethod
    def attending(cls, kv_heads: int, head_dim: int, window: int | None) -> LayerCache:
        kind = GroupKind.FULL if window is None else GroupKind.WINDOW
        return cls(kind, kv_heads, head_dim, window)

    @classmethod
    def state(cls, kind: GroupKind, heads: int, size: int) -> LayerCache:
        """A recurrent state of `size` numbers per head. Always float32: every token's rounding would stay in it."""
        return cls(kind, heads, size, planes=1, dtype=DType.FLOAT32)


Cached = LayerCache | tuple[LayerCache, ...] | None
"""What a layer caches: one thing, several of different kinds, nothing."""


def group_layers(caches: Sequence[Cached], tokens_per_block: int, kv_dtype: DType) -> tuple[KVLayout, ...]:
    """One layout per distinct cache, in the order of first appearance."""
    held: dict[LayerCache, list[int]] = {}
    for layer, own in enumerate(caches):
        for cache in (own,) if isinstance(own, LayerCache) else own or ():
            held.setdefault(cache, []).append(layer)
    return tuple(
        KVLayout(
            kind=cache.kind,
            layers=tuple(layers),
            kv_heads=cache.kv_heads,
            head_dim=cache.head_dim,
            dtype=cache.dtype or kv_dtype,
            tokens_per_block=1 if cache.kind.is_state else tokens_per_block,
            window=cache.window,
            planes=cache.planes,
        )
        for cache, layers in held.items()
    )


@dataclass(frozen=True, slots=True)
class Step:
    """One step as the layers see it. turns: the rotation of each of the model's ropes, [tokens, 1, head_dim / 2]."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    turns: tuple[torch.Tensor, ...]
    attention: Attention
    states: States | None


class LayerStack(CausalLM):
    """A family sets `_ropes` and says in `_run` how its layers turn embeddings into hidden states.

    held: the layers of this pipeline stage, all of them in a worker of one; only these are to be loaded and run.
    """

    def __init__(
        self,
        shape: Shape,
        caches: Sequence[Cached],
        ropes: Sequence[Rope],
        weights: Weights,
        operators: Operators,
        *,
        norm_offset: float = 0.0,
        embedding_scale: float = 1.0,
        logit_cap: float | None = None,
        names: StackNames = USUAL_NAMES,
    ) -> None:
        self.shape = shape
        self.prefix = find_prefix(weights, names)
        shard = shard_of(weights)
        self.held = shard.layers(shape.layers)
        self._caches = tuple(cache if layer in self.held else None for layer, cache in enumerate(caches))
        self._ropes = tuple(ropes)
        self._embedding_scale, self._logit_cap = embedding_scale, logit_cap
        size = (shape.vocab_size, shape.hidden_size)
        name = f"{self.prefix}{names.embedding}.weight"
        self._embedding = load_embedding(weights, name, size)
        norm = f"{self.prefix}{names.norm}"
        self._norm = load_norm(operators, weights, norm, shape.hidden_size, shape.norm_eps, norm_offset)
        head, at_hand = (name, self._embedding) if shape.tied else (_head_name(self.prefix), None)
        self._head = load_head(weights, head, size, at_hand, operators.linear)

    @property
    def limits(self) -> ModelLimits:
        return ModelLimits(self.shape.vocab_size, self.shape.max_context_tokens)

    def layouts(self, tokens_per_block: int, kv_dtype: DType) -> tuple[KVLayout, ...]:
        return group_layers(self._caches, tokens_per_block, kv_dtype)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        with torch.inference_mode():
            x = embed(batch, self._embedding)
            if self._embedding_scale != 1.0 and self._embedding is not None:
                x = x * self._embedding_scale
            turns = tuple(rope.turn(batch.positions) for rope in self._ropes)
            x = self._run(x, Step(batch.token_ids, batch.positions, turns, batch.attention, batch.states))
            if self._head is None:
                return x
            logits = self._head(self._norm(x.index_select(0, batch.logit_rows))).float()
            return logits if self._logit_cap is None else torch.tanh(logits / self._logit_cap) * self._logit_cap

    @abstractmethod
    def _run(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x: [tokens, hidden]. The hidden states before the final norm."""


@dataclass(frozen=True, slots=True)
class ResidualLayer:
    """x += attention(norm(x)), then x += feed_forward(norm(x)): most families' layers."""

    attention_norm: RMSNorm
    attention: Callable[[torch.Tensor, Step], torch.Tensor]
    feed_forward_norm: RMSNorm
    feed_forward: Callable[[torch.Tensor], torch.Tensor]


class ResidualStack(LayerStack):
    """A family sets `_layers`."""

    _layers: Sequence[ResidualLayer]

    def _run(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        for layer in self._layers:
            x = x + layer.attention(layer.attention_norm(x), step)
            x = x + layer.feed_forward(layer.feed_forward_norm(x))
        return x


def find_prefix(weights: Weights, names: StackNames) -> str:
    """Raises CheckpointError when the embedding is nowhere."""
    for prefix in names.prefixes:
        if f"{prefix}{names.embedding}.weight" in weights:
            return prefix
    tried = ", ".join(f"{prefix}{names.embedding}.weight" for prefix in names.prefixes)
    raise CheckpointError(f"the checkpoint has none of the tensors {tried}", field="model")


def _head_name(prefix: str) -> str:
    return "language_model.lm_head.weight" if prefix == "language_model.model." else "lm_head.weight"


def load_norm(operators: Operators, weights: Weights, name: str, size: int, eps: float, offset: float = 0.0) -> RMSNorm:
    """offset: what the family adds to the weight as it is stored."""
    return RMSNorm(operators.rms_norm, weights.get(f"{name}.weight", (size,)) + offset, eps)
