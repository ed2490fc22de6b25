import json

from kvferry.core import codec
from kvferry.resolution import (
    ResolutionError,
    ResolveRequest,
    failed_resolution_dict,
    resolution_dict,
    resolve,
    worker_info_labels,
)

CONTRACT_KEYS = {
    "backend",
    "runtime",
    "runtime_source",
    "manager",
    "manager_source",
    "reason",
    "warnings",
    "disaggregation",
    "error",
}


def test_a_resolution_as_json() -> None:
    resolution = resolve(ResolveRequest("LlamaForCausalLM", backend="UCX"))
    plain = json.loads(json.dumps(resolution_dict(resolution)))
    assert set(plain) >= CONTRACT_KEYS
    assert (plain["backend"], plain["runtime"], plain["runtime_source"]) == ("UCX", "CPP", "demoted")
    assert (plain["manager"], plain["manager_source"]) == ("V1", "demoted")
    assert (plain["transceiver"], plain["disaggregation"], plain["error"]) == ("UCX/CPP", "validated", None)
    assert plain["warnings"] == list(resolution.warnings) != []
    assert plain["reason"] == resolution.reason


def test_aggregated_serving_as_json() -> None:
    plain = resolution_dict(resolve(ResolveRequest("LlamaForCausalLM", backend="NONE")))
    assert (plain["backend"], plain["runtime"], plain["runtime_source"], plain["transceiver"]) == (
        "NONE",
        None,
        None,
        "-",
    )


def test_a_failure_has_the_same_keys() -> None:
    plain = failed_resolution_dict("A", ResolutionError("cannot be", field="transceiver.runtime"), ["careful"])
    assert set(plain) >= CONTRACT_KEYS
    assert (plain["architecture"], plain["error"], plain["field"]) == ("A", "cannot be", "transceiver.runtime")
    assert plain["warnings"] == ["careful"]
    assert plain["backend"] is plain["runtime"] is plain["manager"] is plain["reason"] is None


def test_metric_labels_say_what_the_log_line_says() -> None:
    labels = worker_info_labels("decode-0", "decode", resolve(ResolveRequest("LlamaForCausalLM")))
    assert labels == {
        "worker": "decode-0",
        "role": "decode",
        "model": "LlamaForCausalLM",
        "transceiver": "NIXL/PYTHON",
        "transceiver_source": "model",
        "kv_manager": "V2",
        "kv_manager_source": "model",
    }


def test_a_resolution_survives_the_wire() -> None:
    for backend in ("NONE", "UCX", "NIXL"):
        resolution = resolve(ResolveRequest("MiniMaxM2ForCausalLM", backend=backend))
        assert codec.resolution_from_wire(codec.resolution_to_wire(resolution)) == resolution
