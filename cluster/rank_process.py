"""The process of a cluster worker's rank other than 0: the engine's follower, with a transceiver of its own.

``python -m kvferry.cluster.rank_process``, started by the process of rank 0, which tells it the rest.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from kvferry.cluster.log_setup import RequestFormatter, log_to_file
from kvferry.cluster.other_ranks import RankTransfers
from kvferry.core import ConfigError, Role, codec
from kvferry.engine import Follower, Message, ParentPipe, run_rank
from kvferry.transceiver import RANKS_NEED_PYTHON, PythonTransceiver, RankPlace, create_transceiver, pool_memory


def main() -> int:
    pipe = ParentPipe()
    spec = pipe.hear()
    _log(spec)
    os.environ.update(spec["environ"])
    return run_rank(pipe, spec, lambda follower, told: _serve(pipe, spec, follower, told))


def _serve(pipe: ParentPipe, spec: Message, follower: Follower, told: Message) -> Message:
    """Makes the pools and, where this worker exchanges KV, the transceiver of this rank."""
    resolution = codec.resolution_from_bytes(bytes.fromhex(spec["resolution"]))
    facts: Message = {"pid": os.getpid()}
    if resolution.runtime is None:
        follower.make_pools(told["blocks"])
        return facts
    memory = pool_memory(resolution)
    shard = follower.shard
    transceiver = create_transceiver(
        resolution=resolution,
        worker=spec["worker"],
        role=Role(spec["role"]),
        incarnation=told["incarnation"],
        model_fingerprint=told["fingerprint"],
        pools=follower.make_pools(told["blocks"], memory.allocate if memory is not None else None),
        endpoint=told["endpoint"],
        transfer_timeout_ms=spec["transfer_timeout_ms"],
        memory=memory,
        lease_s=spec["lease_s"],
        nixl_plugin=spec["nixl_plugin"],
        place=RankPlace(shard.tp_rank, shard.tp_size, shard.pp_rank, shard.pp_size),
    )
    if not isinstance(transceiver, PythonTransceiver):
        transceiver.close()
        raise ConfigError(RANKS_NEED_PYTHON, field="transceiver.runtime")
    pipe.listen(RankTransfers(pipe, follower, transceiver).heard)
    return {**facts, "rank": codec.rank_to_bytes(transceiver.local).hex()}


def _log(spec: Message) -> None:
    name = f"{spec['worker']}-rank-{spec['rank']}"
    if spec["log_dir"]:
        log_to_file(name, Path(spec["log_dir"]), spec["log_level"])
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RequestFormatter(name))
    logging.basicConfig(level=spec["log_level"], handlers=[handler], force=True)


if __name__ == "__main__":
    sys.exit(main())
