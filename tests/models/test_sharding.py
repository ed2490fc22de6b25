"""A model in parts computes what the whole one computes, and each rank reads and holds its share alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from safetensors import safe_open
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from kvferry.core import CheckpointError, ConfigError, DType
from kvferry.models import Shard, inspect_model, load_model, torch_operators
from kvferry.models.sharding import ShardedWeights, shard_config
from kvferry.models.weights import CheckpointWeights

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

SHAPES = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-two-kv-heads": LlamaConfig(**{**SIZES, "num_key_value_heads": 2}),
    "mistral-window": MistralConfig(**SIZES, sliding_window=9),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}
CASES = [(name, *sizes) for name in SHAPES for sizes in ((2, 1), (1, 2), (1, 3), (2, 2))]
CASES += [("llama", 3, 1), ("llama-tied", 3, 2), ("llama-two-kv-heads", 4, 1), ("llama-two-kv-heads", 4, 2)]
"""Four ranks that share two kv heads hold copies of them."""


def _assert_equals(parts: list[torch.Tensor], expected: torch.Tensor) -> None:
    assert expected.std() > 0.1, "a flat reference would prove nothing"
    for part in parts:
        torch.testing.assert_close(part, expected, rtol=0, atol=1e-4 * max(1.0, float(expected.abs().max())))
        assert torch.equal(part, parts[0]), "ranks of one stage must agree to the last bit"


@pytest.mark.parametrize(("name", "tp_size", "pp_size"), CASES)
def test_logits_equal_transformers(
    name: str, tp_size: int, pp_size: int, checkpoint: Any, sharded_logits: Any, reference: Any
) -> None:
    model_dir = checkpoint(SHAPES[name])
    token_ids = torch.randint(0, 211, (60,), generator=torch.Generator().manual_seed(7)).tolist()
    expected = reference.logits(reference.load(model_dir), token_ids)
    _assert_equals(sharded_logits(model_dir, token_ids, tp_size, pp_size), expected)


@pytest.mark.parametrize("name", ["gemma3", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2), (2, 2)])
def test_the_other_families_that_can_be_divided(
    name: str, tp_size: int, pp_size: int, checkpoint: Any, sharded_logits: Any, reference: Any
) -> None:
    model_dir = checkpoint(FAMILIES[name]())
    token_ids = [3 + (7 * i + i * i % 13) % 200 for i in range(60)]
    expected = reference.logits(reference.load(model_dir), token_ids)
    _assert_equals(sharded_logits(model_dir, token_ids, tp_size, pp_size), expected)


def test_every_rank_reads_its_share_alone(checkpoint: Any) -> None:
    """All layers once, the small norms and the embedding of the first stage on each of its ranks."""
    model_dir = checkpoint(LlamaConfig(**SIZES))
    config = {**LlamaConfig(**SIZES).to_dict(), "architectures": ["LlamaForCausalLM"]}
    config = {key: value for key, value in config.items() if value is not None}
    layer = {
        "self_attn.q_proj": ((24, 48), 0),
        "self_attn.k_proj": ((12, 48), 0),
        "self_attn.o_proj": ((48, 24), 1),
        "mlp.gate_proj": ((48, 48), 0),
        "mlp.down_proj": ((48, 48), 1),
    }
    with safe_open(model_dir / "model.safetensors", framework="pt") as stored:
        for tp_rank in range(2):
            shard = Shard(tp_rank, 2)
            with CheckpointWeights(model_dir, torch.float32, torch.device("cpu")) as whole:
                weights = ShardedWeights(whole, config, shard)
                for name, (shape, axis) in layer.items():
                    full = f"model.layers.1.{name}.weight"
                    part = weights.get(full, shape)
                    assert torch.equal(part, stored.get_tensor(full).chunk(2, axis)[tp_rank])
                    assert part.untyped_storage().nbytes() == part.numel() * 4, "a view would hold the whole tensor"


def test_stages_take_layers_in_order_and_the_first_ones_more() -> None:
    assert [list(Shard(0, 1, stage, 3).layers(8)) for stage in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [Shard.of_rank(rank, 2, 2) for rank in range(4)] == [
        Shard(0, 2, 0, 2),
        Shard(1, 2, 0, 2),
        Shard(0, 2, 1, 2),
        Shard(1, 2, 1, 2),
    ]
    assert [Shard.of_rank(rank, 2, 2).rank for rank in range(4)] == [0, 1, 2, 3]
    assert [list(Shard(rank, 3).rows(7)) for rank in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]


def test_a_part_declares_its_own_layers_and_heads(checkpoint: Any) -> None:
    model_dir = checkpoint(Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1))
    for shard, expected in (
        (Shard(1, 2, 0, 1), [((0,), 3, None), ((1, 2), 3, 8)]),
        (Shard(0, 1, 0, 2), [((0,), 6, None), ((1,), 6, 8)]),
        (Shard(0, 1, 1, 2), [((2,), 6, 8)]),
    ):
        for model in (load_model(model_dir, torch_operators(), shard=shard), inspect_model(model_dir, shard)):
            layouts = model.layouts(16, DType.FLOAT32)
            assert [(layout.layers, layout.kv_heads, layout.window) for layout in layouts] == expected


@pytest.mark.parametrize(
    ("changes", "sizes", "message", "field"),
    [
        ({}, (5, 1), "tensor_parallel is 5, which does not divide num_attention_heads .12.", "engine.tensor_parallel"),
        ({}, (4, 1), "tensor_parallel is 4: it must divide num_key_value_heads of this model .6.", None),
        ({"intermediate_size": 99}, (2, 1), "does not divide intermediate_size .99.", "engine.tensor_parallel"),
        ({}, (1, 4), "pipeline_parallel is 4, but the model has 3 layers", "engine.pipeline_parallel"),
        ({}, (0, 1), "tensor_parallel must be at least 1, got 0", "engine.tensor_parallel"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(
    changes: dict[str, Any], sizes: tuple[int, int], message: str, field: str | None, checkpoint: Any
) -> None:
    model_dir = checkpoint(LlamaConfig(**{**SIZES, **changes}))
    with pytest.raises(ConfigError, match=message) as caught:
        inspect_model(model_dir, Shard(0, sizes[0], 0, sizes[1]))
    assert field is None or caught.value.field == field


@pytest.mark.parametrize(
    ("shard", "field"), [(Shard(0, 2), "engine.tensor_parallel"), (Shard(0, 1, 0, 2), "engine.pipeline_parallel")]
)
@pytest.mark.parametrize("name", ["gemma4", "llama4", "gpt_oss", "deepseek"])
def test_families_that_cannot_be_divided_say_so(name: str, shard: Shard, field: str, checkpoint: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be divided among ranks") as caught:
        inspect_model(checkpoint(FAMILIES[name]()), shard)
    assert caught.value.field == field


def test_a_misshapen_tensor_is_named_with_the_shape_of_the_whole(checkpoint: Any, tmp_path: Path) -> None:
    model_dir = checkpoint(LlamaConfig(**SIZES))
    config = {**LlamaConfig(**{**SIZES, "intermediate_size": 64}).to_dict(), "architectures": ["LlamaForCausalLM"]}
    config = {key: value for key, value in config.items() if value is not None}
    assert shard_config(config, Shard(1, 2))["intermediate_size"] == 32
    with CheckpointWeights(model_dir, torch.float32, torch.device("cpu")) as whole:
        weights = ShardedWeights(whole, config, Shard(1, 2))
        with pytest.raises(CheckpointError, match=r"gate_proj.weight .* has shape \(96, 48\), .* calls for \(64, 48\)"):
            weights.get("model.layers.0.mlp.gate_proj.weight", (32, 48))
