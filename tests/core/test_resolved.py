import shlex

import pytest

from kvferry.core import Resolution, Source, resolved_line


def resolution(reason: str = "because", runtime: str | None = "PYTHON") -> Resolution:
    backend = "NIXL" if runtime else "NONE"
    source = Source.MODEL if runtime else None
    return Resolution("LlamaForCausalLM", backend, runtime, source, "V2", Source.USER, reason)


def parsed(line: str) -> dict[str, str]:
    word, *pairs = shlex.split(line)
    assert word == "resolved"
    return dict(pair.split("=", 1) for pair in pairs)


def test_the_line_is_stable() -> None:
    assert resolved_line("decode-0", "decode", resolution()) == (
        "resolved worker=decode-0 role=decode model=LlamaForCausalLM transceiver=NIXL/PYTHON transceiver_source=model "
        'kv_manager=V2 kv_manager_source=user reason="because"'
    )


def test_a_worker_of_several_ranks_says_how_many() -> None:
    line = resolved_line("decode-0", "decode", resolution(), (2, 3))
    assert line.endswith('kv_manager_source=user tensor_parallel=2 pipeline_parallel=3 reason="because"')


def test_aggregated_serving_has_dashes() -> None:
    fields = parsed(resolved_line("aggregated-0", "aggregated", resolution(runtime=None)))
    assert (fields["transceiver"], fields["transceiver_source"]) == ("-", "-")
    assert (fields["kv_manager"], fields["kv_manager_source"]) == ("V2", "user")


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ('it said "no"; V2=V1', "it said 'no'; V2=V1"),
        ("two\nlines\r\nand  a\ttab", "two lines and a tab"),
        ("a back\\slash", "a back/slash"),
        ("", ""),
    ],
)
def test_any_reason_stays_one_line_that_can_be_parsed(reason: str, shown: str) -> None:
    line = resolved_line("decode-0", "decode", resolution(reason))
    assert "\n" not in line
    fields = parsed(line)
    assert list(fields) == [
        "worker",
        "role",
        "model",
        "transceiver",
        "transceiver_source",
        "kv_manager",
        "kv_manager_source",
        "reason",
    ]
    assert fields["reason"] == shown


def test_sources_are_words() -> None:
    assert {source.value for source in Source} == {"user", "model", "default", "demoted"}
