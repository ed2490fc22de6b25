"""Which part of which layer group one rank has for another: a pure function of what the two of them hold.

A rank is one process of a worker of tp_size x pp_size. Each layer is on one pipeline stage of a worker; a kv head is on
one or, where there are fewer heads than ranks, on several tensor-parallel ranks of it. The destination takes every
head from exactly one rank of the source, its replicas taken in turn, so that they share the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.core import KVLayout, RankInfo, TransferError, head_range


@dataclass(frozen=True, slots=True)
class GroupShare:
    """Layers and kv heads (both by the model's numbers) that one group of the destination has from one of the
    source; the groups by their index on either side."""

    source_group: int
    destination_group: int
    layers: tuple[int, ...]
    heads: tuple[int, ...]


def group_shares(source: RankInfo, destination: RankInfo) -> tuple[GroupShare, ...]:
    """What `source` has for `destination`; nothing where they hold different layers, or another rank of the source's
    worker has the heads. Raises TransferError naming the first difference between groups that share layers; block
    size and axis order may differ, except in state groups."""
    shares = []
    for ours, theirs, layers in _common_layers(destination.layouts, source.layouts):
        _check_match(ours, destination.layouts[ours], source.layouts[theirs])
        heads = _heads_given(source, destination, source.layouts[theirs].model_heads)
        if heads:
            shares.append(GroupShare(theirs, ours, layers, heads))
    return tuple(shares)


def pair_sources(destination: RankInfo, sources: Sequence[RankInfo]) -> tuple[RankInfo, ...]:
    """The ranks of one worker, of all its `sources`, that `destination` takes KV from. Raises TransferError when they
    have not got everything that it holds, or have something twice: the ranks do not make up one worker."""
    wanted = {
        (_cache_of(layout), layer, head)
        for layout in destination.layouts
        for layer in layout.layers
        for head in layout.heads
    }
    paired, given = [], set[tuple[str, int, int]]()
    for source in sources:
        parts = [
            (_cache_of(source.layouts[share.source_group]), layer, head)
            for share in group_shares(source, destination)
            for layer in share.layers
            for head in share.heads
        ]
        if given.intersection(parts):
            raise TransferError(f"{source.worker} has layers twice: its ranks are not those of one worker")
        given.update(parts)
        if parts:
            paired.append(source)
    if given != wanted:
        cache, layer, head = min(wanted - given)
        raise TransferError(f"no rank of the source has head {head} of the {cache} of layer {layer}")
    return tuple(paired)


def check_shapes(local: RankInfo, remote: RankInfo) -> None:
    """Raises TransferError naming why the two ranks cannot belong to workers that exchange KV: groups that differ,
    layers that a worker of one pipeline stage lacks, heads that are not those of the rank."""
    for rank in (local, remote):
        for index, layout in enumerate(rank.layouts):
            if layout.heads != head_range(layout.model_heads, rank.tp_rank, rank.tp_size):
                raise TransferError(
                    f"layer group {index} of {rank.worker} has kv heads {_ends(layout.heads)} of {layout.model_heads}, "
                    f"which are not those of tensor-parallel rank {rank.tp_rank} of {rank.tp_size}"
                )
    for ours, theirs, _ in _common_layers(local.layouts, remote.layouts):
        _check_match(ours, local.layouts[ours], remote.layouts[theirs])
    for holder, other, where in ((local, remote, "there"), (remote, local, "here")):
        missing = sorted(layer for _, layer in _caches(holder.layouts) - _caches(other.layouts))
        if other.pp_size == 1 and missing:
            raise TransferError(f"layers {_ends(missing)} are missing {where}")


def _heads_given(source: RankInfo, destination: RankInfo, heads: int) -> tuple[int, ...]:
    """Which of the model's `heads` `source` and no other rank of its worker has for `destination`."""
    given = []
    for head in head_range(heads, destination.tp_rank, destination.tp_size):
        givers = [rank for rank in range(source.tp_size) if head in head_range(heads, rank, source.tp_size)]
        takers = [rank for rank in range(destination.tp_size) if head in head_range(heads, rank, destination.tp_size)]
        if givers[takers.index(destination.tp_rank) % len(givers)] == source.tp_rank:
            given.append(head)
    return tuple(given)


def _common_layers(ours: Sequence[KVLayout], theirs: Sequence[KVLayout]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """(our group, their group, the layers both hold, in our order) of groups that cache the same of a layer."""
    for index, layout in enumerate(ours):
        for other, remote in enumerate(theirs):
            if _cache_of(layout) != _cache_of(remote):
                continue
            held = set(remote.layers)
            layers = tuple(layer for layer in layout.layers if layer in held)
            if layers:
                yield index, other, layers


def _cache_of(layout: KVLayout) -> str:
    """What of a layer a group caches: a layer has keys and values in one group, and each kind of state in another."""
    return f"{layout.kind.value} state" if layout.kind.is_state else "keys and values"


def _caches(layouts: Sequence[KVLayout]) -> set[tuple[str, int]]:
    return {(_cache_of(layout), layer) for layout in layouts for layer in layout.layers}


def _check_match(index: int, ours: KVLayout, theirs: KVLayout) -> None:
    names = ["kind", "model_heads", "head_dim", "dtype", "window", "planes"]
    if ours.kind.is_state:
        names += ["tokens_per_block", "axis_order"]
    for name in names:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            raise TransferError(
                f"{name} of layer group {index}: {_value(mine)} here, {_value(other)} there", field=name
            )


def _value(value: object) -> object:
    return getattr(value, "value", value)


def _ends(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}..{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
