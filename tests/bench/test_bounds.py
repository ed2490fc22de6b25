"""The bounds: what of a model has to be read and multiplied, and how long this machine needs for it at least."""

from __future__ import annotations

import json

import pytest
import torch

from kvferry.bench import bounds
from kvferry.bench.bounds import Bounds, ModelSize, best, decode_bound_s, prefill_bound_s

# SmolLM2-135M's config.json
SMOLLM2 = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
MACHINE = Bounds(read_gbytes_per_s=10.0, fp32_gflops=100.0)


def test_the_size_of_a_model() -> None:
    size = ModelSize.of(dict(SMOLLM2))
    assert size.weights == 134_479_872  # 134,515,008 parameters less 61 norms of 576
    assert size.weights - size.multiplied == 49152 * 576
    assert size.kv_nbytes_per_token == 30 * 2 * 3 * 64 * 4
    assert ModelSize.of({**SMOLLM2, "head_dim": 128}).kv_nbytes_per_token == 2 * size.kv_nbytes_per_token


def test_decode_reads_every_weight_once_and_every_cache() -> None:
    size = ModelSize(weights=1_000_000_000, multiplied=900_000_000, kv_nbytes_per_token=10_000)
    assert decode_bound_s(size, MACHINE, 1, 1000, "fp32") == pytest.approx(0.401)
    assert decode_bound_s(size, MACHINE, 16, 1000, "fp32") == pytest.approx(0.416)
    assert decode_bound_s(size, MACHINE, 32, 0, "fp32") == pytest.approx(0.64)  # 64 GFLOP take longer than 4 GB
    assert decode_bound_s(size, MACHINE, 32, 0, "int8") == pytest.approx(0.10625)  # 34 bytes for 32 weights


def test_prefill_multiplies_every_token_with_every_weight_but_the_heads() -> None:
    size = ModelSize(weights=1_000_000_000, multiplied=900_000_000, kv_nbytes_per_token=10_000)
    assert prefill_bound_s(size, MACHINE, 100) == pytest.approx(1.8)


def test_the_best_of_two_measurements() -> None:
    assert best(MACHINE, Bounds(8.0, 120.0)) == Bounds(10.0, 120.0)


def test_measuring_prints_one_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bounds, "READ_NBYTES", 4 << 20)
    monkeypatch.setattr(bounds, "TRIES_S", 0.05)
    before = torch.get_num_threads()
    try:
        bounds.main(["1"])
    finally:
        torch.set_num_threads(before)
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {"read_gbytes_per_s", "fp32_gflops"}
    assert all(value > 0 for value in printed.values())
