import importlib
import importlib.util
from typing import Any

import pytest

from kvferry.core import Resolution
from kvferry.resolution import (
    CARDS,
    Catalog,
    ResolutionError,
    ResolveRequest,
    RuntimeCapability,
    TransceiverCapability,
    build_gaps,
    buildable,
    check_buildable,
    find_card,
    probe_libraries,
    required_implementation,
    resolve,
)
from kvferry.resolution.capabilities import BUILTIN_MANAGERS, BUILTIN_TRANSCEIVERS


def resolved(architecture: str = "LlamaForCausalLM", **settings: Any) -> Resolution:
    return resolve(ResolveRequest(architecture, **settings))


@pytest.mark.parametrize("settings", [{}, {"manager": "V1"}, {"runtime": "PYTHON"}, {"backend": "NONE"}])
def test_what_is_built_passes(settings: dict[str, Any]) -> None:
    resolution = resolved(**settings)
    assert build_gaps(resolution) == ()
    check_buildable(resolution)


@pytest.mark.parametrize(
    ("runtimes", "setting"),
    [
        ((RuntimeCapability("CPP", ("V1",)),), "transceiver.backend"),
        (
            (RuntimeCapability("CPP", ("V1",)), RuntimeCapability("PYTHON", ("V1",), implementation="a:b")),
            "transceiver.runtime",
        ),
    ],
)
def test_a_declared_route_without_an_implementation_resolves_but_is_not_launched(
    runtimes: tuple[RuntimeCapability, ...], setting: str
) -> None:
    catalog = Catalog()
    catalog.transceivers.register("ACME", lambda: TransceiverCapability("ACME", runtimes=runtimes))
    resolution = resolve(ResolveRequest("LlamaForCausalLM", backend="ACME", runtime="CPP"), catalog)
    with pytest.raises(ResolutionError, match="ACME/CPP is not built in this version") as raised:
        check_buildable(resolution, catalog=catalog)
    assert raised.value.field == setting
    built = "(built: NIXL/PYTHON, NIXL/CPP, SHM/PYTHON, SHM/CPP, UCX/CPP, MOONCAKE/PYTHON)"
    assert built in raised.value.message


def test_two_model_speculation_is_not_built() -> None:
    request = ResolveRequest("LlamaForCausalLM", speculative="two-model")
    with pytest.raises(ResolutionError, match="not built in this version") as raised:
        check_buildable(resolve(request), request)
    assert raised.value.field == "speculative"


def test_a_connector_must_be_installed() -> None:
    request = ResolveRequest("LlamaForCausalLM", kv_connector="lmcache")
    with pytest.raises(ResolutionError, match=r"'lmcache' is installed here \(known: directory\)") as raised:
        check_buildable(resolve(request), request)
    assert raised.value.field == "kv_cache.connector"
    known = ResolveRequest("LlamaForCausalLM", kv_connector="directory")
    check_buildable(resolve(known), known)


def test_beams_are_served_in_process_and_not_by_a_cluster() -> None:
    request = ResolveRequest("LlamaForCausalLM", backend="NIXL", beam_width=2)
    with pytest.raises(ResolutionError, match=r"LLM\.beam_search") as raised:
        check_buildable(resolve(request), request)
    assert raised.value.field == "beam_width"
    alone = ResolveRequest("LlamaForCausalLM", backend="NONE", beam_width=2)
    assert build_gaps(resolve(alone), alone) == ()


def test_a_known_architecture_without_a_forward_pass_says_so_when_loaded_not_when_resolved() -> None:
    resolution = resolved("MiniMaxM2ForCausalLM")
    assert build_gaps(resolution) == ()
    for load in (
        lambda: check_buildable(resolution),
        lambda: required_implementation(find_card({"architectures": ["MiniMaxM2ForCausalLM"]})),
    ):
        with pytest.raises(ResolutionError, match="MiniMaxM2ForCausalLM is known") as raised:
            load()
        assert raised.value.field == "model"
        assert "LlamaForCausalLM" in raised.value.message


def test_an_implementation_is_a_lazy_path() -> None:
    assert required_implementation(find_card({"architectures": ["LlamaForCausalLM"]})) == "kvferry.models.llama:Llama"


def _paths() -> set[str]:
    paths = {CARDS.get(name).implementation for name in CARDS}
    paths |= {entry.implementation for transceiver in BUILTIN_TRANSCEIVERS for entry in transceiver.runtimes}
    paths |= {manager.implementation for manager in BUILTIN_MANAGERS}
    return {path for path in paths if path is not None}


@pytest.mark.parametrize("path", sorted(_paths()))
def test_every_declared_implementation_exists(path: str) -> None:
    module, _, attribute = path.partition(":")
    assert getattr(importlib.import_module(module), attribute) is not None


def _probe(library: str) -> frozenset[str]:
    capability = TransceiverCapability("PROBED", BUILTIN_TRANSCEIVERS[0].runtimes, library=library)
    catalog = Catalog()
    catalog.transceivers.register("PROBED", lambda: capability)
    return probe_libraries("PROBED", catalog=catalog)


@pytest.mark.parametrize("library", ["a_library_nobody_has", "a_library_nobody_has.part"])
def test_a_library_that_is_not_here_is_found_missing(library: str) -> None:
    assert _probe(library) == {library}


@pytest.mark.parametrize("library", ["json", "email.mime", ""])
def test_a_library_that_is_here_is_not_missing(library: str) -> None:
    assert _probe(library) == frozenset()


def test_probing_asks_for_the_effective_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.resolution.buildable.find_spec", lambda name: None)
    monkeypatch.setattr("kvferry.resolution.buildable._loadable", lambda name: name != "libibverbs.so.1")
    assert probe_libraries("DEFAULT") == {"nixl_cu12"}
    assert probe_libraries("DEFAULT", {"KVFERRY_USE_MOONCAKE": "1"}) == {"mooncake", "libibverbs.so.1"}
    assert probe_libraries("NONE") == frozenset()
    assert probe_libraries("MPI") == frozenset()
    assert probe_libraries() == {"nixl_cu12", "libucx", "mooncake", "libibverbs.so.1"}


def test_a_library_of_the_system_is_looked_for() -> None:
    assert buildable._loadable("libc.so.6")
    assert not buildable._loadable("libnobody-has-this.so.1")
