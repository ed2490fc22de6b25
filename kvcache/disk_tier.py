"""The tier below host memory: prefixes in files, one fixed-size record per block.

A record is whole or it is a miss: its header carries a checksum over digest and bytes, checked at every read, so that a
write cut short by a crash, or a bit that flipped, is never served. Records outlive the process and are found again at
the next start. Writes happen on a thread of their own, reads on another where they were asked for ahead.
"""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import secrets
import shutil
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from kvferry.core import DIGEST_NBYTES, ConfigError, KVLayout, Tier, TierCounts
from kvferry.kvcache.events import KVEventLog
from kvferry.kvcache.free_slots import FreeSlots
from kvferry.kvcache.parked import Parked, StoredRows
from kvferry.kvcache.records import HEADER_NBYTES, Kind, seal, sealed_digest, unseal

logger = logging.getLogger(__name__)

MAX_PENDING_WRITES = 64
MAX_FETCHED = 64
"""Blocks of one layer group that are being read ahead, or wait for the engine to bring them up."""
MAX_PENDING_PARKED_NBYTES = 256 << 20


class DiskShelf:
    """One layer group's records. `writer` runs its writes in order; everything else happens on the engine thread."""

    def __init__(
        self,
        path: Path,
        slot_nbytes: int,
        num_slots: int,
        writer: ThreadPoolExecutor,
        reader: ThreadPoolExecutor,
        events: KVEventLog | None,
    ) -> None:
        """events: told what is kept and given up."""
        self.num_slots = num_slots
        self._slot_nbytes = slot_nbytes
        self._record_nbytes = HEADER_NBYTES + slot_nbytes
        self._writer = writer
        self._reader = reader
        self._fetched: OrderedDict[bytes, tuple[int, Future[bytes | None]]] = OrderedDict()  # digest -> slot, content
        self._events = events
        self._free = FreeSlots(num_slots)
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # oldest first
        self._parked: dict[bytes, int] = {}
        self._pending: dict[bytes, tuple[bytes, Future[bool]]] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, num_slots * self._record_nbytes)
        self._find_records()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._kept

    @property
    def kept(self) -> int:
        return len(self._kept)

    @property
    def parked(self) -> int:
        return len(self._parked)

    @property
    def room(self) -> int:
        """Slots that parking could have."""
        return len(self._free) + len(self._kept)

    @property
    def pending_parked_nbytes(self) -> int:
        """What is parked and waits in memory for its write."""
        self._forget_written()
        return self._slot_nbytes * len(self._pending.keys() & self._parked.keys())

    def park(self, row: torch.Tensor) -> bytes:
        """Writes a block of a suspended cache some time soon; there must be `room`. Returns what it is read by."""
        key = secrets.token_bytes(DIGEST_NBYTES)
        self._parked[key] = self._write_soon(Kind.PARKED, key, row)
        return key

    def unpark(self, key: bytes) -> None:
        self._free.put(self._parked.pop(key))
        self._pending.pop(key, None)

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
        if not self.room:
            return
        self._kept[digest] = self._write_soon(Kind.BLOCK, digest, row)
        if self._events is not None:
            self._events.copied(digest, Tier.DISK)

    def _write_soon(self, kind: Kind, digest: bytes, row: torch.Tensor) -> int:
        """The slot that will hold `row`, which may be overwritten at once."""
        if not len(self._free):
            self.forget(next(iter(self._kept)))
        (slot,) = self._free.take(1)
        payload = row.cpu().numpy().tobytes()
        self._pending[digest] = (payload, self._writer.submit(self._write, slot, kind, digest, payload))
        return slot

    def _write(self, slot: int, kind: Kind, digest: bytes, payload: bytes) -> bool:
        """Whether the record is whole."""
        try:
            written = os.pwrite(self._file, seal(digest, payload, kind), slot * self._record_nbytes)
        except OSError as error:
            logger.warning("KV block not written to disk: %s", error)
            return False
        return written == self._record_nbytes

    def _forget_written(self) -> None:
        """A block whose write failed is forgotten, so that it is written when it comes again."""
        for digest in [digest for digest, (_, written) in self._pending.items() if written.done()]:
            _, written = self._pending.pop(digest)
            if not written.result() and digest in self._kept:
                self.forget(digest)

    def read(self, digest: bytes) -> bytes | None:
        """The block's bytes, checked; None, and the record is forgotten, when they are not whole."""
        slot, fetched = self._fetched.pop(digest, (None, None))
        if fetched is not None and slot == self._kept[digest] and digest not in self._pending:
            payload = fetched.result()
        else:
            payload = self._read_record(self._kept[digest], Kind.BLOCK, digest)
        if payload is None:
            self.forget(digest)
        else:
            self._kept.move_to_end(digest)
        return payload

    def fetch(self, digest: bytes) -> bool:
        """Whether a record has been read, so that `read` need not wait. Starts that on the reader's thread, unless many
        are being read."""
        if digest in self._pending:
            return True
        slot = self._kept[digest]
        if digest in self._fetched and self._fetched[digest][0] == slot:
            return self._fetched[digest][1].done()
        while len(self._fetched) >= MAX_FETCHED:
            oldest = next(iter(self._fetched))
            if not self._fetched[oldest][1].done():
                return False
            del self._fetched[oldest]
        self._fetched[digest] = (slot, self._reader.submit(self._read_file, slot, Kind.BLOCK, digest))
        return False

    def fetch_parked(self, key: bytes) -> Future[bytes | None]:
        """As `read_parked`, on the reader's thread."""
        if key in self._pending:
            there = Future[bytes | None]()
            there.set_result(self._pending[key][0])
            return there
        return self._reader.submit(self._read_file, self._parked[key], Kind.PARKED, key)

    def read_parked(self, key: bytes) -> bytes | None:
        """The bytes of a parked block, checked; None when they are not whole."""
        return self._read_record(self._parked[key], Kind.PARKED, key)

    def _read_record(self, slot: int, kind: Kind, digest: bytes) -> bytes | None:
        if digest in self._pending:
            return self._pending[digest][0]
        return self._read_file(slot, kind, digest)

    def _read_file(self, slot: int, kind: Kind, digest: bytes) -> bytes | None:
        """From any thread: another record, or half of one, fails the check."""
        try:
            record = os.pread(self._file, self._record_nbytes, slot * self._record_nbytes)
        except OSError as error:
            logger.warning("KV block not read from disk: %s", error)
            record = b""
        return unseal(record, digest, self._slot_nbytes, kind)

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
        slots = [*self._free, *self._kept.values(), *self._parked.values()]
        assert sorted(slots) == list(range(self.num_slots))
        assert self._pending.keys() <= self._kept.keys() | self._parked.keys()


class DiskParked(Parked):
    def __init__(self, tier: DiskTier, keys: Sequence[list[bytes]], first_blocks: Sequence[int]) -> None:
        super().__init__(first_blocks)
        self._tier = tier
        self._keys = keys
        self._reads: dict[bytes, Future[bytes | None]] = {}

    def prepare(self) -> bool:
        if not self._reads:
            for shelf, keys in zip(self._tier.shelves, self._keys, strict=True):
                self._reads.update((key, shelf.fetch_parked(key)) for key in keys)
        return all(read.done() for read in self._reads.values())

    def stored(self, group: int, skip: int) -> StoredRows | None:
        keys = self._keys[group][skip:]
        payloads = [payload for payload in (self._read(group, key) for key in keys) if payload is not None]
        if len(payloads) < len(keys):
            return None
        rows = torch.frombuffer(bytearray(b"".join(payloads)), dtype=torch.uint8) if payloads else torch.empty(0)
        return StoredRows(rows.view(len(payloads), -1 if payloads else 0), range(len(payloads)))

    def _read(self, group: int, key: bytes) -> bytes | None:
        if key in self._reads:
            return self._reads[key].result()
        return self._tier.shelves[group].read_parked(key)

    def release(self) -> None:
        for read in self._reads.values():
            read.cancel()
        for shelf, keys in zip(self._tier.shelves, self._keys, strict=True):
            for key in keys:
                shelf.unpark(key)


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
        try:
            _check_room(folder, nbytes)
        except ConfigError:
            os.close(self._lock)
            raise
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-disk-write")
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-disk-read")
        self.shelves = [
            DiskShelf(
                folder / f"group{group}-{layout.fingerprint()}.kv",
                layout.slot_nbytes,
                nbytes // row_nbytes,
                self._writer,
                self._reader,
                events if group == lead else None,
            )
            for group, layout in enumerate(layouts)
        ]

    def park(
        self, tables: Sequence[Sequence[int]], first_blocks: Sequence[int], rows: Sequence[torch.Tensor]
    ) -> Parked | None:
        """As `HostTier.park`. Also None while much of what was parked before still waits to be written."""
        if any(len(table) > shelf.room for table, shelf in zip(tables, self.shelves, strict=True)):
            return None
        if sum(shelf.pending_parked_nbytes for shelf in self.shelves) > MAX_PENDING_PARKED_NBYTES:
            return None
        keys = [
            [shelf.park(pool[slot]) for slot in table]
            for shelf, table, pool in zip(self.shelves, tables, rows, strict=True)
        ]
        return DiskParked(self, keys, first_blocks)

    def counts(self) -> TierCounts:
        total, kept, parked = (
            sum(getattr(shelf, name) for shelf in self.shelves) for name in ("num_slots", "kept", "parked")
        )
        return TierCounts("disk", total, total - kept - parked, kept, parked)

    def close(self) -> None:
        """Ends the pending writes, and what is being read ahead. What is on disk stays there."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True)
        for shelf in self.shelves:
            shelf.close()
        os.close(self._lock)


def _check_room(folder: Path, nbytes: int) -> None:
    """Raises ConfigError where files of `nbytes` could never be whole. What is free now may be taken by others later,
    and what others have may be freed: writes that fail are misses."""
    setting = "kv_cache.disk_bytes"
    whole = shutil.disk_usage(folder).total
    if nbytes > whole:
        raise ConfigError(
            f"{setting} is {nbytes}, but the file system of {folder} has {whole} bytes in all: set it to less, or "
            "kv_cache.disk_dir to a larger one",
            field=setting,
        )
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most != resource.RLIM_INFINITY and nbytes > most:
        raise ConfigError(
            f"{setting} is {nbytes}, but files of this process may have {most} bytes (ulimit -f): raise that, or set "
            "the setting to less",
            field=setting,
        )


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
