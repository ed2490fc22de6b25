"""The NIXL agent over NIXL's Python API, for host memory.

No progress thread (an idle one burns a core): whoever waits for a peer keeps calling `drain_notifications`.
Posting releases the GIL and may block for the whole copy.
"""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import numpy as np

from kvferry.core import ConfigError, MemRegion, TransferError
from kvferry.transceiver.base import Agent, CopyArray, Direction, Operation, OpState
from kvferry.transceiver.implementation import NIXL_PLUGIN_SETTING

logger = logging.getLogger(__name__)

INSTALL_LINE = "pip install nixl-cu12"
_STATES = {"DONE": OpState.DONE, "PROC": OpState.SUBMITTED}


class NixlOperation(Operation):
    """Takes over `handle`. After `detach` (its agent is being destroyed) it is NOT_SUBMITTED unless DONE."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent = agent
        self._handle = handle
        self._state = OpState.NOT_SUBMITTED
        self._error = ""

    def post(self) -> None:
        self._observe(self._agent.transfer)

    def poll(self) -> OpState:
        if self._state is OpState.SUBMITTED:
            self._observe(self._agent.check_xfer_state)
        return self._state

    @property
    def error(self) -> str:
        return self._error

    def release(self) -> None:
        handle, self._handle, self._agent = self._handle, None, None
        if handle is None:
            return
        try:
            handle.release()
        except Exception as error:
            # Still in progress: NIXL keeps it until the agent is destroyed, which a fence does.
            logger.warning("NIXL does not release an operation yet: %s", error)

    def detach(self) -> None:
        self.release()
        if self._state is not OpState.DONE:
            self._state = OpState.NOT_SUBMITTED

    def _observe(self, call: Any) -> None:
        """NIXL's exceptions share no base class of their own."""
        try:
            status = call(self._handle)
        except Exception as error:
            self._state, self._error = OpState.IN_DOUBT, f"NIXL: {error}"
            return
        self._state = _STATES.get(status, OpState.IN_DOUBT)
        if self._state is OpState.IN_DOUBT:
            self._error = f"NIXL reports status {status}"


class NixlAgent(Agent):
    """Named `<incarnation>/<epoch>`: a fence destroys the NIXL agent and makes the next epoch's.

    Late writes are real: over tcp a released READ still lands when a stopped peer continues. Only the agent's
    destruction prevents that.
    """

    def __init__(self, incarnation: str, plugins: tuple[str, ...] = ("UCX",)) -> None:
        self._incarnation = incarnation
        self._plugins = plugins
        self._epoch = 0
        self._regions: dict[MemRegion, Any] = {}
        self._peers: dict[str, tuple[str, bytes]] = {}
        self._operations: weakref.WeakSet[NixlOperation] = weakref.WeakSet()
        self._live: Any = None
        self._dying: weakref.ref[Any] | None = None
        self._create()

    @property
    def writes_land(self) -> bool:
        return True

    def register(self, region: MemRegion) -> None:
        if region.device != "cpu":
            raise TransferError(f"the NIXL agent moves host memory, not {region.device}", field="transceiver.backend")
        self._regions[region] = self._guard("register memory", self._nixl.register_memory, *_descriptors(region))

    def deregister(self, region: MemRegion) -> None:
        descriptors = self._regions.pop(region, None)
        if descriptors is None:
            raise TransferError(f"{region} is not registered")
        self._guard("deregister memory", self._nixl.deregister_memory, descriptors)

    def metadata(self) -> bytes:
        data: bytes = self._guard("describe itself", self._nixl.get_agent_metadata)
        return data

    def load_peer(self, incarnation: str, metadata: bytes) -> None:
        known = self._peers.get(incarnation)
        if known is not None:
            self.forget_peer(incarnation)
        name = self._add(metadata)
        if name.rpartition("/")[0] != incarnation:
            self._guard("forget a peer", self._nixl.remove_remote_agent, name)
            raise TransferError(f"the agent metadata of {incarnation} describes {name!r}")
        self._peers[incarnation] = (name, metadata)

    def forget_peer(self, incarnation: str) -> None:
        known = self._peers.pop(incarnation, None)
        if known is not None:
            self._guard("forget a peer", self._nixl.remove_remote_agent, known[0])

    def submit(self, direction: Direction, peer: str, copies: CopyArray) -> Operation:
        name = self._name(peer)
        zeros = np.zeros(len(copies), dtype=np.uint64)
        local = np.stack([copies[:, 0], copies[:, 2], zeros], axis=1)
        remote = np.stack([copies[:, 1], copies[:, 2], zeros], axis=1)
        handle = self._guard(
            "prepare a transfer",
            lambda: self._nixl.initialize_xfer(
                direction.value.upper(),
                self._nixl.get_xfer_descs(local, "DRAM"),
                self._nixl.get_xfer_descs(remote, "DRAM"),
                name,
            ),
        )
        operation = NixlOperation(self._nixl, handle)
        self._operations.add(operation)
        operation.post()
        return operation

    def notify(self, peer: str, message: bytes) -> None:
        self._guard("notify", self._nixl.send_notif, self._name(peer), message)

    def drain_notifications(self) -> list[tuple[str, bytes]]:
        arrived: dict[str, list[bytes]] = self._guard("receive notifications", self._nixl.get_new_notifs)
        return [(name.rpartition("/")[0], message) for name, messages in arrived.items() for message in messages]

    def fence(self, peer: str) -> None:
        self._peers.pop(peer, None)
        self._destroy()
        self._create()
        for region in list(self._regions):
            self.register(region)
        for incarnation, (_, metadata) in list(self._peers.items()):
            try:
                self._add(metadata)
            except TransferError as error:
                logger.warning("%s is lost after a fence: %s", incarnation, error.message)
                del self._peers[incarnation]

    def close(self) -> None:
        self._peers.clear()
        self._destroy()
        self._regions.clear()

    @property
    def _nixl(self) -> Any:
        if self._live is None:
            raise TransferError("the NIXL agent is not running")
        return self._live

    def _create(self) -> None:
        nixl_agent, nixl_agent_config = _load_nixl()
        self._epoch += 1
        config = nixl_agent_config(enable_prog_thread=False, backends=list(self._plugins))
        name = f"{self._incarnation}/{self._epoch}"
        try:
            self._live = self._guard("start", nixl_agent, name, config)
        except TransferError as error:
            if self._epoch > 1:  # it did start here before
                raise
            plugins = ", ".join(self._plugins)
            raise ConfigError(
                f"{error.message}: its plug-in {plugins} is missing, or does not start on this machine",
                field=NIXL_PLUGIN_SETTING,
            ) from None
        missing = set(self._plugins) - set(self._live.backends)
        if missing:
            raise ConfigError(f"NIXL has no plug-in {', '.join(sorted(missing))}", field=NIXL_PLUGIN_SETTING)

    def _destroy(self) -> None:
        """Drops every reference, so that the destructor runs now. TransferError when something keeps it alive;
        may be called again then."""
        for operation in list(self._operations):
            operation.detach()
        if self._live is not None:
            self._dying = weakref.ref(self._live.agent)
            self._live = None
        if self._dying is not None and self._dying() is not None:
            gc.collect()
            if self._dying() is not None:
                raise TransferError("the NIXL agent is still referenced and cannot be destroyed")
        self._operations.clear()

    def _add(self, metadata: bytes) -> str:
        name: bytes = self._guard("load a peer", self._nixl.add_remote_agent, metadata)
        return name.decode(errors="replace")

    def _name(self, peer: str) -> str:
        known = self._peers.get(peer)
        if known is None:
            raise TransferError(f"peer {peer} is not known to the NIXL agent")
        return known[0]

    def _guard(self, what: str, call: Any, *arguments: Any) -> Any:
        """NIXL's exceptions share no base class of their own."""
        try:
            return call(*arguments)
        except Exception as error:
            raise TransferError(f"NIXL could not {what}: {error or type(error).__name__}") from error


def _load_nixl() -> tuple[Any, Any]:
    """NIXL's classes. Importing it installs a handler that writes to stdout, where our JSON goes: undone here."""
    raise_exceptions = logging.raiseExceptions
    try:
        from nixl_cu12._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise ConfigError(f"NIXL is not installed ({error}): {INSTALL_LINE}", field="transceiver.backend") from None
    finally:
        logging.raiseExceptions = raise_exceptions
    nixl_logger = logging.getLogger("nixl")
    nixl_logger.handlers.clear()
    nixl_logger.propagate = True
    nixl_logger.setLevel(logging.WARNING)
    return nixl_agent, nixl_agent_config


def _descriptors(region: MemRegion) -> tuple[Any, str]:
    return np.asarray([[region.addr, region.nbytes, 0]], dtype=np.uint64), "DRAM"
