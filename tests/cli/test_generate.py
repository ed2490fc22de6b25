"""`kvferry generate`: what is sent, what is printed, and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.core import InvalidRequestError, OverloadedError
from kvferry.proto import generation_pb2

Run = Callable[..., Any]


def _last(**changes: Any) -> generation_pb2.GenerateResponse:
    values: dict[str, Any] = {
        "request_id": "r1",
        "token_ids": [5],
        "text": "is",
        "finish_reason": generation_pb2.FINISH_REASON_LENGTH,
        "usage": generation_pb2.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1),
        "route": generation_pb2.Route(
            prefill="prefill-0", decode="decode-0", disaggregated=True, transferred_bytes=4096
        ),
        "timings": generation_pb2.Timings(prefill_ms=1.5, total_ms=9.0),
    }
    return generation_pb2.GenerateResponse(**{**values, **changes})


def test_json_has_the_documented_shape(router: Any, kvferry: Run) -> None:
    logprob = generation_pb2.TokenLogprob(
        token_id=5, logprob=-0.5, top=[generation_pb2.TopLogprob(token_id=6, logprob=-1.0)]
    )
    router.replies = [_last(token_ids=[4, 5], text="Paris", logprobs=[logprob])]
    result = kvferry("generate", "--endpoint", router.endpoint, "--prompt", "x", "--logprobs", "1", "--json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert answer.pop("timings")["prefill_ms"] == 1.5
    assert answer == {
        "request_id": "r1",
        "token_ids": [4, 5],
        "text": "Paris",
        "finish_reason": "length",
        "logprobs": [{"token_id": 5, "logprob": -0.5, "top": [{"token_id": 6, "logprob": -1.0}]}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1},
        "route": {
            "prefill": "prefill-0",
            "decode": "decode-0",
            "disaggregated": True,
            "transferred_bytes": 4096,
            "retries": 0,
        },
    }


def test_a_stream_is_put_together(router: Any, kvferry: Run) -> None:
    router.replies = [generation_pb2.GenerateResponse(request_id="r1", token_ids=[4], text="Paris "), _last()]
    result = kvferry("generate", "--endpoint", router.endpoint, "--prompt", "x", "--stream", "--json")
    answer = json.loads(result.stdout)
    assert (answer["token_ids"], answer["text"], answer["finish_reason"]) == ([4, 5], "Paris is", "length")
    assert answer["logprobs"] is None


def test_text_goes_to_stdout_and_the_route_to_stderr(router: Any, kvferry: Run) -> None:
    router.replies = [generation_pb2.GenerateResponse(text="Paris "), _last()]
    result = kvferry("generate", "--endpoint", router.endpoint, "--prompt", "x", "--stream")
    assert result.stdout == "Paris is\n"
    assert "prefill-0 -> decode-0" in result.stderr
    assert "4,096 KV bytes" in result.stderr


def test_every_sampling_flag_is_sent(router: Any, kvferry: Run) -> None:
    router.replies = [_last()]
    flags = "--max-tokens 7 --min-tokens 2 --temperature 0 --top-p 0.5 --top-k 3 --seed 9 --ignore-eos --logprobs 2"
    inputs = ["--chat", "hi", "--system", "be brief", "--stop", "a", "--stop", "b", "--model", "tiny"]
    result = kvferry("generate", "--endpoint", router.endpoint, *flags.split(), *inputs, "--json")
    assert result.exit_code == 0
    (request,) = router.requests
    sampling = request.sampling
    assert [(m.role, m.content) for m in request.chat.messages] == [("system", "be brief"), ("user", "hi")]
    assert request.model == "tiny"
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature, sampling.top_k) == (7, 2, 0.0, 3)
    assert (sampling.top_p, sampling.seed, sampling.ignore_eos, sampling.logprobs) == (0.5, 9, True, 2)
    assert list(sampling.stop) == ["a", "b"]


def test_token_ids_are_sent_as_given(router: Any, kvferry: Run) -> None:
    router.replies = [_last()]
    kvferry("generate", "--endpoint", router.endpoint, "--prompt-ids", "[1, 2, 70000]", "--json")
    assert list(router.requests[0].prompt_token_ids.ids) == [1, 2, 70000]
    assert not router.requests[0].sampling.HasField("seed")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--prompt", "x", "--temperature", "-1"], "temperature"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens"),
        (["--prompt", "x", "--top-p", "2"], "top_p"),
        (["--prompt", "x", "--chat", "y"], "prompt"),
        ([], "prompt"),
        (["--prompt-ids", "1,2"], "prompt_ids"),
        (["--prompt-ids", '"text"'], "prompt_ids"),
        (["--prompt-ids", "[1, -2]"], "prompt_ids"),
        (["--prompt-ids", "[true]"], "prompt_ids"),
        (["--prompt-ids", "[4294967296]"], "prompt_ids"),
    ],
)
def test_bad_input_exits_2_and_names_the_field(router: Any, kvferry: Run, arguments: list[str], field: str) -> None:
    result = kvferry("generate", "--endpoint", router.endpoint, *arguments, "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert (error["code"], error["field"]) == ("INVALID_ARGUMENT", field)
    assert router.requests == []


@pytest.mark.parametrize("mode", [[], ["--stream"]])
@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("prompt has 9000 tokens; the limit is 8191", field="prompt"),
        OverloadedError("the queue is full", retry_after_s=2.0),
    ],
)
def test_a_refusal_exits_2_with_the_servers_error(router: Any, kvferry: Run, mode: list[str], error: Any) -> None:
    router.replies, router.error = [generation_pb2.GenerateResponse(text="half an ans")], error
    result = kvferry("generate", "--endpoint", router.endpoint, "--prompt", "x", *mode, "--json")
    assert result.exit_code == 2
    expected = {"code": error.code.name, "message": error.message, "field": error.field or None}
    assert json.loads(result.stdout) == {"error": expected}


def test_nobody_there(kvferry: Run) -> None:
    result = kvferry("generate", "--endpoint", "127.0.0.1:1", "--prompt", "x", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["code"] == "UNAVAILABLE"


def test_no_cluster_in_the_state_directory(kvferry: Run, tmp_path: Any) -> None:
    result = kvferry("generate", "--state-dir", str(tmp_path), "--prompt", "x", "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["field"] == "state_dir"
    assert "kvferry up" in error["message"]
