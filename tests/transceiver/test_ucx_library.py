"""Finding UCX, and what is made of it when it is missing, old, or not what it seems."""

from __future__ import annotations

import subprocess
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest

from kvferry.core import ConfigError, MemRegion, TransferError
from kvferry.transceiver import ucx_library as library_module
from kvferry.transceiver.native_agent import NativeAgent
from kvferry.transceiver.ucx_library import ucx_backend, ucx_library

ROOT = Path(__file__).parents[2]


def test_the_installed_one_is_found() -> None:
    assert Path(ucx_library()).is_file()


def test_our_declarations_describe_the_same_memory_as_the_headers_of_the_installed_ucx(tmp_path: Path) -> None:
    include = Path(ucx_library()).parents[1] / "include"
    source = ROOT / "tests" / "transceiver" / "native" / "ucp_layout.cpp"
    flags = ["-std=c++20", "-Wno-invalid-offsetof", f"-I{include}", f"-I{ROOT / 'transceiver' / 'native'}"]
    done = subprocess.run(
        ["c++", *flags, "-c", str(source), "-o", str(tmp_path / "layout.o")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_missing_library_gives_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="libucx is not installed: pip install libucx-cu12") as caught:
        ucx_library()
    assert caught.value.field == "transceiver.backend"


def test_an_installation_without_the_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = ModuleSpec("libucx", None, is_package=True)
    found.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(library_module, "find_spec", lambda name: found)
    with pytest.raises(ConfigError, match=r"comes without lib/libucp\.so\.0: pip install"):
        ucx_library()


def test_a_library_that_is_not_ucx_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    impostor = tmp_path / "libucp.so.0"
    impostor.write_bytes(b"not a library")
    monkeypatch.setattr(library_module, "ucx_library", lambda: str(impostor))
    with pytest.raises(ConfigError, match="UCX cannot be loaded"):
        ucx_backend("worker")
    monkeypatch.setattr(library_module, "ucx_library", lambda: "libc.so.6")
    with pytest.raises(ConfigError, match="the installed UCX lacks ucp_get_version: pip install libucx-cu12"):
        ucx_backend("worker")


@pytest.mark.parametrize("version", [(1, 14), (2, 0)])
def test_a_version_we_have_no_declarations_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: tuple[int, int]
) -> None:
    source, other = tmp_path / "other.c", tmp_path / "libucp.so.0"
    numbers = f"*major = {version[0]}; *minor = {version[1]}; *release = 0;"
    source.write_text(f"void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release) {{ {numbers} }}")
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(other)], check=True)
    monkeypatch.setattr(library_module, "ucx_library", lambda: str(other))
    with pytest.raises(ConfigError, match=rf"UCX {version[0]}\.{version[1]} is installed, but 1\.15 or a later 1\.x"):
        ucx_backend("worker")


def test_metadata_that_was_cut_or_changed_is_refused() -> None:
    """UCX itself trusts an address; a wrong one would end the process."""
    near, far = NativeAgent(ucx_backend("near")), NativeAgent(ucx_backend("far"))
    memory = np.zeros(4096, dtype=np.uint8)
    far.register(MemRegion(memory.ctypes.data, memory.nbytes))
    whole = far.metadata()
    near.load_peer("far", whole)
    damaged = [whole[:length] for length in range(0, len(whole), 7)] + [whole + b"x"]
    damaged += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 5)]
    for data in damaged:
        with pytest.raises(TransferError):
            near.load_peer("far", data)
    near.close()
    far.close()
