"""The tier below host memory: prefixes in files, one fixed-size record per block.

A record is whole or it is a miss: its header carries a checksum over digest and bytes, checked at every read, so that a
write cut short by a crash, or a bit that flipped, is never served. Records outlive the process and are found again at
the next start. Nothing here is needed for correctness; writes happen on a thread of their own and may be skipped.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from kvferry.core import ConfigError, KVLayout, Tier
from kvferry.kvcache.base import TierCounts
from kvferry.kvcache.events import KVEventLog
from kvferry.kvcache.free_slots import FreeSlots
from kvferry.kvcache.records import HEADER_NBYTES, seal, sealed_digest, unseal

logger = logging.getLogger(__name__)

MAX_PENDING_WRITES = 64


class DiskShelf:
    """One layer group's records. `writer` runs its writes in order; everything else happens on the engine thread."""

    def __init__(
        self, path: Path, slot_nbytes: int, num_slots: int, writer: ThreadPoolExecutor, events: KVEventLog | None
    ) -> None:
        """events: told what is kept and given up."""
        self.num_slots = num_slots
        self._slot_nbytes = slot_nbytes
        self._record_nbytes = HEADER_NBYTES + slot_nbytes
        self._writer = writer
        self._events = events
        self._free = FreeSlots(num_slots)
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # oldest first
        self._pending: dict[bytes, tuple[bytes, Future[None]]] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, num_slots * self._record_nbytes)
        self._find_records()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._kept

    @property
    def kept(self) -> int:
        return len(self._kept)

    def _find_records(self) -> None:
        """What an earlier life left behind; whether it is whole shows when it is read."""
        taken = self._free.take(self.num_slots)
        for slot in taken:
            header = os.pread(self._file, HEADER_NBYTES, slot * self._record_nbytes)
            digest = sealed_digest(header, self._slot_nbytes)
            if digest is not None and digest not in self._kept:
                self._kept[digest] = slot
            else:
                self._free.put(slot)

    def keep(self, digest: bytes, row: torch.Tensor) -> None:
        """Writes a block (uint8 [slot_nbytes]) some time soon; skipped while too many writes are waiting."""
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return
        self._forget_written()
        if len(self._pending) >= MAX_PENDING_WRITES or not self.num_slots:
            return
        if not len(self._free):
            self.forget(next(iter(self._kept)))
        (slot,) = self._free.take(1)
        payload = row.numpy().tobytes()
        self._kept[digest] = slot
        self._pending[digest] = (payload, self._writer.submit(self._write, slot, digest, payload))
        if self._events is not None:
            self._events.copied(digest, Tier.DISK)

    def _write(self, slot: int, digest: bytes, payload: bytes) -> None:
        try:
            os.pwrite(self._file, seal(digest, payload), slot * self._record_nbytes)
        except OSError as error:  # the record is torn, which reading it will show
            logger.warning("KV block not written to disk: %s", error)

    def _forget_written(self) -> None:
        for digest in [digest for digest, (_, written) in self._pending.items() if written.done()]:
            del self._pending[digest]

    def read(self, digest: bytes) -> bytes | None:
        """The block's bytes, checked; None, and the record is forgotten, when they are not whole."""
        if digest in self._pending:
            return self._pending[digest][0]
        slot = self._kept[digest]
        try:
            record = os.pread(self._file, self._record_nbytes, slot * self._record_nbytes)
        except OSError as error:
            logger.warning("KV block not read from disk: %s", error)
            record = b""
        payload = unseal(record, digest, self._slot_nbytes)
        if payload is None:
            self.forget(digest)
            return None
        self._kept.move_to_end(digest)
        return payload

    def forget(self, digest: bytes) -> None:
        self._free.put(self._kept.pop(digest))
        self._pending.pop(digest, None)  # a write under way ends before any later one to the same slot
        if self._events is not None:
            self._events.removed(digest, Tier.DISK)

    def clear(self) -> None:
        for digest in list(self._kept):
            self.forget(digest)

    def close(self) -> None:
        """After the last write has ended."""
        os.close(self._file)

    def check_integrity(self) -> None:
        self._free.check_integrity()
        assert sorted([*self._free, *self._kept.values()]) == list(range(self.num_slots))
        assert self._pending.keys() <= self._kept.keys()


class DiskTier:
    """A shelf per layer group, in a folder that belongs to one manager at a time; `close` ends it."""

    def __init__(
        self, folder: Path, layouts: Sequence[KVLayout], nbytes: int, lead: int, events: KVEventLog | None
    ) -> None:
        """folder: must be another one for every model, since digests name tokens, not weights. lead: the group by
        which events go. Raises ConfigError when the folder cannot be used or not even one block fits."""
        row_nbytes = sum(layout.slot_nbytes + HEADER_NBYTES for layout in layouts)
        if nbytes < row_nbytes:
            raise ConfigError(
                f"kv_cache.disk_bytes is {nbytes}, but one block takes {row_nbytes} bytes: set it to 0 for no disk "
                f"tier, or to at least {row_nbytes}",
                field="kv_cache.disk_bytes",
            )
        self._lock = _lock(folder)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-disk")
        self.shelves = [
            DiskShelf(
                folder / f"group{group}-{layout.fingerprint()}.kv",
                layout.slot_nbytes,
                nbytes // row_nbytes,
                self._writer,
                events if group == lead else None,
            )
            for group, layout in enumerate(layouts)
        ]

    def counts(self) -> TierCounts:
        total, kept = (sum(getattr(shelf, name) for shelf in self.shelves) for name in ("num_slots", "kept"))
        return TierCounts("disk", total, total - kept, kept, 0)

    def close(self) -> None:
        """Ends the pending writes. What is on disk stays there."""
        self._writer.shutdown(wait=True)
        for shelf in self.shelves:
            shelf.close()
        os.close(self._lock)


def _lock(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"kv_cache.disk_dir: {error}", field="kv_cache.disk_dir") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(
            f"kv_cache.disk_dir: {folder} is in use by another worker: give each its own", field="kv_cache.disk_dir"
        ) from None
    return lock
