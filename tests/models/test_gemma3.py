"""Gemma3's text backbone gives the logits that transformers gives, alone and inside its wrapper."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Gemma3Config, Gemma3TextConfig

from kvferry.core import CheckpointError, DType, GroupKind
from kvferry.models import load_model, torch_operators
from kvferry.models.gemma3 import Gemma3Config as OurConfig

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 9,
    "query_pre_attn_scalar": 20,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}

SHAPES = {
    "alternating": Gemma3TextConfig(**SIZES, layer_types=ALTERNATING, rope_parameters=ROPES),
    "one-kv-head-untied": Gemma3TextConfig(
        **{**SIZES, "num_key_value_heads": 1, "vocab_size": 307}, layer_types=ALTERNATING, tie_word_embeddings=False
    ),
    "soft-capped": Gemma3TextConfig(**SIZES, layer_types=ALTERNATING, final_logit_softcapping=3.0),
    "biases-by-pattern": Gemma3TextConfig(
        **{**SIZES, "num_key_value_heads": 6}, attention_bias=True, sliding_window_pattern=3
    ),
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
        "image_size": 28,
        "patch_size": 14,
    }
    text = Gemma3TextConfig(**SIZES, layer_types=ALTERNATING)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    assert_logits(checkpoint(config, "AutoModelForImageTextToText"))


def test_sliding_and_full_layers_are_two_groups(checkpoint: Any) -> None:
    model = load_model(checkpoint(SHAPES["alternating"]), torch_operators())
    window, full = model.layouts(16, DType.FLOAT32)
    assert (window.kind, window.layers, window.window) == (GroupKind.WINDOW, (0, 2), 9)
    assert (full.kind, full.layers, full.window) == (GroupKind.FULL, (1, 3), None)


def test_an_older_config_names_its_ropes_apart() -> None:
    sizes = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "head_dim")}
    config = OurConfig.from_json(
        {
            **sizes,
            "rope_theta": 5000.0,
            "rope_local_base_freq": 300.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "sliding_window_pattern": 2,
        }
    )
    assert config.kinds == tuple(ALTERNATING)
    newer = OurConfig.from_json(SHAPES["alternating"].to_dict())
    for old, new in zip(config.ropes, newer.ropes, strict=True):
        assert old.inv_freq.tolist() == new.inv_freq.tolist()


def test_a_wrapper_may_leave_out_what_is_usual() -> None:
    config = OurConfig.from_json({"text_config": {"hidden_size": 64, "num_hidden_layers": 6}})
    assert (config.shape.vocab_size, config.shape.heads, config.shape.head_dim) == (262_208, 8, 256)
    assert config.kinds == ("sliding_attention",) * 5 + ("full_attention",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0: soft caps on attention scores are not"),
        ({"use_bidirectional_attention": True}, "only causal models"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu'; known: silu"),
        ({"layer_types": ["sideways"] * 4}, "bad layer_types for 4 layers"),
        ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar must be a number above 0"),
        ({"final_logit_softcapping": -1}, "final_logit_softcapping must be a number above 0"),
        ({"num_key_value_heads": 4}, "num_attention_heads .6. is no multiple of num_key_value_heads .4."),
    ],
)
def test_a_bad_config_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        OurConfig.from_json({**SHAPES["alternating"].to_dict(), **changes})
