"""Mixtral and Qwen3-MoE give the logits that transformers gives."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import MixtralConfig, Qwen3MoeConfig

from kvferry.core import CheckpointError, DType, GroupKind
from kvferry.models import load_model, torch_operators
from kvferry.models.sparse_llama import SparseLlamaConfig

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN: dict[str, Any] = {**SIZES, "num_experts": 5, "moe_intermediate_size": 24, "head_dim": 16}

SHAPES = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5),
    "mixtral-window-tied": MixtralConfig(
        **{**SIZES, "vocab_size": 307}, num_local_experts=4, sliding_window=9, tie_word_embeddings=True
    ),
    "qwen3-moe": Qwen3MoeConfig(**QWEN),
    "qwen3-moe-partly-dense": Qwen3MoeConfig(
        **{**QWEN, "num_key_value_heads": 1}, mlp_only_layers=[1], norm_topk_prob=True, attention_bias=True
    ),
    "qwen3-moe-every-second": Qwen3MoeConfig(**{**QWEN, "num_experts_per_tok": 1}, decoder_sparse_step=2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_transformers(name: str, checkpoint: Any, assert_logits: Any) -> None:
    assert_logits(checkpoint(SHAPES[name]))


def test_a_window_holds_for_every_layer(checkpoint: Any) -> None:
    model = load_model(checkpoint(SHAPES["mixtral-window-tied"]), torch_operators())
    (layout,) = model.layouts(16, DType.FLOAT32)
    assert (layout.kind, layout.layers, layout.window) == (GroupKind.WINDOW, (0, 1, 2), 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is no Llama shape with experts"),
        ({"num_local_experts": 0}, "num_local_experts must be a whole number of at least 1"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; known: silu"),
    ],
)
def test_a_bad_config_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    config = {**SHAPES["mixtral"].to_dict(), "architectures": ["MixtralForCausalLM"], **changes}
    with pytest.raises(CheckpointError, match=message):
        SparseLlamaConfig.from_json(config)
