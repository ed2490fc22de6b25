"""Third-party backends: a real installed distribution, found by its entry point."""

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvferry.core import Source
from kvferry.resolution import (
    ENTRY_POINT_GROUP,
    Catalog,
    ResolutionError,
    ResolveRequest,
    RuntimeCapability,
    TransceiverCapability,
    check_buildable,
    default_catalog,
    probe_libraries,
    resolve,
)
from kvferry.resolution.catalog import transceiver_registry

ACME = """
from kvferry.resolution import RuntimeCapability, TransceiverCapability

CAPABILITY = TransceiverCapability(
    "ACME",
    runtimes=(RuntimeCapability("PYTHON", ("V1", "V2"), needs_finite_timeout=True, implementation="acme:create"),),
    library="acme_driver_that_is_absent",
    install="pip install acme-driver",
)
WRONG = "not a capability"
OTHER_NAME = TransceiverCapability("OTHER", runtimes=CAPABILITY.runtimes)
"""

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """install(backend, value): puts a distribution with that entry point on the path."""

    def put(backend: str, value: str) -> None:
        (tmp_path / "acme_kv.py").write_text(ACME)
        info = tmp_path / "acme_kv-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kv\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{backend} = {value}\n")
        monkeypatch.syspath_prepend(tmp_path)
        default_catalog.cache_clear()

    yield put
    default_catalog.cache_clear()
    sys.modules.pop("acme_kv", None)


def test_a_third_party_backend_resolves_like_any_other(install: Install) -> None:
    install("ACME", "acme_kv:CAPABILITY")
    resolution = resolve(ResolveRequest("LlamaForCausalLM", backend="acme"))
    assert (resolution.backend, resolution.runtime, resolution.manager) == ("ACME", "PYTHON", "V2")
    assert resolution.runtime_source is Source.MODEL
    check_buildable(resolution)
    with pytest.raises(ResolutionError, match="ACME cannot run CPP"):
        resolve(ResolveRequest("LlamaForCausalLM", backend="ACME", runtime="CPP"))


def test_its_library_is_checked_too(install: Install) -> None:
    install("ACME", "acme_kv:CAPABILITY")
    missing = probe_libraries("ACME")
    assert missing == {"acme_driver_that_is_absent"}
    with pytest.raises(ResolutionError, match="pip install acme-driver"):
        resolve(ResolveRequest("LlamaForCausalLM", backend="ACME", missing_libraries=missing))


def test_a_backend_without_cpp_and_a_null_timeout_leave_no_runtime(install: Install) -> None:
    install("ACME", "acme_kv:CAPABILITY")
    with pytest.raises(ResolutionError, match="no runtime is left") as raised:
        resolve(ResolveRequest("LlamaForCausalLM", backend="ACME", transfer_timeout_ms=None))
    assert raised.value.field == "transceiver.transfer_timeout_ms"


def test_it_is_imported_only_when_asked_for(install: Install) -> None:
    install("ACME", "acme_kv:CAPABILITY")
    resolve(ResolveRequest("LlamaForCausalLM"))
    assert "acme_kv" not in sys.modules
    resolve(ResolveRequest("LlamaForCausalLM", backend="ACME"))
    assert "acme_kv" in sys.modules


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("acme_kv:WRONG", "must be a TransceiverCapability, not str"),
        ("acme_kv:OTHER_NAME", "declares itself as 'OTHER'"),
        ("acme_kv:ABSENT", "cannot be loaded"),
        ("acme_absent:CAPABILITY", "cannot be loaded"),
    ],
)
def test_a_broken_declaration_names_its_distribution_and_hurts_nobody_else(
    install: Install, value: str, words: str
) -> None:
    install("ACME", value)
    assert resolve(ResolveRequest("LlamaForCausalLM")).backend == "NIXL"
    with pytest.raises(ResolutionError, match=words) as raised:
        resolve(ResolveRequest("LlamaForCausalLM", backend="ACME"))
    assert "acme-kv" in raised.value.message


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ResolutionError, match=r"'nixl'.*registered twice"):
        transceiver_registry([EntryPoint("nixl", "acme_kv:CAPABILITY", ENTRY_POINT_GROUP)])


@pytest.mark.parametrize(
    ("declare", "words"),
    [
        (lambda: TransceiverCapability("acme", (RuntimeCapability("CPP", ("V1",)),)), "capitals"),
        (lambda: TransceiverCapability("NONE", (RuntimeCapability("CPP", ("V1",)),)), "kvferry's own"),
        (lambda: TransceiverCapability("ACME"), "no runtime"),
        (lambda: TransceiverCapability("ACME", (RuntimeCapability("RUST", ("V1",)),)), "'RUST'"),
        (lambda: TransceiverCapability("ACME", (RuntimeCapability("CPP", ("V3",)),)), "V3"),
        (lambda: TransceiverCapability("ACME", (RuntimeCapability("CPP", ()),)), "managers"),
        (lambda: TransceiverCapability("ACME", (RuntimeCapability("CPP", ("V1",)),) * 2), "twice"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused(declare: Callable[[], object], words: str) -> None:
    with pytest.raises(ResolutionError, match=words):
        declare()


def test_a_route_that_drives_v2_only_is_given_v2() -> None:
    capability = TransceiverCapability("ONLY", (RuntimeCapability("PYTHON", ("V2",)),))
    catalog = Catalog()
    catalog.transceivers.register("ONLY", lambda: capability)
    resolution = resolve(ResolveRequest("MistralForCausalLM", backend="ONLY", transfer_timeout_ms=None), catalog)
    assert (resolution.runtime, resolution.manager, resolution.manager_source) == ("PYTHON", "V2", Source.DEFAULT)
    with pytest.raises(ResolutionError, match="no KV manager is left") as raised:
        resolve(ResolveRequest("MistralForCausalLM", backend="ONLY", beam_width=2), catalog)
    assert raised.value.field == "beam_width"
