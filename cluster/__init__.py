"""Composition: the configuration, worker processes, their Ray actors, and launching and stopping a cluster."""

from kvferry.cluster.admin_client import AdminClient
from kvferry.cluster.config import ClusterConfig, WorkerConfig
from kvferry.cluster.config_sources import load_config, parse_flags, worker_config
from kvferry.cluster.launch import Blueprint, RunningCluster, draw_up, launch, stop
from kvferry.cluster.state_file import ClusterState, read_state

__all__ = [
    "AdminClient",
    "Blueprint",
    "ClusterConfig",
    "ClusterState",
    "RunningCluster",
    "WorkerConfig",
    "draw_up",
    "launch",
    "load_config",
    "parse_flags",
    "read_state",
    "stop",
    "worker_config",
]
