"""What this machine could do at best: reading memory, and multiplying in fp32.

Each is the best of many tries: a bound is what nothing can pass. `measure_bounds` measures in a process of its own, on
the cores and threads of the run it belongs to.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kvferry.bench.child import JSONChild
from kvferry.engine.linear import PRECISIONS
from kvferry.engine.weight_memory import WeightMemory

READ_NBYTES = 512 << 20
MATRIX = 1024
TRIES_S = 1.5
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Bounds:
    read_gbytes_per_s: float
    fp32_gflops: float


@dataclass(frozen=True, slots=True)
class ModelSize:
    """weights: read by every step (a tied embedding once). multiplied: those of them that a prompt's tokens are
    multiplied with, all but the output head. kv_nbytes_per_token: in fp32, all layers."""

    weights: int
    multiplied: int
    kv_nbytes_per_token: int

    @classmethod
    def of(cls, config: Mapping[str, object]) -> ModelSize:
        """Of a dense Llama's config.json."""
        hidden, layers, intermediate, vocabulary, heads = (
            _number(config, key)
            for key in ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "num_attention_heads")
        )
        kv_heads = _number(config, "num_key_value_heads")
        head_dim = config.get("head_dim") or hidden // heads
        assert isinstance(head_dim, int)
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        multiplied = layers * (attention + 3 * hidden * intermediate)
        return cls(multiplied + vocabulary * hidden, multiplied, layers * 2 * kv_heads * head_dim * 4)


def _number(config: Mapping[str, object], key: str) -> int:
    value = config[key]
    assert isinstance(value, int), f"{key} is {value!r}"
    return value


def prefill_bound_s(size: ModelSize, bounds: Bounds, tokens: int) -> float:
    """Multiplications alone, in fp32: attention, the output head and all memory traffic come for free."""
    return 2.0 * size.multiplied * tokens / (bounds.fp32_gflops * 1e9)


def decode_bound_s(size: ModelSize, bounds: Bounds, batch: int, context: int, precision: str) -> float:
    """Every weight is read once, and every sequence's cache; in fp32 the multiplications may take longer than that."""
    nbytes = size.weights * PRECISIONS.get(precision).nbytes_per_weight + batch * context * size.kv_nbytes_per_token
    reading = nbytes / (bounds.read_gbytes_per_s * 1e9)
    if precision != "fp32":
        return reading
    return max(reading, 2.0 * size.weights * batch / (bounds.fp32_gflops * 1e9))


def measure_bounds(threads: int, cores: Collection[int], log: Path) -> Bounds:
    """A few seconds. Raises ChildFailedError."""
    command = [sys.executable, "-P", "-m", "kvferry.bench.bounds", str(threads)]
    with JSONChild("bounds", command, {}, cores, log) as child:
        return Bounds(**child.hear(_PATIENCE_S))


def best(first: Bounds, second: Bounds) -> Bounds:
    return Bounds(max(first.read_gbytes_per_s, second.read_gbytes_per_s), max(first.fp32_gflops, second.fp32_gflops))


def bandwidth(device: torch.device) -> float:
    """Bytes per second of reading memory far larger than any cache, in huge pages on the CPU, as weights have."""
    if device.type == "cpu":
        memory = WeightMemory().take(READ_NBYTES)
    else:
        memory = torch.empty(READ_NBYTES, dtype=torch.uint8, device=device)
    return READ_NBYTES / _fastest(memory.view(torch.float32).zero_().sum, device)


def arithmetic(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a square matrix product."""
    matrix = torch.ones(MATRIX, MATRIX, device=device, dtype=dtype)
    return 2 * MATRIX**3 / _fastest(lambda: matrix @ matrix, device)


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fastest(action: Callable[[], object], device: torch.device) -> float:
    times: list[float] = []
    until = time.perf_counter() + TRIES_S
    while not times or time.perf_counter() < until:
        wait(device)
        started = time.perf_counter()
        action()
        wait(device)
        times.append(time.perf_counter() - started)
    return min(times)


def _measure(threads: int) -> Bounds:
    torch.set_num_threads(threads)
    cpu = torch.device("cpu")
    return Bounds(bandwidth(cpu) / 1e9, arithmetic(cpu, torch.float32) / 1e9)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kvferry.bench.bounds", description=__doc__)
    parser.add_argument("threads", type=int)
    print(json.dumps(asdict(_measure(parser.parse_args(arguments).threads))))


if __name__ == "__main__":
    main()
