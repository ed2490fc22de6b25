"""GPT-OSS gives the logits that transformers gives, from plain and from MXFP4 experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvferry.core import CheckpointError, DType, GroupKind
from kvferry.models import inspect_model, load_model, torch_operators
from kvferry.models.gpt_oss import GptOssConfig as OurConfig

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
    "rope_theta": 1000.0,
}

SHAPES = {
    "alternating": GptOssConfig(**SIZES, rope_parameters=YARN),
    "usual-rope-one-kv-head": GptOssConfig(**{**SIZES, "num_key_value_heads": 1}),
    "all-experts-tied": GptOssConfig(
        **{**SIZES, "num_experts_per_tok": 4, "vocab_size": 307, "num_key_value_heads": 6}, tie_word_embeddings=True
    ),
    "clamped-without-biases": GptOssConfig(**SIZES, attention_bias=False, swiglu_limit=0.05, swiglu_alpha=1.2),
    "full-only": GptOssConfig(**SIZES, layer_types=["full_attention"] * 4),
}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_transformers(name: str, checkpoint: Any, assert_logits: Any) -> None:
    assert_logits(checkpoint(SHAPES[name]))


def test_sliding_and_full_layers_are_two_groups(checkpoint: Any) -> None:
    model = load_model(checkpoint(SHAPES["alternating"]), torch_operators())
    window, full = model.layouts(16, DType.FLOAT32)
    assert (window.kind, window.layers, window.window) == (GroupKind.WINDOW, (0, 2), 9)
    assert (full.kind, full.layers, full.window) == (GroupKind.FULL, (1, 3), None)


def test_mxfp4_experts_are_what_transformers_makes_of_them(
    checkpoint: Any, our_logits: Any, reference: Any, tmp_path: Path
) -> None:
    """Random bytes as experts; the reference is given them as transformers dequantises them."""
    plain = checkpoint(SHAPES["alternating"])
    tensors = load_file(plain / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    packed = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = tensors[name].shape  # [experts, in, out]; packed as [experts, out, in / 32, 16]
        shape = (experts, columns, rows // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 126, shape[:-1], dtype=torch.uint8, generator=generator)
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    (quantised / "config.json").write_text((plain / "config.json").read_text())
    save_file(packed, quantised / "model.safetensors", metadata={"format": "pt"})
    assert inspect_model(quantised).limits == inspect_model(plain).limits
    token_ids = list(range(3, 90))
    expected = reference.logits(reference.load(plain), token_ids)
    tolerance = 1e-4 * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(our_logits(quantised, token_ids), expected, rtol=0, atol=tolerance)


def test_a_width_that_mxfp4_cannot_hold_is_refused() -> None:
    from kvferry.models.mxfp4 import load_mxfp4

    with pytest.raises(CheckpointError, match="48 columns are no multiple of the 32"):
        load_mxfp4(None, "experts.down_proj", 4, 64, 48)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limit": 0}, "swiglu_limit must be a number above 0"),
        ({"layer_types": ["full_attention"]}, "bad layer_types for 4 layers"),
        ({"sliding_window": "wide"}, "sliding_window must be a whole number"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be a whole number of at least 1"),
    ],
)
def test_a_bad_config_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        OurConfig.from_json({**SHAPES["alternating"].to_dict(), **changes})
