"""The connector `directory`: blocks in files of a folder that workers share, one checksummed record each."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from kvferry.core import ConfigError
from kvferry.kvcache.connector import ConnectorParts, KVConnector
from kvferry.kvcache.records import seal, unseal

logger = logging.getLogger(__name__)

MAX_PENDING_BLOCKS = 256


class DirectoryConnector(KVConnector):
    """Any number of workers may use one folder at a time: a file appears whole, by a rename, and never changes.

    Files are written by a thread of its own; blocks that come while MAX_PENDING_BLOCKS wait are not saved.
    """

    def __init__(self, parts: ConnectorParts) -> None:
        """Raises ConfigError when the folder cannot be written to."""
        self._block_nbytes = parts.block_nbytes
        self._folder = _open_folder(parts)
        self._names = itertools.count()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-directory")
        self._pending: set[Future[None]] = set()

    def lookup(self, digests: Sequence[bytes]) -> int:
        return next((n for n, digest in enumerate(digests) if not self._path(digest).exists()), len(digests))

    def load(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        blocks: list[bytes] = []
        for digest in digests:
            block = self._read(self._path(digest), digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _read(self, path: Path, digest: bytes) -> bytes | None:
        try:
            record = path.read_bytes()
            block = unseal(record, digest, self._block_nbytes)
            if block is None:
                logger.warning("%s is damaged and is removed", path)
                path.unlink()
            else:
                os.utime(path)  # whoever cleans up goes by the time of the last use
        except FileNotFoundError:  # somebody else removed it
            return None
        return block

    def save(self, blocks: Mapping[bytes, bytes]) -> None:
        self._pending = {written for written in self._pending if not written.done()}
        for digest, block in blocks.items():
            if len(self._pending) >= MAX_PENDING_BLOCKS:
                return  # what hangs on a missing block would not be found
            if not self._path(digest).exists():
                self._pending.add(self._writer.submit(self._write, digest, block))

    def _write(self, digest: bytes, block: bytes) -> None:
        path = self._path(digest)
        draft = path.with_name(f"{path.name}.{os.getpid()}.{next(self._names)}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(seal(digest, block))
            draft.replace(path)
        except OSError as error:
            logger.warning("KV block not saved: %s", error)
            draft.unlink(missing_ok=True)

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._folder / name[:2] / f"{name}.kv"

    def close(self) -> None:
        self._writer.shutdown(wait=True)


def _open_folder(parts: ConnectorParts) -> Path:
    setting = "kv_cache.connector_address"
    if not parts.address:
        raise ConfigError(f"the connector directory keeps blocks in a folder: set {setting} to one", field=setting)
    folder = Path(parts.address).expanduser() / parts.namespace
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"{setting}: {error}", field=setting) from None
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"{setting}: {folder} cannot be read and written", field=setting)
    return folder
