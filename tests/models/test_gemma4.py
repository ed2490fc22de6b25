"""Gemma4's text backbone gives the logits that transformers gives: sharing, sizes per kind of layer, experts."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Gemma4Config, Gemma4TextConfig

from kvferry.core import CheckpointError, DType, GroupKind
from kvferry.models import load_model, torch_operators
from kvferry.models.attention import HeadShape
from kvferry.models.gemma4_config import Gemma4Config as OurConfig

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "vocab_size_per_layer_input": 211,
    "hidden_size": 48,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "max_position_embeddings": 256,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}

SHAPES = {
    "plain": Gemma4TextConfig(**SIZES),
    "shared-double-wide": Gemma4TextConfig(
        **SIZES, num_kv_shared_layers=2, use_double_wide_mlp=True, rope_parameters=ROPES
    ),
    "keys-are-values": Gemma4TextConfig(
        **{**SIZES, "vocab_size": 307, "vocab_size_per_layer_input": 307},
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "experts-soft-capped": Gemma4TextConfig(
        **{**SIZES, "hidden_size_per_layer_input": 0, "num_key_value_heads": 6}, **EXPERTS, final_logit_softcapping=3.0
    ),
    "usual-pattern": Gemma4TextConfig(**{**SIZES, "num_hidden_layers": 8, "layer_types": None}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_transformers(name: str, checkpoint: Any, assert_logits: Any) -> None:
    assert_logits(checkpoint(SHAPES[name]))


def test_the_text_part_of_a_wrapper(checkpoint: Any, assert_logits: Any) -> None:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 8,
    }
    config = Gemma4Config(text_config=SHAPES["shared-double-wide"], vision_config=vision, audio_config=None)
    assert_logits(checkpoint(config, "AutoModelForImageTextToText"))


def test_groups_differ_in_head_size_and_sharing_layers_hold_nothing(checkpoint: Any) -> None:
    model = load_model(checkpoint(SHAPES["shared-double-wide"]), torch_operators())
    window, full = model.layouts(16, DType.FLOAT32)
    assert (window.kind, window.layers, window.window, window.head_dim) == (GroupKind.WINDOW, (0,), 9, 16)
    assert (full.kind, full.layers, full.window, full.head_dim) == (GroupKind.FULL, (1,), None, 32)


def test_an_older_config_says_it_for_all_full_layers_at_once() -> None:
    older = {**SIZES, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    config = OurConfig.from_json(older)
    assert config.heads == (HeadShape(6, 2, 16), HeadShape(6, 1, 32)) * 2
    assert OurConfig.from_json({**older, "attention_k_eq_v": False}).heads[1] == HeadShape(6, 2, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers leaves 1 of 4 layers"),
        ({"num_kv_shared_layers": 9}, "num_kv_shared_layers leaves 0 of 4 layers"),
        ({"use_bidirectional_attention": "all"}, "only causal models"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "full_attention layers have heads of sizes .16, 32."),
        ({"per_layer_config": {"1": {"num_key_value_heads": 4}}}, "layer 1 has 4 KV heads for 6 heads"),
        ({"enable_moe_block": True}, "lacks num_experts"),
    ],
)
def test_a_bad_config_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        OurConfig.from_json({**SIZES, **changes})
