"""Llama4's text backbone gives the logits that transformers gives."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Llama4Config, Llama4TextConfig

from kvferry.core import CheckpointError, DType, GroupKind
from kvferry.models import load_model, torch_operators
from kvferry.models.llama4 import Llama4Config as OurConfig

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 40,
    "intermediate_size_mlp": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "attention_chunk_size": 24,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "floor_scale": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

SHAPES = {
    "scout": Llama4TextConfig(**{**SIZES, "interleave_moe_layer_step": 1}),
    "maverick": Llama4TextConfig(**SIZES, use_qk_norm=False, no_rope_layer_interval=2),
    "two-experts-untuned": Llama4TextConfig(
        **{**SIZES, "num_key_value_heads": 6, "vocab_size": 307}, num_experts_per_tok=2, attn_temperature_tuning=False
    ),
    "never-chunked-tied": Llama4TextConfig(**{**SIZES, "attention_chunk_size": None}, tie_word_embeddings=True),
    "listed": Llama4TextConfig(**SIZES, moe_layers=[0], no_rope_layers=[0, 1, 0, 1], attention_bias=True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_transformers(name: str, checkpoint: Any, assert_logits: Any) -> None:
    assert_logits(checkpoint(SHAPES[name]))


def test_the_text_part_of_a_wrapper(checkpoint: Any, assert_logits: Any) -> None:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
        "vision_output_dim": 16,
    }
    config = Llama4Config(text_config=SHAPES["maverick"], vision_config=vision)
    assert_logits(checkpoint(config, "AutoModelForImageTextToText"))


def test_chunked_and_full_layers_are_two_groups(checkpoint: Any) -> None:
    model = load_model(checkpoint(SHAPES["scout"]), torch_operators())
    chunked, full = model.layouts(16, DType.FLOAT32)
    assert (chunked.kind, chunked.layers, chunked.window) == (GroupKind.CHUNKED, (0, 1, 2), 24)
    assert (full.kind, full.layers, full.window) == (GroupKind.FULL, (3,), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers lists 2 of 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "bad layer_types for 4 layers .known: chunked_attention"),
        ({"attention_chunk_size": 0}, "attention_chunk_size must be a whole number of at least 1"),
        ({"floor_scale": 0}, "floor_scale must be a number above 0"),
        ({"num_local_experts": "many"}, "num_local_experts must be a whole number"),
    ],
)
def test_a_bad_config_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        OurConfig.from_json({**SHAPES["scout"].to_dict(), **changes})
