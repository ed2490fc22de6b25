from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from kvferry.core import Resolution, Source
from kvferry.resolution import ResolutionError, ResolveRequest, prefix_reuse_enabled, resolve

Resolver = Callable[..., Resolution]

NEMOTRON = {"architectures": ["NemotronHForCausalLM"]}
QWEN_NEXT = {"architectures": ["Qwen3NextForCausalLM"]}
LLAMA = {"architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("backend", "runtime", "manager", "prefers_runtime", "prefers_manager", "timeout"),
    list(
        product(
            ("DEFAULT", "NIXL", "UCX", "SHM", "MOONCAKE", "NONE"),
            ("CPP", "PYTHON"),
            ("V1", "V2"),
            ("none", "PYTHON", "CPP"),
            ("none", "V1", "V2"),
            (1000, None),
        )
    ),
)
def test_explicit_values_are_kept_or_refused_never_changed(
    backend: str,
    runtime: str,
    manager: str,
    prefers_runtime: str,
    prefers_manager: str,
    timeout: int | None,
    resolve_preferring: Resolver,
) -> None:
    python_runs = backend == "MOONCAKE" or (backend != "UCX" and timeout is not None)
    cpp_runs = backend != "MOONCAKE" and manager == "V1"
    legal = backend == "NONE" or (python_runs if runtime == "PYTHON" else cpp_runs)
    settings = {"backend": backend, "runtime": runtime, "manager": manager, "transfer_timeout_ms": timeout}
    if not legal:
        with pytest.raises(ResolutionError):
            resolve_preferring(prefers_runtime, prefers_manager, **settings)
        return
    resolution = resolve_preferring(prefers_runtime, prefers_manager, **settings)
    assert (resolution.manager, resolution.manager_source) == (manager, Source.USER)
    if backend != "NONE":
        assert (resolution.runtime, resolution.runtime_source) == (runtime, Source.USER)
    assert resolution.warnings == ()


@pytest.mark.parametrize(
    ("backend", "prefers_runtime", "prefers_manager", "timeout", "feature"),
    list(
        product(
            ("DEFAULT", "NIXL", "UCX", "SHM", "MOONCAKE", "NONE"),
            ("none", "PYTHON", "CPP"),
            ("none", "V1", "V2"),
            (1000, None),
            ({}, {"beam_width": 2}, {"kv_connector": "c"}, {"speculative": "two-model"}),
        )
    ),
)
def test_auto_never_ends_in_an_error_and_is_the_same_left_out(
    backend: str,
    prefers_runtime: str,
    prefers_manager: str,
    timeout: int | None,
    feature: dict[str, Any],
    resolve_preferring: Resolver,
) -> None:
    settings = {"backend": backend, "transfer_timeout_ms": timeout, **feature}
    left_out = resolve_preferring(prefers_runtime, prefers_manager, **settings)
    given = resolve_preferring(prefers_runtime, prefers_manager, runtime="auto", manager="auto", **settings)
    assert left_out == given
    assert Source.USER not in (left_out.runtime_source, left_out.manager_source)
    assert left_out.reason


def test_order_matters() -> None:
    """The manager is measured against the resolved runtime. Measured against CPP first, Llama would lose V2."""
    assert resolve(ResolveRequest("LlamaForCausalLM")).manager == "V2"
    wrong = resolve(ResolveRequest("LlamaForCausalLM", runtime="CPP"))
    assert (wrong.manager, wrong.manager_source) == ("V1", Source.DEMOTED)


def test_a_model_may_opt_out_of_python(resolve_preferring: Resolver) -> None:
    resolution = resolve_preferring("CPP", "V2")
    assert (resolution.runtime, resolution.runtime_source) == ("CPP", Source.MODEL)
    assert (resolution.manager, resolution.manager_source) == ("V1", Source.DEMOTED)
    assert "NIXL/CPP drives V1, not V2" in resolution.reason


def test_values_are_read_whatever_their_case() -> None:
    resolution = resolve(ResolveRequest("LlamaForCausalLM", backend="nixl", runtime="python", manager="v1"))
    assert (resolution.backend, resolution.runtime, resolution.manager) == ("NIXL", "PYTHON", "V1")
    assert resolve(ResolveRequest("LlamaForCausalLM", runtime="AUTO")).runtime_source is Source.MODEL


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"runtime": "RUST"}, "transceiver.runtime", "known: auto, PYTHON, CPP"),
        ({"runtime": "RUST", "backend": "NONE"}, "transceiver.runtime", "RUST"),
        ({"manager": "V3"}, "kv_cache.manager", "known: auto, V1, V2"),
        ({"transfer_timeout_ms": 0}, "transceiver.transfer_timeout_ms", "at least 1 or null, got 0"),
        ({"transfer_timeout_ms": True}, "transceiver.transfer_timeout_ms", "got True"),
        ({"beam_width": 0}, "beam_width", "at least 1, got 0"),
        ({"beam_width": None}, "beam_width", "at least 1, got None"),
        ({"kv_connector": ""}, "kv_cache.connector", "empty"),
        ({"speculative": "eagle"}, "speculative", "known: two-model"),
        ({"config": []}, "config", "mapping"),
    ],
)
def test_bad_settings_name_themselves_and_their_limits(settings: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ResolutionError) as raised:
        resolve(ResolveRequest("LlamaForCausalLM", **settings))
    assert raised.value.field == field
    assert words in raised.value.message


def test_a_model_that_requires_v2_takes_it_from_user_or_card(resolve_preferring: Resolver) -> None:
    assert resolve_preferring("PYTHON", "none", required=True).manager_source is Source.MODEL
    assert resolve_preferring("PYTHON", "V2", required=True, manager="V2").manager_source is Source.USER
    assert resolve_preferring("PYTHON", "V1", required=True, backend="NONE").manager == "V2"


def test_a_requirement_that_a_null_timeout_stands_against_says_so(resolve_preferring: Resolver) -> None:
    with pytest.raises(ResolutionError, match="requires KV manager V2") as raised:
        resolve_preferring("PYTHON", "V2", required=True, transfer_timeout_ms=None)
    assert raised.value.field == "transceiver.transfer_timeout_ms"


def test_errors_recommend_routes_that_exist() -> None:
    with pytest.raises(ResolutionError, match="NIXL/PYTHON or SHM/PYTHON"):
        resolve(ResolveRequest("LlamaForCausalLM", backend="UCX", runtime="PYTHON"))
    with pytest.raises(ResolutionError, match="NIXL/PYTHON or SHM/PYTHON"):
        resolve(ResolveRequest("LlamaForCausalLM", runtime="CPP", manager="V2"))


# -- libraries ------------------------------------------------------------------------------------------


def test_a_missing_library_gives_the_install_line() -> None:
    missing = frozenset({"nixl_cu12"})
    with pytest.raises(ResolutionError, match="pip install") as raised:
        resolve(ResolveRequest("LlamaForCausalLM", missing_libraries=missing))
    assert raised.value.field == "transceiver.backend"
    assert "nixl_cu12" in raised.value.message


def test_a_missing_library_of_the_system_gives_the_line_that_brings_it() -> None:
    missing = frozenset({"libibverbs.so.1"})
    with pytest.raises(
        ResolutionError, match=r"'libibverbs\.so\.1'.* apt-get install --no-install-recommends libibverbs1"
    ) as raised:
        resolve(ResolveRequest("LlamaForCausalLM", backend="MOONCAKE", missing_libraries=missing))
    assert raised.value.field == "transceiver.backend"


def test_other_backends_do_not_care() -> None:
    missing = frozenset({"nixl_cu12", "mooncake"})
    assert resolve(ResolveRequest("LlamaForCausalLM", backend="NONE", missing_libraries=missing)).manager == "V2"
    assert resolve(ResolveRequest("LlamaForCausalLM", backend="SHM", missing_libraries=missing)).backend == "SHM"


# -- prefix reuse ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "manager", "requested", "enabled"),
    [
        (LLAMA, "V1", None, True),
        (LLAMA, "V2", None, True),
        (LLAMA, "V2", False, False),
        (NEMOTRON, "V2", None, False),
        (NEMOTRON, "V2", True, True),
        (NEMOTRON, "V1", None, False),
        (QWEN_NEXT, "V2", None, True),
        (QWEN_NEXT, "V1", None, False),
        (QWEN_NEXT, "V1", False, False),
        ({"architectures": ["NemotronH_Nano_VL_V2"]}, "V2", None, False),
    ],
)
def test_prefix_reuse(config: dict[str, Any], manager: str, requested: bool | None, enabled: bool) -> None:
    assert prefix_reuse_enabled(config, manager, requested) is enabled


@pytest.mark.parametrize("config", [NEMOTRON, QWEN_NEXT])
@pytest.mark.parametrize("settings", [{"manager": "V1"}, {"runtime": "CPP"}, {"beam_width": 2}])
def test_hybrids_on_v1_refuse_reuse_that_was_asked_for(config: dict[str, Any], settings: dict[str, Any]) -> None:
    with pytest.raises(ResolutionError, match="no snapshots") as raised:
        resolve(ResolveRequest("", config, prefix_reuse=True, **settings))
    assert raised.value.field == "kv_cache.prefix_reuse"
    with pytest.raises(ResolutionError, match="no snapshots"):
        prefix_reuse_enabled(config, "V1", True)


@pytest.mark.parametrize("settings", [{"manager": "V1"}, {"runtime": "CPP"}, {"backend": "NONE", "manager": "V1"}])
def test_hybrids_on_v1_switch_default_reuse_off_with_a_warning(settings: dict[str, Any]) -> None:
    resolution = resolve(ResolveRequest("", QWEN_NEXT, **settings))
    assert resolution.manager == "V1"
    assert any("prefix reuse is switched off" in warning for warning in resolution.warnings)


def test_reuse_that_is_off_anyway_is_no_warning() -> None:
    assert resolve(ResolveRequest("", QWEN_NEXT, manager="V1", prefix_reuse=False)).warnings == ()
    assert resolve(ResolveRequest("", NEMOTRON)).warnings == ()
