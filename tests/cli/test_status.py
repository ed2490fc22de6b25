"""What `kvferry status` shows of a worker of several ranks."""

from __future__ import annotations

from rich.console import Console

from kvferry.cli.status import status_dict, status_view
from kvferry.core import Resolution, Source, codec
from kvferry.proto import admin_pb2


def _worker(name: str, ranks: list[admin_pb2.RankStatus]) -> admin_pb2.WorkerStatus:
    resolution = Resolution("LlamaForCausalLM", "NIXL", "PYTHON", Source.MODEL, "V2", Source.MODEL, "it fits")
    return admin_pb2.WorkerStatus(
        name=name,
        role="decode",
        state="ready",
        pid=ranks[0].pid,
        resolution=codec.resolution_to_wire(resolution),
        ranks=ranks,
    )


def test_ranks_are_listed_with_their_places_and_processes() -> None:
    ranks = [admin_pb2.RankStatus(rank=n, tp_rank=n % 2, pp_rank=n // 2, pid=40 + n) for n in range(4)]
    sole = [admin_pb2.RankStatus(rank=0, tp_rank=0, pp_rank=0, pid=7)]
    status = status_dict(admin_pb2.StatusResponse(workers=[_worker("decode-0", ranks), _worker("decode-1", sole)]))
    assert status["workers"][0]["ranks"] == [
        {"rank": n, "tp_rank": n % 2, "pp_rank": n // 2, "pid": 40 + n} for n in range(4)
    ]
    console = Console(width=300)
    with console.capture() as shown:
        console.print(status_view(status))
    lines = shown.get().splitlines()
    [line] = [line for line in lines if "ranks:" in line]
    assert line.startswith("decode-0 ranks: 0 (tp 0, pp 0, pid 40), 1 (tp 1, pp 0, pid 41), 2 (tp 0, pp 1, pid 42)")
