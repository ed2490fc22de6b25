"""One prefill and one decode worker: golden answers, prefix reuse, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from listening import listening_addresses

from kvferry.cluster.processes import cluster_processes
from kvferry.cluster.state_file import require_state
from kvferry.core import SamplingParams
from kvferry.engine import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
KV_TOKEN_NBYTES = 30 * 2 * 3 * 64 * 4  # layers, K and V, heads, dim, fp32
TEXTS = [
    "Once upon a time",
    "What is the capital of France?",
    "東京は日本の首都です。それでは、",
    "Grüße aus Köln! Où est la gare? Добрый день",
    "🚢⛴️ The ferry 🌊 says",
    "def fibonacci(n):\n    ",
]
LENGTHS = [1, 15, 16, 17, 31, 32, 33, 64, 65, 129, 1100]


@pytest.fixture(scope="module", params=["prefill_first", "decode_first"])
def cluster(request: pytest.FixtureRequest, start_cluster: Callable[..., Any]) -> Iterator[Any]:
    cluster = start_cluster("--kv_cache.bytes", "384MiB", "--router.schedule", request.param)
    yield cluster
    cluster.run("down")


@pytest.fixture(scope="module")
def model(reference: Any, smollm2_dir: Path) -> Any:
    return reference.load(smollm2_dir)


def test_both_workers_run_the_preferred_pair(cluster: Any) -> None:
    workers = {worker["name"]: worker for worker in cluster.facts["workers"]}
    assert sorted(workers) == ["decode-0", "prefill-0"]
    for name, worker in workers.items():
        resolution = worker["resolution"]
        assert (resolution["transceiver"], resolution["manager"]) == ("NIXL/PYTHON", "V2")
        log = (cluster.state_dir / "logs" / f"{name}.log").read_text()
        assert log.count(f"resolved worker={name} role={worker['role']} model=LlamaForCausalLM") == 1


def test_nothing_of_it_listens_beyond_this_machine(cluster: Any) -> None:
    processes = cluster_processes(cluster.facts["cluster_id"])
    listening = listening_addresses(process.pid for process in processes)
    ports = {int(cluster.facts[name].rpartition(":")[2]) for name in ("grpc", "http")}
    assert ports <= set(listening.pop("127.0.0.1"))
    listening.pop("::1", None)
    assert listening == {}


def test_ray_answers_nobody_without_its_token(cluster: Any) -> None:
    state = require_state(cluster.state_dir)
    with grpc.insecure_channel(state.ray_address) as channel:
        call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        token = (Path(state.ray_temp_dir or "") / "auth_token").read_text()
        call(b"", timeout=10, metadata=[("authorization", f"Bearer {token}")])


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_golden(cluster: Any, tokenizer: Any, model: Any, assert_golden: Any, text: str) -> None:
    prompt = tokenizer.encode(text)
    completed = cluster.complete(prompt)
    assert len(completed.token_ids) == 16
    assert_golden(model, prompt, completed.token_ids)
    assert completed.text == tokenizer.decode(completed.token_ids)
    assert completed.route["disaggregated"]


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_around_blocks_are_golden(
    cluster: Any, model: Any, assert_golden: Any, long_ids: list[int], length: int
) -> None:
    # From another place each, so that none finds the prefix of the one before.
    prompt = long_ids[-length:]
    completed = cluster.complete(prompt)
    assert_golden(model, prompt, completed.token_ids)
    assert completed.usage["prompt_tokens"] == length
    moved = completed.route["transferred_bytes"]
    assert moved == length * KV_TOKEN_NBYTES


def test_through_the_cluster_is_as_in_process(cluster: Any, smollm2_dir: Path, long_ids: list[int]) -> None:
    prompts = [long_ids[100:140], long_ids[150:167], long_ids[400:600]]
    choices = [GREEDY, SamplingParams(seed=7, max_tokens=16, ignore_eos=True, top_p=0.9), GREEDY]
    with LLM(smollm2_dir, threads=1, kv_bytes=128 << 20) as llm:
        alone = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], choices)
    for prompt, sampling, expected in zip(prompts, choices, alone, strict=True):
        completed = cluster.complete(prompt, sampling)
        assert completed.route["disaggregated"]
        assert (completed.token_ids, completed.text) == (expected.token_ids, expected.text)


def test_first_logprobs_agree_with_the_reference(cluster: Any, reference: Any, model: Any, long_ids: list[int]) -> None:
    prompt = long_ids[200:240]
    sampling = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, ignore_eos=True)
    completed = cluster.complete(prompt, sampling)
    assert len(completed.logprobs) == 4
    logits = reference.logits(model, [*prompt, *completed.token_ids])[len(prompt) - 1 : -1]
    for row, entry in zip(logits.log_softmax(-1), completed.logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(float(row[entry["token_id"]]), abs=1e-3)
        assert [top["token_id"] for top in entry["top"]] == row.topk(3).indices.tolist()


def test_a_second_turn_reuses_its_prefix_and_moves_only_what_is_new(cluster: Any, long_ids: list[int]) -> None:
    first = long_ids[300:380]
    answer = cluster.complete(first).token_ids
    second = [*first, *answer, *long_ids[500:520]]
    completed = cluster.complete(second)
    assert completed.usage["cached_tokens"] >= 80
    assert 0 < completed.route["transferred_bytes"] < 40 * KV_TOKEN_NBYTES
    again = cluster.complete(second)
    assert again.token_ids == completed.token_ids
    assert again.route["transferred_bytes"] < 17 * KV_TOKEN_NBYTES


def test_one_token_is_one_token_and_moves_nothing(cluster: Any, long_ids: list[int]) -> None:
    completed = cluster.complete(long_ids[600:640], SamplingParams(temperature=0.0, max_tokens=1))
    assert len(completed.token_ids) == 1
    assert (completed.finish_reason.value, completed.route["transferred_bytes"]) == ("length", 0)


def test_a_seed_gives_the_same_text_again(cluster: Any, long_ids: list[int]) -> None:
    sampling = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
    runs = [cluster.complete(long_ids[700:730], sampling).token_ids for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]
    other = SamplingParams(temperature=1.0, seed=8, max_tokens=12, ignore_eos=True)
    assert cluster.complete(long_ids[700:730], other).token_ids != runs[0]


def test_a_stop_string_ends_the_text_before_it(cluster: Any) -> None:
    _, answer = cluster.run(
        *("generate", "--chat", "What is the capital of France?", "--temperature", "0", "--stop", "Paris")
    )
    assert answer["finish_reason"] == "stop"
    assert answer["text"] == "The capital of France is "


@pytest.mark.parametrize(
    ("arguments", "code", "field", "message"),
    [
        (["--prompt", ""], "INVALID_ARGUMENT", "prompt", "at least 1 token"),
        (["--prompt-ids", "[49152]"], "INVALID_ARGUMENT", "prompt_token_ids", "49152"),
        (["--prompt-ids", json.dumps([1] * 8192)], "INVALID_ARGUMENT", "prompt_token_ids", "8191"),
        (["--prompt", "x", "--max-tokens", "9000"], "INVALID_ARGUMENT", "max_tokens", "8192"),
        (["--prompt", "x", "--temperature", "-1"], "INVALID_ARGUMENT", "temperature", "between 0 and 100"),
        (["--prompt", "x", "--model", "gpt-17"], "NOT_FOUND", "model", "smollm2"),
        (["--prompt", "x", "--stop", ""], "INVALID_ARGUMENT", "stop", "non-empty"),
    ],
)
def test_bad_requests_name_field_and_limit(
    cluster: Any, arguments: list[str], code: str, field: str, message: str
) -> None:
    exit_code, answer = cluster.run("generate", *arguments, check=False)
    error = answer["error"]
    assert (exit_code, error["code"]) == (2, code)
    assert (error["field"] or "").startswith(field.split("_", maxsplit=1)[0])
    assert message in error["message"]


def test_a_deadline_ends_the_request_on_both_workers(cluster: Any, long_ids: list[int]) -> None:
    ids = json.dumps(long_ids[:900])
    exit_code, answer = cluster.run(
        *("generate", "--prompt-ids", ids, "--max-tokens", "2000", "--ignore-eos", "--timeout", "1"), check=False
    )
    assert (exit_code, answer["error"]["code"]) == (2, "DEADLINE_EXCEEDED")
    cluster.settled()


def test_a_second_cluster_in_the_same_directory_is_refused(cluster: Any) -> None:
    exit_code, answer = cluster.run("up", "--detach", check=False)
    assert (exit_code, answer["error"]["field"]) == (2, "state_dir")
    assert cluster.facts["cluster_id"] in answer["error"]["message"]


def test_a_taken_port_is_named(cluster: Any, tmp_path: Path) -> None:
    port = cluster.facts["grpc"].rpartition(":")[2]
    other = type(cluster)(cluster.facts, tmp_path)
    exit_code, answer = other.run("up", "--router.grpc_port", port, check=False)
    assert (exit_code, answer["error"]["field"]) == (2, "router.grpc_port")
    assert port in answer["error"]["message"]


def test_all_blocks_are_back(cluster: Any) -> None:
    cluster.settled()
