"""A model in parts: the same families, built over one rank's share of a checkpoint.

A rank's part of a tensor-parallel layer looks like a smaller layer, so nothing in a family's code is parallel: it is
given a config with the rank's own sizes, and weights that hand out the rank's rows or columns. Where a product is a
part of a sum over ranks, `completed` adds the sum. What is divided how is a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from kvferry.core import ConfigError
from kvferry.models.base import Config, ForwardBatch, Linear, LinearFactory, Weights
from kvferry.models.checked import count, text_config
from kvferry.models.shard import PIPELINE_SETTING, TENSOR_SETTING, WHOLE, Shard
from kvferry.resolution import find_card, required_implementation

_HEADS, _KV_HEADS = "num_attention_heads", "num_key_value_heads"


@dataclass(frozen=True, slots=True)
class Split:
    """How the layers of a family are divided. widths: keys of the config that are divided evenly, beside the heads.
    rows, columns: modules whose weights [out, in] are divided along out, or along in; the others are on every rank.
    kv_rows: as rows, by kv heads, of which ranks hold copies where there are fewer than ranks. head_dim: what a config
    means by leaving it out (None: hidden_size / heads)."""

    widths: tuple[str, ...]
    rows: frozenset[str]
    columns: frozenset[str]
    kv_rows: frozenset[str] = frozenset({"k_proj", "v_proj"})
    head_dim: int | None = None


_LLAMA = Split(
    widths=("intermediate_size",),
    rows=frozenset({"q_proj", "gate_proj", "up_proj"}),
    columns=frozenset({"o_proj", "down_proj"}),
)
_SPARSE_LLAMA = Split(
    widths=("intermediate_size", "moe_intermediate_size"),
    rows=_LLAMA.rows | {"w1", "w3"},
    columns=_LLAMA.columns | {"w2"},
)

SPLITS: Mapping[str, Split] = {
    "kvferry.models.gemma3:Gemma3": replace(_LLAMA, head_dim=256),
    "kvferry.models.llama:Llama": _LLAMA,
    "kvferry.models.sparse_llama:SparseLlama": _SPARSE_LLAMA,
}
"""The families that can be divided, by the path that cards name."""


def split_of(config: Config, shard: Shard) -> Split:
    """Raises ConfigError naming the setting when the model in `config` cannot be served by several ranks."""
    card = find_card(config)
    split = SPLITS.get(required_implementation(card))
    if split is None:
        setting = TENSOR_SETTING if shard.tp_size > 1 else PIPELINE_SETTING
        raise ConfigError(
            f"{card.architecture} cannot be divided among ranks in this version: set {setting} to 1", field=setting
        )
    return split


def shard_config(config: Config, shard: Shard) -> Config:
    """`config` with the sizes of one rank. Raises ConfigError naming what does not divide by engine.tensor_parallel."""
    split, text = split_of(config, shard), text_config(config)
    heads = count(text, _HEADS)
    kv_heads = count(text, _KV_HEADS, heads)
    own: dict[str, Any] = {
        _HEADS: _divided(heads, shard, _HEADS),
        _KV_HEADS: kv_heads // _kv_parts(kv_heads, shard),
        "head_dim": count(text, "head_dim", split.head_dim or count(text, "hidden_size") // heads),
    }
    own |= {key: _divided(count(text, key), shard, key) for key in split.widths if text.get(key) is not None}
    sized = {**text, **own}
    return sized if text is config else {**config, "text_config": sized}


def _divided(size: int, shard: Shard, key: str) -> int:
    if size % shard.tp_size:
        raise ConfigError(
            f"{TENSOR_SETTING} is {shard.tp_size}, which does not divide {key} ({size}) of this model",
            field=TENSOR_SETTING,
        )
    return size // shard.tp_size


def _kv_parts(kv_heads: int, shard: Shard) -> int:
    """How many different parts the kv heads are divided into; each is on tp_size / parts ranks."""
    if kv_heads % shard.tp_size and shard.tp_size % kv_heads:
        raise ConfigError(
            f"{TENSOR_SETTING} is {shard.tp_size}: it must divide {_KV_HEADS} of this model ({kv_heads}), or be a "
            "multiple of it",
            field=TENSOR_SETTING,
        )
    return min(kv_heads, shard.tp_size)


class SlicedWeights(Weights, Protocol):
    """Weights that can be read in part."""

    def get_part(self, name: str, shape: tuple[int, ...], axis: int, part: range) -> torch.Tensor:
        """Indices `part` along `axis` of a tensor that must be of `shape` in the checkpoint; nothing else is read."""
        ...


class Collectives(Protocol):
    """What the ranks of one pipeline stage do together. Each must call the same in the same order; every call is
    bounded, and raises an UnavailableError when a rank does not take part."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Replaces x, of one shape everywhere, with the sum over the ranks; equal to the last bit on all of them."""
        ...

    def side_by_side(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """x: [rows, widths[tp_rank]]. Returns [rows, sum of widths], in order of ranks."""
        ...


class ShardedWeights:
    """Implements `models.base.Weights` for one rank: families ask for tensors of the sizes of `shard_config`."""

    def __init__(
        self, weights: SlicedWeights, config: Config, shard: Shard, collectives: Collectives | None = None
    ) -> None:
        """config: the whole model's. collectives: None for a model that never computes."""
        self.shard = shard
        self.collectives = collectives
        self.whole = weights
        self._split = split_of(config, shard)
        text = text_config(config)
        self._kv_parts = _kv_parts(count(text, _KV_HEADS, count(text, _HEADS)), shard)

    def __contains__(self, name: str) -> bool:
        return name in self.whole

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        module, kind = _module(name), name.rpartition(".")[2]
        if module in self._split.columns:
            if kind == "bias":  # added once: by the first rank of the sum
                bias = self.whole.get(name, shape)
                return bias if self.shard.tp_rank == 0 else torch.zeros_like(bias)
            return self._part(name, shape, 1, self.shard.tp_size)
        if module in self._split.rows:
            return self._part(name, shape, 0, self.shard.tp_size)
        if module in self._split.kv_rows:
            return self._part(name, shape, 0, self._kv_parts)
        return self.whole.get(name, shape)

    def _part(self, name: str, shape: tuple[int, ...], axis: int, parts: int) -> torch.Tensor:
        size = shape[axis]
        index = self.shard.tp_rank * parts // self.shard.tp_size
        whole = (*shape[:axis], size * parts, *shape[axis + 1 :])
        return self.whole.get_part(name, whole, axis, range(index * size, (index + 1) * size))

    def sums(self, name: str) -> bool:
        """Whether a product with the weight of module `name` is a part of a sum over ranks."""
        return self.shard.tp_size > 1 and name.rpartition(".")[2] in self._split.columns


def _module(name: str) -> str:
    """`q_proj` of model.layers.0.self_attn.q_proj.weight."""
    parts = name.rsplit(".", 2)
    return parts[-2] if len(parts) > 1 else name


# -- what families and shared layers ask ------------------------------------------------------------------


def shard_of(weights: Weights) -> Shard:
    return weights.shard if isinstance(weights, ShardedWeights) else WHOLE


def completed(weights: Weights, name: str, linear: Linear) -> Linear:
    """`linear`, made of the weight of module `name`, such that its results are the whole layer's."""
    if isinstance(weights, ShardedWeights) and weights.sums(name) and weights.collectives is not None:
        return SummedLinear(linear, weights.collectives)
    return linear


def load_embedding(weights: Weights, name: str, size: tuple[int, int]) -> torch.Tensor | None:
    """[vocab, hidden]; None on ranks that get hidden states from the stage before them."""
    return weights.get(name, size) if shard_of(weights).first_stage else None


def embed(batch: ForwardBatch, embedding: torch.Tensor | None) -> torch.Tensor:
    """What a stage's first layer starts from, [tokens, hidden]. embedding: as `load_embedding` gave it."""
    if embedding is not None:
        return torch.nn.functional.embedding(batch.token_ids, embedding)
    assert batch.hidden is not None, "a later stage is given the hidden states of the one before it"
    return batch.hidden


def load_head(
    weights: Weights, name: str, size: tuple[int, int], embedding: torch.Tensor | None, linear: LinearFactory
) -> Linear | None:
    """From hidden states to logits; None on ranks before the last stage. name: of the weight, [vocab, hidden].
    embedding: the same weight, where it is at hand already."""
    shard = shard_of(weights)
    if not shard.last_stage:
        return None
    if isinstance(weights, ShardedWeights) and shard.tp_size > 1:
        own = linear(weights.whole.get_part(name, size, 0, shard.rows(size[0])), None)
        widths = [len(Shard(rank, shard.tp_size).rows(size[0])) for rank in range(shard.tp_size)]
        return own if weights.collectives is None else GatheredLinear(own, widths, weights.collectives)
    return linear(weights.get(name, size) if embedding is None else embedding, None)


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """Each rank has some of the columns of the weight, and of x."""

    part: Linear
    collectives: Collectives

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        y = self.collectives.sum(self.part(x))
        return y if add_to is None else add_to.add_(y)


@dataclass(frozen=True, slots=True)
class GatheredLinear:
    """Each rank has some of the rows of the weight, so many as `widths` says."""

    part: Linear
    widths: Sequence[int]
    collectives: Collectives

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        y = self.collectives.side_by_side(self.part(x), self.widths) if len(x) else x.new_zeros(0, sum(self.widths))
        return y if add_to is None else add_to.add_(y)
