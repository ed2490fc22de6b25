"""One tiny transformers config per family, with windows, chunks and blocks small enough to cross in a short prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Qwen3MoeConfig,
)

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BLOCK = 16
WINDOW = 20
CHUNK = 24
LENGTHS = (1, 2, 15, 16, 17, 19, 20, 21, 23, 24, 25, 32, 33, 47, 48, 49, 72, 73, 100)
"""Around a block, the window and the chunk, once and several times over."""

ALTERNATING = ["sliding_attention", "full_attention"] * 2


def _gemma3() -> Any:
    return Gemma3TextConfig(**SIZES, sliding_window=WINDOW, layer_types=ALTERNATING, query_pre_attn_scalar=20)


def _llama4() -> Any:
    sparse = {"num_local_experts": 4, "interleave_moe_layer_step": 2}
    return Llama4TextConfig(**SIZES, **sparse, attention_chunk_size=CHUNK, intermediate_size_mlp=64, floor_scale=8)


def _gpt_oss() -> Any:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False}
    rope = {**yarn, "rope_theta": 1000.0}
    return GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW, rope_parameters=rope
    )


def _deepseek() -> Any:
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"} | {"num_key_value_heads": 6}
    latent = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16}
    sparse = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
    return DeepseekV3Config(**sizes, **latent, **sparse, moe_intermediate_size=24, first_k_dense_replace=1)


def _gemma4() -> Any:
    inputs = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": SIZES["vocab_size"]}
    sharing = {"layer_types": ALTERNATING, "num_kv_shared_layers": 2, "global_head_dim": 32}
    return Gemma4TextConfig(**SIZES, **inputs, **sharing, sliding_window=WINDOW)


def _mistral() -> Any:
    return MistralConfig(**SIZES, sliding_window=WINDOW)


def _mixtral() -> Any:
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    return MixtralConfig(**sizes, num_local_experts=4, sliding_window=WINDOW)


def _qwen3_moe() -> Any:
    return Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)


def _nemotron_h() -> Any:
    kinds = ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"]
    mamba = {"mamba_num_heads": 6, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8}
    sparse = {"n_routed_experts": 4, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 20}
    return NemotronHConfig(**SIZES, **mamba, **sparse, layers_block_type=kinds)


FAMILIES: dict[str, Callable[[], Any]] = {
    "mistral": _mistral,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "llama4": _llama4,
    "gpt_oss": _gpt_oss,
    "deepseek": _deepseek,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "nemotron_h": _nemotron_h,
}

NEEDS_V2 = frozenset({"gemma4"})
"""Families that manager V1 cannot serve."""

WITHOUT_REUSE = frozenset({("nemotron_h", "V1")})
"""Families that cannot reuse prefixes on a manager: V1 keeps one state per request."""

OPT_IN_REUSE = frozenset({"nemotron_h"})
"""Families that reuse no prefixes unless they are told to."""

DISAGGREGATED = {
    "V2": ("mistral", "gemma3", "gemma4", "llama4", "gpt_oss", "deepseek", "mixtral", "qwen3_moe", "nemotron_h"),
    "V1": ("gemma3", "llama4", "gpt_oss", "deepseek", "nemotron_h"),
}
"""Per manager, which go through two processes: on V1 at least one of each kind of cache, since a cluster takes its time
to start."""
