"""DeepSeek V3 with absorbed latent attention gives the logits that transformers gives by expanding."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import DeepseekV3Config

from kvferry.core import CheckpointError, DType, GroupKind
from kvferry.models import load_model, torch_operators
from kvferry.models.deepseek import DeepseekConfig

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1000.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}

SHAPES = {
    "usual": DeepseekV3Config(**SIZES),
    "yarn-odd-vocabulary": DeepseekV3Config(**{**SIZES, "vocab_size": 307}, rope_parameters=YARN),
    "no-query-latent-biases": DeepseekV3Config(**{**SIZES, "q_lora_rank": None}, attention_bias=True),
    "halves-tied": DeepseekV3Config(**SIZES, rope_interleave=False, attention_bias=True, tie_word_embeddings=True),
    "one-group-two-shared": DeepseekV3Config(
        **{**SIZES, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
        n_shared_experts=2,
        norm_topk_prob=False,
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_transformers(name: str, checkpoint: Any, assert_logits: Any) -> None:
    assert_logits(checkpoint(SHAPES[name]))


def test_a_token_caches_one_latent_for_all_heads(checkpoint: Any) -> None:
    model = load_model(checkpoint(SHAPES["usual"]), torch_operators())
    (layout,) = model.layouts(16, DType.FLOAT32)
    assert (layout.kind, layout.layers, layout.planes) == (GroupKind.MLA, (0, 1, 2), 1)
    assert (layout.kv_heads, layout.head_dim) == (1, 24 + 8)
    assert layout.token_nbytes == 3 * 32 * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, "8 experts cannot stand in 3 equal groups"),
        ({"topk_group": 5}, "8 experts cannot stand in 4 equal groups of 2 or more, 5 of them chosen"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok .5. is above what 2 groups of 2 hold"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be a whole number of at least 1"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be a whole number of at least 0"),
    ],
)
def test_a_bad_config_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        DeepseekConfig.from_json({**SHAPES["usual"].to_dict(), **changes})
