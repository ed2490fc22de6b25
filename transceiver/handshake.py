"""Whether two ranks can exchange KV: pure, and every refusal names what differs."""

from __future__ import annotations

from kvferry.core import DType, ErrorCode, RankInfo, TransferError
from kvferry.resolution import PairFacts, can_pair
from kvferry.transceiver.shares import check_shapes


class IncompatiblePeerError(TransferError):
    """Two workers can never exchange KV as they are configured; trying again does not help."""

    code = ErrorCode.INVALID_ARGUMENT


def check_peer(local: RankInfo, remote: RankInfo) -> None:
    """Raises IncompatiblePeerError naming both workers and the first difference."""
    difference = _difference(local, remote)
    if difference:
        raise IncompatiblePeerError(f"{local.worker} and {remote.worker} cannot exchange KV: {difference}")


def _difference(local: RankInfo, remote: RankInfo) -> str | None:
    for name in ("protocol_version", "model_fingerprint"):
        ours, theirs = getattr(local, name), getattr(remote, name)
        if ours != theirs:
            return f"{name} is {ours} here and {theirs} there"
    pairing = can_pair(_facts(local), _facts(remote))
    if pairing:
        return pairing
    malformed = _malformed(remote)
    if malformed:
        return malformed
    try:
        check_shapes(local, remote)
    except TransferError as error:
        return error.message
    return None


def _malformed(rank: RankInfo) -> str | None:
    """What a peer of this version never sends: addresses computed from it would be nonsense."""
    if not len(rank.layouts) == len(rank.pools) == len(rank.generations):
        return f"{len(rank.layouts)} layouts, {len(rank.pools)} pools, {len(rank.generations)} generation regions"
    for index, (layout, pool, words) in enumerate(zip(rank.layouts, rank.pools, rank.generations, strict=True)):
        blocks = pool.nbytes // layout.slot_nbytes
        if blocks * layout.slot_nbytes != pool.nbytes or words.nbytes != 8 * blocks:
            return f"pool {index} has {pool.nbytes} bytes and {words.nbytes} bytes of generations"
    if not (0 <= rank.tp_rank < rank.tp_size and 0 <= rank.pp_rank < rank.pp_size):
        return f"rank {rank.tp_rank} of {rank.tp_size}, pipeline stage {rank.pp_rank} of {rank.pp_size}"
    if not rank.incarnation or not rank.handle_key:
        return "the incarnation or the handle key is missing"
    return None


def _facts(rank: RankInfo) -> PairFacts:
    dtypes = sorted({layout.dtype for layout in rank.layouts}, key=lambda dtype: dtype.value)
    return PairFacts(
        worker=rank.worker,
        model_fingerprint=rank.model_fingerprint,
        kv_dtype="+".join(dtype.value for dtype in dtypes) or DType.FLOAT32.value,
        resolution=rank.resolution,
    )
