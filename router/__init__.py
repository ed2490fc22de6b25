"""The router: front ends, worker pool, policies, and the driver of each request. No torch, no Ray."""

from kvferry.router.facts import WorkerFacts, WorkerState
from kvferry.router.policies import POLICIES, Policy, RoutingQuery, WorkerLoad
from kvferry.router.server import serve_router
from kvferry.router.settings import Flow, RouterAddresses, RouterSettings, Schedule

__all__ = [
    "POLICIES",
    "Flow",
    "Policy",
    "RouterAddresses",
    "RouterSettings",
    "RoutingQuery",
    "Schedule",
    "WorkerFacts",
    "WorkerLoad",
    "WorkerState",
    "serve_router",
]
