"""Every shape that the Llama implementation covers gives the logits that transformers gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from kvferry.core import CheckpointError, DType, GroupKind
from kvferry.models.llama import LlamaConfig as OurConfig
from kvferry.resolution import read_config

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1000.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 64,
    "rope_theta": 1000.0,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}

SHAPES = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-wide-heads": LlamaConfig(**SIZES, head_dim=20),
    "llama-3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama-linear": LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    "llama-yarn": LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama-longrope": LlamaConfig(**SIZES, rope_parameters=LONGROPE),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": MistralConfig(**SIZES, sliding_window=9),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-windows": Qwen2Config(**SIZES, **WINDOWED),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_transformers(name: str, checkpoint: Any, our_logits: Any, reference: Any) -> None:
    model_dir = checkpoint(SHAPES[name])
    token_ids = torch.randint(0, 211, (100,), generator=torch.Generator().manual_seed(7)).tolist()
    expected = reference.logits(reference.load(model_dir), token_ids)
    actual = our_logits(model_dir, token_ids)
    assert expected.std() > 0.1, "a flat reference would prove nothing"
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * max(1.0, float(expected.abs().max())))


def test_windows_make_their_own_layer_groups(checkpoint: Any) -> None:
    from kvferry.models import load_model, torch_operators

    model = load_model(checkpoint(SHAPES["qwen2-windows"]), torch_operators())
    full, window = model.layouts(16, DType.BFLOAT16)
    assert (full.kind, full.layers, full.window) == (GroupKind.FULL, (0,), None)
    assert (window.kind, window.layers, window.window) == (GroupKind.WINDOW, (1, 2), 8)
    assert (full.kv_heads, full.head_dim, full.dtype) == (2, 8, DType.BFLOAT16)
    assert model.limits.vocab_size == 211
    assert model.limits.max_context_tokens == 256


def _config(**changes: Any) -> dict[str, Any]:
    config = {key: value for key, value in SHAPES["llama"].to_dict().items() if value is not None}
    return config | {"architectures": ["LlamaForCausalLM"]} | changes


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"])
def test_a_missing_size_is_named(key: str) -> None:
    config = _config()
    del config[key]
    with pytest.raises(CheckpointError, match=f"lacks {key}") as caught:
        OurConfig.from_json(config)
    assert caught.value.field == key


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads .5. is no multiple of num_key_value_heads .2."),
        ({"hidden_size": "big"}, "hidden_size must be a whole number of at least 1, got 'big'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1, got 0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; known: silu"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is no Llama shape"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral' is not known"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "short_factor must be a list of 4 numbers"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling lacks low_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -1}}, "rope_scaling.factor must be a number above 0"),
        ({"sliding_window": 4, "layer_types": ["full_attention"]}, "bad layer_types for 3 layers"),
    ],
)
def test_a_bad_config_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        OurConfig.from_json(_config(**changes))


def test_smollm2_config(smollm2_dir: Any) -> None:
    config = OurConfig.from_json(read_config(smollm2_dir))
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.max_context_tokens, config.tied) == (49152, 8192, True)
    assert config.norm_eps == 1e-5
