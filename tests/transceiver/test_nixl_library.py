"""Finding NIXL's C library: a missing or unknown version is named with the line that installs it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core import ConfigError
from kvferry.transceiver import nixl_library
from kvferry.transceiver.nixl import NixlAgent
from kvferry.transceiver.nixl_library import nixl_backend, nixl_c_library


def test_the_installed_one_is_found() -> None:
    assert Path(nixl_c_library()).is_file()


def _install(monkeypatch: pytest.MonkeyPatch, version: str, files: tuple[Any, ...]) -> None:
    found = SimpleNamespace(version=version, files=files)
    monkeypatch.setattr(nixl_library, "distribution", lambda name: found)


def test_a_missing_library_gives_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(nixl_library, "distribution", missing)
    with pytest.raises(ConfigError, match="nixl-cu12 is not installed: pip install torch 'nixl-cu12") as caught:
        nixl_c_library()
    assert caught.value.field == "transceiver.backend"


@pytest.mark.parametrize("version", ["1.4.9", "1.6.0", "2.0"])
def test_a_version_we_have_no_declarations_for_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    _install(monkeypatch, version, ())
    with pytest.raises(ConfigError, match=rf"{version} is installed, but the CPP runtime was made for 1\.5"):
        nixl_c_library()


def test_an_installation_without_the_c_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "1.5.1", (PurePosixPath("nixl_cu12/_api.py"),))
    with pytest.raises(ConfigError, match=r"comes without libnixl_capi\.so"):
        nixl_c_library()


def test_a_library_that_is_not_nixl_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    impostor = tmp_path / "libnixl_capi.so"
    impostor.write_bytes(b"not a library")
    monkeypatch.setattr(nixl_library, "nixl_c_library", lambda: str(impostor))
    with pytest.raises(ConfigError, match="NIXL cannot be loaded"):
        nixl_backend("worker")
    monkeypatch.setattr(nixl_library, "nixl_c_library", lambda: "libc.so.6")
    with pytest.raises(ConfigError, match="the installed NIXL lacks nixl_capi_create_configured_agent"):
        nixl_backend("worker")


def test_an_unknown_plug_in_is_named() -> None:
    for make in (nixl_backend, NixlAgent):
        with pytest.raises(ConfigError, match="NO_SUCH_PLUGIN") as caught:
            make("worker", ("NO_SUCH_PLUGIN",))
        assert caught.value.field == "transceiver.nixl_plugin"
