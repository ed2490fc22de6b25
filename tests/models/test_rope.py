"""Frequencies of every scaling kind, and the rotation, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvferry.core import CheckpointError
from kvferry.models.rope import rope_from_config, rotate

BASE = {"rope_theta": 10000.0}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", **BASE},
    "linear": {"rope_type": "linear", "factor": 3.0, **BASE},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, **BASE},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
        **BASE,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * pair for pair in range(16)],
        "long_factor": [2.0 + 0.3 * pair for pair in range(16)],
        "original_max_position_embeddings": 512,
        **BASE,
    },
    "longrope-short": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * pair for pair in range(16)],
        "long_factor": [2.0 + 0.3 * pair for pair in range(16)],
        "original_max_position_embeddings": 2048,
        "factor": 3.0,
        **BASE,
    },
    "longrope-sharpened": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 16,
        "long_factor": [4.0] * 16,
        "original_max_position_embeddings": 1024,
        "attention_factor": 1.3,
        **BASE,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, **BASE},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        **BASE,
    },
    "yarn-untruncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "truncate": False,
        "attention_factor": 1.25,
        **BASE,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_rotation_equals_transformers(kind: str) -> None:
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=2048, rope_parameters=KINDS[kind]
    )
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 40, 2, 32, generator=generator)
    positions = torch.arange(1000, 1040)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions.unsqueeze(0))
    expected_q, expected_k = apply_rotary_pos_emb(
        q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), cos, sin
    )
    expected = torch.einsum("hqd,hkd->hqk", expected_q[0], expected_k[0])

    rope = rope_from_config(config.to_dict(), 32)
    turn = rope.table(2048, torch.device("cpu"))[positions].unsqueeze(1)
    turned_q, turned_k = (rotate(_reordered(rope, x), turn) for x in (q, k))
    actual = torch.einsum("qhd,khd->hqk", turned_q, turned_k)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def _reordered(rope: Any, x: torch.Tensor) -> torch.Tensor:
    """What the interleaved rows of W would have produced for x: [tokens, heads, head_dim]."""
    rows = x.permute(1, 2, 0).reshape(-1, x.shape[0])
    return rope.interleave(rows).view(x.shape[1], x.shape[2], -1).permute(2, 0, 1).contiguous()


def test_the_context_decides_between_long_and_short_factors() -> None:
    """Not a request's length: keys in the cache are shared among requests of all lengths."""
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    long = {"max_position_embeddings": 64, "original_max_position_embeddings": 32, "rope_scaling": scaling}
    assert rope_from_config(long, 8).inv_freq[0] == 0.5
    assert rope_from_config({**long, "max_position_embeddings": 32}, 8).inv_freq[0] == 1.0
    with pytest.raises(CheckpointError, match=r"long_factor must be a list of 4 numbers, got \[2.0\]") as caught:
        rope_from_config({**long, "rope_scaling": {**scaling, "long_factor": [2.0]}}, 8)
    assert caught.value.field == "rope_scaling.long_factor"


def test_interleave_puts_pairs_side_by_side_per_head() -> None:
    rope = rope_from_config({}, 4)
    assert rope.interleave(torch.arange(8)).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_partial_rotation_leaves_the_rest_alone() -> None:
    rope = rope_from_config({"partial_rotary_factor": 0.5}, 8)
    x = torch.randn(5, 1, 8, generator=torch.Generator().manual_seed(0))
    turn = rope.table(5, torch.device("cpu")).unsqueeze(1)
    turned = rotate(x, turn)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert not torch.allclose(turned[1:, :, :4], x[1:, :, :4])


def test_the_older_spelling_of_scaling_is_read() -> None:
    newer = rope_from_config({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}, 8)
    older = rope_from_config({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 500.0}, 8)
    assert torch.equal(newer.inv_freq, older.inv_freq)
    assert newer.inv_freq[0] == 0.5
