"""The cards: every architecture known by name. A new one is a line here, never a branch in the rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from kvferry.core import Registry
from kvferry.resolution.capabilities import PYTHON, V2
from kvferry.resolution.card import NO_PREFERENCE, UNVALIDATED, Card, Config, compose
from kvferry.resolution.errors import ResolutionError

ARCHITECTURE_FIELD = "architectures"

_INNER_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")
_MISSING = object()

LLAMA = "kvferry.models.llama:Llama"
GEMMA3 = "kvferry.models.gemma3:Gemma3"
DEEPSEEK = "kvferry.models.deepseek:Deepseek"
GEMMA4 = "kvferry.models.gemma4:Gemma4"
SPARSE_LLAMA = "kvferry.models.sparse_llama:SparseLlama"
GPT_OSS = "kvferry.models.gpt_oss:GptOss"
LLAMA4 = "kvferry.models.llama4:Llama4"
NEMOTRON_H = "kvferry.models.nemotron_h:NemotronH"


def lookup(config: Config, key: str, default: Any) -> Any:
    """`key` of a text backbone, in its own config or inside a wrapper's outer one; `default` where neither has it."""
    for section in (config, *(config.get(name) for name in _INNER_SECTIONS)):
        if isinstance(section, Mapping) and section.get(key, _MISSING) is not _MISSING:
            return section[key]
    return default


def _gemma4_manager(config: Config) -> str:
    """Sliding and full layers differ in head dim, so blocks of one size cannot hold both. Five sliding layers to one
    full layer is what this class builds when the config does not list them."""
    layer_types = lookup(config, "layer_types", None)
    if layer_types is None:
        return V2
    return V2 if len(set(layer_types)) > 1 else NO_PREFERENCE


def _indexed_manager(config: Config) -> str:
    """The index that picks the attended tokens has a cache of its own beside K and V. On unless switched off."""
    return V2 if lookup(config, "index_topk", 1) else NO_PREFERENCE


def _has_mamba_layers(config: Config) -> bool:
    layer_types = lookup(config, "layer_types", None)
    return layer_types is None or any(kind != "attention" for kind in layer_types)


def _prefers_both(name: str, model_type: str, **facts: Any) -> Card:
    example = {"model_type": model_type, **facts.pop("example", {})}
    return Card(name, prefers_runtime=PYTHON, prefers_manager=V2, example=example, **facts)


def _wrapper(name: str, model_type: str, backbone: str, inner: str = "text_config", **facts: Any) -> Card:
    """A model around a text backbone; its example is an outer config without the backbone's keys."""
    return Card(name, backbone=backbone, example={"model_type": model_type, inner: {}}, **facts)


_NEMOTRON_H: dict[str, Any] = {"prefix_reuse_opt_in": True, "recurrent_state": True}

PREFERRING = (
    _prefers_both("LlamaForCausalLM", "llama", implementation=LLAMA),
    _wrapper(
        "Llama4ForConditionalGeneration",
        "llama4",
        "Llama4ForCausalLM",
        prefers_runtime=PYTHON,
        prefers_manager=V2,
        implementation=LLAMA4,
    ),
    _prefers_both("Gemma3ForCausalLM", "gemma3_text", implementation=GEMMA3),
    _wrapper("Gemma3ForConditionalGeneration", "gemma3", "Gemma3ForCausalLM", implementation=GEMMA3),
    _prefers_both(
        "Gemma4ForCausalLM",
        "gemma4_text",
        implementation=GEMMA4,
        requires_manager=_gemma4_manager,
        example={
            "head_dim": 256,
            "global_head_dim": 512,
            "sliding_window": 512,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
    ),
    _wrapper("Gemma4ForConditionalGeneration", "gemma4", "Gemma4ForCausalLM", implementation=GEMMA4),
    _wrapper("Gemma4UnifiedForConditionalGeneration", "gemma4_unified", "Gemma4ForCausalLM"),
    _prefers_both("GptOssForCausalLM", "gpt_oss", implementation=GPT_OSS),
    _prefers_both("DeepseekV3ForCausalLM", "deepseek_v3", implementation=DEEPSEEK),
    _prefers_both(
        "DeepseekV32ForCausalLM", "deepseek_v32", requires_manager=_indexed_manager, example={"index_topk": 2048}
    ),
    _prefers_both(
        "DeepseekV4ForCausalLM", "deepseek_v4", requires_manager=_indexed_manager, example={"index_topk": 512}
    ),
    _prefers_both(
        "GlmMoeDsaForCausalLM", "glm_moe_dsa", requires_manager=_indexed_manager, example={"index_topk": 2048}
    ),
    _prefers_both("MistralLarge3ForCausalLM", "mistral"),
    _prefers_both("NemotronHForCausalLM", "nemotron_h", implementation=NEMOTRON_H, **_NEMOTRON_H),
    _prefers_both("NemotronHPuzzleForCausalLM", "nemotron_h_puzzle", **_NEMOTRON_H),
    _wrapper("NemotronH_Nano_VL_V2", "NemotronH_Nano_VL_V2", "NemotronHForCausalLM", "llm_config"),
    _wrapper(
        "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_Omni_Reasoning_V3", "NemotronHForCausalLM", "llm_config"
    ),
    _wrapper("NemotronH_Omni_Reasoning_V3", "nemotron_h_omni", "NemotronHForCausalLM", "llm_config"),
    _prefers_both("Qwen3NextForCausalLM", "qwen3_next", recurrent_state=True),
    _prefers_both("Qwen3_5ForCausalLM", "qwen3_5_text", recurrent_state=True),
    _prefers_both("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", recurrent_state=True),
    _wrapper("Qwen3_5ForConditionalGeneration", "qwen3_5", "Qwen3_5ForCausalLM"),
    _wrapper("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "Qwen3_5MoeForCausalLM"),
    _wrapper("KimiK25ForConditionalGeneration", "kimi_k25", "DeepseekV3ForCausalLM"),
    _prefers_both("MiniMaxM3SparseForCausalLM", "minimax_m3", requires_manager=V2),
    _wrapper("MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl", "MiniMaxM3SparseForCausalLM"),
    Card(
        "MiniMaxM2ForCausalLM",
        prefers_manager=V2,
        disaggregation=UNVALIDATED,
        example={"model_type": "minimax_m2"},
    ),
)

WITHOUT_PREFERENCE = (
    Card("MistralForCausalLM", implementation=LLAMA, example={"model_type": "mistral"}),
    Card("Qwen2ForCausalLM", implementation=LLAMA, example={"model_type": "qwen2"}),
    Card("Llama4ForCausalLM", implementation=LLAMA4, example={"model_type": "llama4_text"}),
    Card("MixtralForCausalLM", implementation=SPARSE_LLAMA, example={"model_type": "mixtral"}),
    Card("Qwen3MoeForCausalLM", implementation=SPARSE_LLAMA, example={"model_type": "qwen3_moe"}),
    Card("Qwen3ForCausalLM", implementation=LLAMA, example={"model_type": "qwen3"}),
    Card(
        "GraniteMoeHybridForCausalLM",
        recurrent_state=_has_mamba_layers,
        example={"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]},
    ),
)

# Architecture -> model_type: plain attention models that neither prefer nor require anything.
_PLAIN = {
    "AfmoeForCausalLM": "afmoe",
    "ApertusForCausalLM": "apertus",
    "ArceeForCausalLM": "arcee",
    "BloomForCausalLM": "bloom",
    "CodeGenForCausalLM": "codegen",
    "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere2",
    "CwmForCausalLM": "cwm",
    "DbrxForCausalLM": "dbrx",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DiffLlamaForCausalLM": "diffllama",
    "Dots1ForCausalLM": "dots1",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "Exaone4ForCausalLM": "exaone4",
    "ExaoneMoeForCausalLM": "exaone_moe",
    "FalconForCausalLM": "falcon",
    "FlexOlmoForCausalLM": "flex_olmo",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3nForCausalLM": "gemma3n_text",
    "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GlmForCausalLM": "glm",
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "GPTJForCausalLM": "gptj",
    "GPTNeoForCausalLM": "gpt_neo",
    "GPTNeoXForCausalLM": "gpt_neox",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeSharedForCausalLM": "granitemoeshared",
    "HeliumForCausalLM": "helium",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "Jais2ForCausalLM": "jais2",
    "LongcatFlashForCausalLM": "longcat_flash",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash",
    "MiniCPM3ForCausalLM": "minicpm3",
    "MinistralForCausalLM": "ministral",
    "Ministral3ForCausalLM": "ministral3",
    "Mistral4ForCausalLM": "mistral4",
    "MllamaForCausalLM": "mllama_text_model",
    "MptForCausalLM": "mpt",
    "NemotronForCausalLM": "nemotron",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "OlmoForCausalLM": "olmo",
    "OlmoeForCausalLM": "olmoe",
    "OPTForCausalLM": "opt",
    "PersimmonForCausalLM": "persimmon",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi",
    "PhiMoEForCausalLM": "phimoe",
    "PhimoeForCausalLM": "phimoe",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "SolarOpenForCausalLM": "solar_open",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
    "VaultGemmaForCausalLM": "vaultgemma",
    "XGLMForCausalLM": "xglm",
    "YoutuForCausalLM": "youtu",
}

# The same with layers that keep a recurrent state instead of, or beside, K and V.
_RECURRENT = {
    "BambaForCausalLM": "bamba",
    "FalconH1ForCausalLM": "falcon_h1",
    "FalconMambaForCausalLM": "falcon_mamba",
    "JambaForCausalLM": "jamba",
    "KimiLinearForCausalLM": "kimi_linear",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "Mamba2ForCausalLM": "mamba2",
    "MambaForCausalLM": "mamba",
    "MiniMaxForCausalLM": "minimax",
    "OlmoHybridForCausalLM": "olmo_hybrid",
    "RecurrentGemmaForCausalLM": "recurrent_gemma",
    "Zamba2ForCausalLM": "zamba2",
    "ZambaForCausalLM": "zamba",
}

# Wrapper -> (model_type, text backbone): none of these backbones prefers anything.
_PLAIN_WRAPPERS = {
    "Cohere2VisionForConditionalGeneration": ("cohere2_vision", "Cohere2ForCausalLM"),
    "Ernie4_5_VLMoeForConditionalGeneration": ("ernie4_5_vl_moe", "Ernie4_5_MoeForCausalLM"),
    "Gemma3nForConditionalGeneration": ("gemma3n", "Gemma3nForCausalLM"),
    "Glm4vForConditionalGeneration": ("glm4v", "Glm4ForCausalLM"),
    "Glm4vMoeForConditionalGeneration": ("glm4v_moe", "Glm4MoeForCausalLM"),
    "HunYuanVLForConditionalGeneration": ("hunyuan_vl", "HunYuanDenseV1ForCausalLM"),
    "Lfm2VlForConditionalGeneration": ("lfm2_vl", "Lfm2ForCausalLM"),
    "Mistral3ForConditionalGeneration": ("mistral3", "MistralForCausalLM"),
    "MllamaForConditionalGeneration": ("mllama", "MllamaForCausalLM"),
    "PaliGemmaForConditionalGeneration": ("paligemma", "GemmaForCausalLM"),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl", "Qwen2ForCausalLM"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", "Qwen2ForCausalLM"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "Qwen3ForCausalLM"),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe", "Qwen3MoeForCausalLM"),
}


def _all_cards() -> Iterable[Card]:
    yield from PREFERRING
    yield from WITHOUT_PREFERENCE
    for name, model_type in _PLAIN.items():
        yield Card(name, example={"model_type": model_type})
    for name, model_type in _RECURRENT.items():
        yield Card(name, recurrent_state=True, example={"model_type": model_type})
    for name, (model_type, backbone) in _PLAIN_WRAPPERS.items():
        yield _wrapper(name, model_type, backbone)


def make_registry(cards: Iterable[Card]) -> Registry[Card]:
    registry: Registry[Card] = Registry("architecture", ARCHITECTURE_FIELD)
    for card in cards:
        registry.register(card.architecture, card)
    return registry


CARDS = make_registry(_all_cards())


def original_architecture(config: Config) -> str:
    """``architectures[0]`` of a config.json as it was read, before anything rewrites it."""
    names = config.get("architectures")
    if not isinstance(names, list | tuple) or not names or not isinstance(names[0], str):
        raise ResolutionError(
            f"config.json names no architecture: architectures is {names!r}, expected a list such as "
            '["LlamaForCausalLM"]',
            field=ARCHITECTURE_FIELD,
        )
    return names[0]


def find_card(config: Config, cards: Registry[Card] = CARDS) -> Card:
    """The composed card of a checkpoint, by its original architecture. Raises ResolutionError with the nearest known
    names when there is none."""
    return card_named(original_architecture(config), cards)


def card_named(architecture: str, cards: Registry[Card] = CARDS) -> Card:
    """The composed card of `architecture`; raises as `find_card` does."""
    if architecture in cards:
        return compose(cards.get(architecture), cards)
    near = get_close_matches(architecture, cards.names(), n=3)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise ResolutionError(
        f"unknown architecture {architecture!r}: {hint}`kvferry resolve --all` lists the {len(cards.names())} known",
        field=ARCHITECTURE_FIELD,
    )


def example_config(architecture: str, cards: Registry[Card] = CARDS) -> dict[str, Any]:
    """A config as a checkpoint of `architecture` would bring it, as far as the rules look; for asking by name."""
    example = cards.get(architecture).example if architecture in cards else {}
    return {"architectures": [architecture], **example}
