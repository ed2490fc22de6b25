"""Blocks in files that several workers share."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvferry.core import ConfigError
from kvferry.kvcache import ConnectorParts
from kvferry.kvcache.directory_connector import MAX_PENDING_BLOCKS, DirectoryConnector

DIGESTS = [bytes([n]) * 32 for n in range(4)]
BLOCKS = {digest: bytes([n]) * 64 for n, digest in enumerate(DIGESTS)}


def opened(folder: Path, namespace: str = "model") -> DirectoryConnector:
    return DirectoryConnector(ConnectorParts(str(folder), namespace, 64))


def saved(folder: Path) -> DirectoryConnector:
    """Open, everything written."""
    writer = opened(folder)
    writer.save(BLOCKS)
    writer.close()
    return opened(folder)


def file_of(folder: Path, digest: bytes) -> Path:
    [path] = folder.rglob(f"{digest.hex()}.kv")
    return path


def test_what_one_saved_another_loads(tmp_path: Path) -> None:
    connector = saved(tmp_path)
    assert connector.lookup(DIGESTS) == 4
    assert connector.load(DIGESTS) == list(BLOCKS.values())
    assert connector.lookup([DIGESTS[0], b"?" * 32, DIGESTS[1]]) == 1
    assert connector.load([DIGESTS[0], b"?" * 32, DIGESTS[1]]) == [BLOCKS[DIGESTS[0]]]
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".kv"}, "no draft was left behind"


def test_namespaces_do_not_see_each_other(tmp_path: Path) -> None:
    saved(tmp_path)
    assert opened(tmp_path, "other").lookup(DIGESTS) == 0


@pytest.mark.parametrize("damage", ["cut", "flipped", "swapped", "empty"])
def test_a_damaged_file_is_a_miss_and_goes(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    connector = saved(tmp_path)
    path = file_of(tmp_path, DIGESTS[1])
    record = path.read_bytes()
    flipped = record[:-1] + bytes([record[-1] ^ 1])
    swapped = file_of(tmp_path, DIGESTS[2]).read_bytes()
    path.write_bytes({"cut": record[:-1], "flipped": flipped, "swapped": swapped, "empty": b""}[damage])
    assert connector.load(DIGESTS) == [BLOCKS[DIGESTS[0]]]
    assert "damaged" in caplog.text
    assert not path.exists()
    connector.save(BLOCKS)
    connector.close()
    assert opened(tmp_path).load(DIGESTS) == list(BLOCKS.values()), "the next one to compute it mends it"


def test_a_file_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    connector = saved(tmp_path)
    before = file_of(tmp_path, DIGESTS[0]).stat().st_mtime_ns
    connector.save(BLOCKS)
    connector.close()
    assert file_of(tmp_path, DIGESTS[0]).stat().st_mtime_ns == before


def test_a_load_marks_a_file_as_used(tmp_path: Path) -> None:
    connector = saved(tmp_path)
    path = file_of(tmp_path, DIGESTS[0])
    os.utime(path, (1, 1))
    connector.load(DIGESTS[:1])
    assert path.stat().st_mtime > 1


def test_files_belong_to_their_owner_alone(tmp_path: Path) -> None:
    saved(tmp_path)
    assert file_of(tmp_path, DIGESTS[0]).stat().st_mode & 0o077 == 0


def test_what_cannot_be_written_yet_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = opened(tmp_path)
    goes_on = threading.Event()
    write = connector._write

    def slow(digest: bytes, block: bytes) -> None:
        goes_on.wait(10)
        write(digest, block)

    monkeypatch.setattr(connector, "_write", slow)
    many = {n.to_bytes(32, "big"): bytes(64) for n in range(MAX_PENDING_BLOCKS + 5)}
    connector.save(many)
    goes_on.set()
    connector.close()
    assert opened(tmp_path).lookup(list(many)) == MAX_PENDING_BLOCKS


def test_a_full_disk_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError("no space left")

    connector = opened(tmp_path)
    monkeypatch.setattr(Path, "replace", full)
    connector.save(BLOCKS)
    connector.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("address", ["", "/proc/nothing/here"])
def test_a_folder_that_cannot_be_is_refused(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DirectoryConnector(ConnectorParts(address, "model", 64))
    assert caught.value.field == "kv_cache.connector_address"
