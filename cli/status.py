"""`kvferry status`: who serves, what each worker resolved to and why, blocks and requests."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvferry.cli.options import Endpoint, Json, StateDir, find_endpoint
from kvferry.cli.output import print_json, refusals
from kvferry.cluster.admin_client import AdminClient, StatusResponse, WorkerStatus
from kvferry.core import cache_codec, codec
from kvferry.resolution import resolution_dict

_UNBROKEN = 100_000


def status_command(endpoint: Endpoint = None, state_dir: StateDir = None, as_json: Json = False) -> None:
    """Show every worker: role, state, resolved transceiver/KV pair and its reason, blocks, requests."""
    with refusals(as_json):
        with AdminClient(find_endpoint(endpoint, state_dir)) as admin:
            status = admin.status()
        if as_json:
            print_json(status_dict(status))
        else:
            facts_console().print(status_view(status_dict(status)))


def facts_console() -> Console:
    """As wide as the terminal; into a pipe or a file each fact keeps its line."""
    return Console() if sys.stdout.isatty() else Console(width=_UNBROKEN)


def status_dict(status: StatusResponse) -> dict[str, Any]:
    router = status.router
    return {
        "workers": [_worker_dict(worker) for worker in status.workers],
        "router": {
            "endpoint": router.endpoint,
            "pid": router.pid,
            "model": router.model,
            "requests": dict(router.requests),
            "queue_depth": router.queue_depth,
        },
    }


def _worker_dict(worker: WorkerStatus) -> dict[str, Any]:
    blocks = codec.blocks_from_wire(worker.blocks)
    return {
        "name": worker.name,
        "role": worker.role,
        "state": worker.state,
        "state_reason": worker.state_reason,
        "pid": worker.pid,
        "incarnation": worker.incarnation,
        "endpoint": worker.endpoint,
        "resolution": resolution_dict(codec.resolution_from_wire(worker.resolution)),
        "blocks": {
            "total": blocks.total,
            "free": blocks.free,
            "cached": blocks.cached,
            "pinned": blocks.pinned,
            "quarantined": blocks.quarantined,
        },
        "requests": dict(worker.requests),
        "cache": asdict(cache_codec.statistics_from_wire(worker.cache)),
        "tiers": [asdict(cache_codec.tier_from_wire(tier)) for tier in worker.tiers],
        "model": worker.model,
        "kv_cache_core": worker.kv_cache_core,
        "max_batch": worker.max_batch,
        "peers": list(worker.peers),
        "peer_errors": dict(worker.peer_errors),
        "ranks": [
            {"rank": rank.rank, "tp_rank": rank.tp_rank, "pp_rank": rank.pp_rank, "pid": rank.pid}
            for rank in worker.ranks
        ],
    }


def status_view(status: dict[str, Any]) -> Group:
    """The status as a table that fits 80 columns of a terminal, and under it why each worker runs what it runs."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("worker", "state", "pid", "transceiver", "kv", "free blocks", "requests"):
        table.add_column(column, no_wrap=column != "requests")
    reasons = []
    for worker in status["workers"]:
        resolution, blocks = worker["resolution"], worker["blocks"]
        live = {name: count for name, count in worker["requests"].items() if count}
        table.add_row(
            worker["name"],
            worker["state"],
            str(worker["pid"]),
            resolution["transceiver"],
            resolution["manager"],
            f"{blocks['free']}/{blocks['total']}",
            ", ".join(f"{name} {count}" for name, count in live.items()) or "-",
        )
        sources = f"{resolution['runtime_source'] or '-'}/{resolution['manager_source']}"
        reasons.append(f"{worker['name']} ({worker['role']}, by {sources}): {resolution['reason']}")
        if len(worker["ranks"]) > 1:
            places = [
                f"{each['rank']} (tp {each['tp_rank']}, pp {each['pp_rank']}, pid {each['pid']})"
                for each in worker["ranks"]
            ]
            reasons.append(f"{worker['name']} ranks: {', '.join(places)}")
        reasons += [f"{worker['name']}: {worker['state_reason']}"] if worker["state_reason"] else []
        reasons += [f"{worker['name']}: {error}" for error in worker["peer_errors"].values()]
    router = status["router"]
    requests = ", ".join(f"{name} {count}" for name, count in router["requests"].items() if count) or "none yet"
    head = f"router {router['endpoint']} serves {router['model']}; queue {router['queue_depth']}; requests: {requests}"
    return Group(Text(head), table, *(Text(reason, style="dim") for reason in dict.fromkeys(reasons)))
