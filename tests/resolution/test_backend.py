import pytest

from kvferry.resolution import ResolutionError, ResolveRequest, effective_backend, resolve


def use(*names: str) -> dict[str, str]:
    return {f"KVFERRY_USE_{name}": "1" for name in names}


def test_default_is_nixl() -> None:
    chosen = effective_backend("DEFAULT", {})
    assert (chosen.name, chosen.variable, chosen.warnings) == ("NIXL", "", ())


@pytest.mark.parametrize("name", ["NIXL", "UCX", "MOONCAKE", "MPI"])
def test_each_variable_chooses_and_recommends_the_setting(name: str) -> None:
    chosen = effective_backend("DEFAULT", use(name))
    assert (chosen.name, chosen.variable) == (name, f"KVFERRY_USE_{name}")
    assert len(chosen.warnings) == 1
    assert f"transceiver.backend: {name}" in chosen.warnings[0]


@pytest.mark.parametrize(
    ("names", "first"),
    [(("UCX", "NIXL"), "NIXL"), (("MPI", "MOONCAKE", "UCX"), "UCX"), (("MPI", "MOONCAKE"), "MOONCAKE")],
)
def test_of_several_variables_the_first_in_the_fixed_order_wins(names: tuple[str, ...], first: str) -> None:
    chosen = effective_backend("DEFAULT", use(*names))
    assert (chosen.name, chosen.variable) == (first, f"KVFERRY_USE_{first}")
    for ignored in set(names) - {first}:
        assert f"KVFERRY_USE_{ignored}" in chosen.warnings[0]


@pytest.mark.parametrize("value", ["0", "", "true", "yes", " 1", "01"])
def test_only_exactly_1_counts(value: str) -> None:
    assert effective_backend("DEFAULT", {"KVFERRY_USE_UCX": value}).name == "NIXL"


@pytest.mark.parametrize("backend", ["NONE", "NIXL", "UCX", "MOONCAKE", "SHM", "MPI"])
def test_an_explicit_backend_ignores_the_environment(backend: str) -> None:
    chosen = effective_backend(backend, use("NIXL", "UCX", "MOONCAKE", "MPI"))
    assert (chosen.name, chosen.variable, chosen.warnings) == (backend, "", ())


def test_case_does_not_matter() -> None:
    assert effective_backend("shm", {}).name == "SHM"
    assert effective_backend("default", use("UCX")).name == "UCX"


def test_an_empty_backend_is_refused() -> None:
    with pytest.raises(ResolutionError, match=r"transceiver\.backend is empty"):
        effective_backend(" ", {})


@pytest.mark.parametrize(
    ("backend", "environ", "named"), [("MPI", {}, "MPI"), ("DEFAULT", use("MPI"), "KVFERRY_USE_MPI=1")]
)
def test_mpi_is_recognised_and_never_built(backend: str, environ: dict[str, str], named: str) -> None:
    with pytest.raises(ResolutionError, match="not built") as raised:
        resolve(ResolveRequest("LlamaForCausalLM", backend=backend, environ=environ))
    assert raised.value.field == "transceiver.backend"
    assert named in raised.value.message


def test_the_reason_says_which_variable_chose() -> None:
    resolution = resolve(ResolveRequest("LlamaForCausalLM", environ=use("UCX")))
    assert resolution.backend == "UCX"
    assert resolution.reason.startswith("KVFERRY_USE_UCX=1 chose UCX")


def test_an_unknown_backend_lists_the_known() -> None:
    with pytest.raises(ResolutionError, match="did you mean NIXL") as raised:
        resolve(ResolveRequest("LlamaForCausalLM", backend="NIXLE"))
    assert raised.value.field == "transceiver.backend"
    assert "SHM" in raised.value.message
    assert "NONE" in raised.value.message
