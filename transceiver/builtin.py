"""The implementations of this package, as `kvferry.resolution.capabilities` names them. Each loads its library only
when it is built."""

from __future__ import annotations

from kvferry.core import ConfigError, TransferError
from kvferry.transceiver.base import Agent, Transceiver
from kvferry.transceiver.control_client import GrpcControlClient
from kvferry.transceiver.implementation import NIXL_PLUGIN_SETTING, Implementation, TransceiverParts
from kvferry.transceiver.memory import SharedArena
from kvferry.transceiver.python_runtime import PythonTransceiver


def python_transceiver(agent: Agent, parts: TransceiverParts) -> Transceiver:
    """The PYTHON runtime over any agent, which it takes over."""
    return PythonTransceiver(parts.identity, parts.pools, agent, GrpcControlClient(), parts.times)


def _nixl_python(parts: TransceiverParts) -> Transceiver:
    from kvferry.transceiver.nixl import NixlAgent

    agent = NixlAgent(parts.identity.incarnation, (parts.nixl_plugin,))
    return python_transceiver(_reachable(agent, parts.nixl_plugin), parts)


def _shm_python(parts: TransceiverParts) -> Transceiver:
    from kvferry.transceiver.shm import ShmAgent

    return python_transceiver(ShmAgent(parts.identity.incarnation, _arena(parts)), parts)


def _mooncake_python(parts: TransceiverParts) -> Transceiver:
    from kvferry.transceiver.mailbox import split_address
    from kvferry.transceiver.mooncake import MooncakeAgent

    host, _ = split_address(parts.identity.endpoint)
    return python_transceiver(MooncakeAgent(parts.identity.incarnation, host), parts)


def _nixl_cpp(parts: TransceiverParts) -> Transceiver:
    from kvferry.transceiver.cpp_runtime import CppTransceiver
    from kvferry.transceiver.native_agent import NativeAgent
    from kvferry.transceiver.nixl_library import nixl_backend

    agent = NativeAgent(nixl_backend(parts.identity.incarnation, (parts.nixl_plugin,)))
    _reachable(agent, parts.nixl_plugin)
    return CppTransceiver(parts.identity, parts.pools, agent, GrpcControlClient(), parts.times)


def _ucx_cpp(parts: TransceiverParts) -> Transceiver:
    from kvferry.transceiver.cpp_runtime import CppTransceiver
    from kvferry.transceiver.native_agent import NativeAgent
    from kvferry.transceiver.ucx_library import ucx_backend

    agent = NativeAgent(ucx_backend(parts.identity.incarnation))
    return CppTransceiver(parts.identity, parts.pools, agent, GrpcControlClient(), parts.times)


def _shm_cpp(parts: TransceiverParts) -> Transceiver:
    from kvferry.transceiver.cpp_runtime import CppTransceiver
    from kvferry.transceiver.native.engine import MemoryBackend
    from kvferry.transceiver.native_shm import NativeShmAgent

    agent = NativeShmAgent(parts.identity.incarnation, _arena(parts), MemoryBackend())
    return CppTransceiver(parts.identity, parts.pools, agent, GrpcControlClient(), parts.times)


def _reachable(agent: Agent, plugin: str) -> Agent:
    """NIXL has plug-ins for files and object stores too, which no peer can be reached with."""
    try:
        agent.metadata()
        return agent
    except TransferError as error:
        reason = error.message
    agent.close()  # not before the error is gone: it holds what must be destroyed
    raise ConfigError(
        f"NIXL's plug-in {plugin} does not move memory between workers ({reason}); UCX does", field=NIXL_PLUGIN_SETTING
    )


def _arena(parts: TransceiverParts) -> SharedArena:
    """The memory of the pools, which peers map."""
    arena = parts.memory
    inside = isinstance(arena, SharedArena) and all(
        arena.segment_of(region) for pool in parts.pools for region in (pool.region, pool.generation_region)
    )
    if not isinstance(arena, SharedArena) or not inside:
        raise ConfigError(
            "backend SHM needs block pools in shared memory: allocate them from pool_memory(resolution)",
            field="transceiver.backend",
        )
    return arena


NIXL_PYTHON = Implementation(_nixl_python)
NIXL_CPP = Implementation(_nixl_cpp)
MOONCAKE_PYTHON = Implementation(_mooncake_python)
UCX_CPP = Implementation(_ucx_cpp)
SHM_CPP = Implementation(_shm_cpp, memory=SharedArena)
SHM_PYTHON = Implementation(_shm_python, memory=SharedArena)
