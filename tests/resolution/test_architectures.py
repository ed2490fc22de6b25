from typing import Any

import pytest

from kvferry.core import Resolution, Source
from kvferry.resolution import CARDS, Card, ResolutionError, ResolveRequest, example_config, find_card, resolve
from kvferry.resolution.architectures import lookup
from kvferry.resolution.card import evaluate
from kvferry.resolution.defaults import card_defaults

PREFERS_BOTH = [
    "LlamaForCausalLM",
    "Llama4ForConditionalGeneration",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "MistralLarge3ForCausalLM",
    "NemotronHForCausalLM",
    "NemotronHPuzzleForCausalLM",
    "NemotronH_Nano_VL_V2",
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Omni_Reasoning_V3",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "MiniMaxM3SparseForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration",
]

NEMOTRON_FAMILY = [name for name in PREFERS_BOTH if name.startswith("NemotronH")]
SPARSE = ("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "GlmMoeDsaForCausalLM")
OTHERS = [name for name in CARDS if name not in PREFERS_BOTH and name != "MiniMaxM2ForCausalLM"]
WRAPPER_SIGNS = ("ForConditionalGeneration", "_VL_", "Omni")
INNER_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")


def resolved(architecture: str, config: dict[str, Any] | None = None, **settings: Any) -> Resolution:
    whole = {**example_config(architecture), **(config or {})}
    return resolve(ResolveRequest(architecture, whole, **settings))


@pytest.mark.parametrize("architecture", PREFERS_BOTH)
def test_who_prefers_python_and_v2_gets_it_on_the_default_route(architecture: str) -> None:
    resolution = resolved(architecture)
    assert (resolution.backend, resolution.runtime, resolution.manager) == ("NIXL", "PYTHON", "V2")
    assert (resolution.runtime_source, resolution.manager_source) == (Source.MODEL, Source.MODEL)
    assert resolution.disaggregation == "validated"
    assert resolution.warnings == ()


@pytest.mark.parametrize("architecture", PREFERS_BOTH)
def test_they_resolve_from_a_config_that_names_only_the_class(architecture: str) -> None:
    resolution = resolve(ResolveRequest("", {"architectures": [architecture]}))
    assert (resolution.architecture, resolution.runtime, resolution.manager) == (architecture, "PYTHON", "V2")


def test_minimax_m2_prefers_v2_only_and_is_not_validated() -> None:
    resolution = resolved("MiniMaxM2ForCausalLM")
    assert (resolution.runtime, resolution.runtime_source) == ("PYTHON", Source.DEFAULT)
    assert (resolution.manager, resolution.manager_source) == ("V2", Source.MODEL)
    assert resolution.disaggregation == "unvalidated"
    assert "MiniMaxM2ForCausalLM is not validated for disaggregated serving" in resolution.warnings
    assert resolved("MiniMaxM2ForCausalLM", backend="NONE").warnings == ()


@pytest.mark.parametrize("architecture", OTHERS)
def test_every_other_class_prefers_and_requires_nothing(architecture: str) -> None:
    facts = evaluate(find_card({"architectures": [architecture]}), example_config(architecture))
    assert (facts.prefers_runtime, facts.prefers_manager, facts.requires_manager) == (None, None, None)
    assert (facts.disaggregation, facts.prefix_reuse_opt_in) == ("validated", False)
    resolution = resolved(architecture)
    assert (resolution.runtime, resolution.manager) == ("PYTHON", "V1")
    assert (resolution.runtime_source, resolution.manager_source) == (Source.DEFAULT, Source.DEFAULT)


@pytest.mark.parametrize("architecture", list(CARDS))
def test_walk_every_card(architecture: str) -> None:
    card = find_card({"architectures": [architecture]})
    evaluate(card, card.example)
    evaluate(card, {})
    card_defaults(card, card.example)
    assert card.example.get("model_type")
    assert card.implementation is None or card.implementation.startswith("kvferry.models.")


@pytest.mark.parametrize("architecture", list(CARDS))
def test_every_wrapper_has_a_backbone(architecture: str) -> None:
    card = CARDS.get(architecture)
    looks_wrapped = any(sign in architecture for sign in WRAPPER_SIGNS) or any(
        section in card.example for section in INNER_SECTIONS
    )
    assert looks_wrapped == (card.backbone is not None)


def test_only_the_nemotron_family_has_reuse_opt_in() -> None:
    opted = [name for name in CARDS if evaluate(find_card({"architectures": [name]}), {}).prefix_reuse_opt_in]
    assert sorted(opted) == sorted(NEMOTRON_FAMILY)


@pytest.mark.parametrize(
    "architecture",
    ["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"],
)
@pytest.mark.parametrize("section", [None, "text_config"])
def test_gemma4_requires_v2_when_its_attention_is_hybrid(architecture: str, section: str | None) -> None:
    def config(kinds: list[str]) -> dict[str, Any]:
        keys = {"layer_types": kinds}
        return {"architectures": [architecture], **(keys if section is None else {section: keys})}

    hybrid = config(["sliding_attention", "full_attention"])
    with pytest.raises(ResolutionError, match="requires KV manager V2"):
        resolve(ResolveRequest(architecture, hybrid, runtime="CPP"))
    uniform = resolve(ResolveRequest(architecture, config(["full_attention"] * 2), runtime="CPP"))
    assert (uniform.runtime, uniform.manager, uniform.manager_source) == ("CPP", "V1", Source.DEMOTED)


def test_gemma4_is_hybrid_when_its_config_does_not_say() -> None:
    with pytest.raises(ResolutionError, match="requires KV manager V2"):
        resolve(ResolveRequest("Gemma4ForConditionalGeneration", {}, backend="UCX"))


@pytest.mark.parametrize("architecture", SPARSE)
def test_indexed_attention_requires_v2_unless_it_is_off(architecture: str) -> None:
    with pytest.raises(ResolutionError, match="requires KV manager V2"):
        resolved(architecture, manager="V1")
    assert resolved(architecture, {"index_topk": 0}, manager="V1").manager == "V1"


def test_architectures_that_share_an_implementation_keep_their_own_preferences() -> None:
    shared = [name for name in CARDS if CARDS.get(name).implementation == CARDS.get("LlamaForCausalLM").implementation]
    assert sorted(shared) == ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
    assert resolved("LlamaForCausalLM").manager == "V2"
    assert {resolved(name).manager for name in shared if name != "LlamaForCausalLM"} == {"V1"}


def test_the_original_architecture_decides_whatever_class_executes_it() -> None:
    config = {"architectures": ["MistralForCausalLM", "LlamaForCausalLM"], "model_type": "llama"}
    assert find_card(config).architecture == "MistralForCausalLM"
    rewritten = resolve(ResolveRequest("KimiK25ForConditionalGeneration", {"architectures": ["DeepseekV2ForCausalLM"]}))
    assert (rewritten.architecture, rewritten.manager) == ("KimiK25ForConditionalGeneration", "V2")


def test_granite_hybrids_keep_state_only_where_they_have_mamba_layers() -> None:
    card = find_card({"architectures": ["GraniteMoeHybridForCausalLM"]})
    assert evaluate(card, {"layer_types": ["mamba", "attention"]}).recurrent_state
    assert not evaluate(card, {"layer_types": ["attention"]}).recurrent_state
    assert evaluate(card, {}).recurrent_state


def test_an_unknown_architecture_names_its_neighbours() -> None:
    with pytest.raises(ResolutionError, match=r"did you mean .*Qwen3ForCausalLM") as raised:
        find_card({"architectures": ["Qwen33ForCausalLM"]})
    assert raised.value.field == "architectures"


@pytest.mark.parametrize("config", [{}, {"architectures": None}, {"architectures": []}, {"architectures": [3]}])
def test_a_config_without_an_architecture_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ResolutionError, match="names no architecture"):
        find_card(config)
    with pytest.raises(ResolutionError, match="names no architecture"):
        resolve(ResolveRequest("", config))


def test_lookup_reads_the_outer_config_before_an_inner_one() -> None:
    assert lookup({"a": 1, "text_config": {"a": 2}}, "a", 0) == 1
    assert lookup({"text_config": {"a": 2}}, "a", 0) == 2
    assert lookup({"text_config": "not a section"}, "a", 0) == 0


def test_two_cards_of_one_name_are_refused() -> None:
    from kvferry.core import ConfigError
    from kvferry.resolution.architectures import make_registry

    with pytest.raises(ConfigError, match="registered twice"):
        make_registry([Card("A"), Card("A")])
