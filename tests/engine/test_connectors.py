"""An external KV store under an engine: found by one, computed by another."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from memory_connector import MemoryConnector

from kvferry.core import ConfigError, DType, GroupKind, KVLayout, Registry, SamplingParams
from kvferry.engine import LLM
from kvferry.engine.connectors import block_namespace, open_connector

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPT = {"prompt_token_ids": [(11 * i) % 400 for i in range(100)]}
LAYOUT = KVLayout(GroupKind.FULL, (0, 1), 1, 2)


def engine(model_dir: Path, folder: Path, **settings: Any) -> LLM:
    return LLM(
        model_dir,
        kv_connector="directory",
        kv_connector_address=str(folder),
        **{"kv_bytes": 8 << 20, "threads": 1, **settings},
    )


def test_a_second_engine_starts_where_the_first_one_was(
    tiny_llama_dir: Path, tmp_path: Path, reference: Any, assert_golden: Any
) -> None:
    with engine(tiny_llama_dir, tmp_path) as first:
        assert (first.resolution.manager, first.resolution.manager_source.value) == ("V1", "demoted")
        [computed] = first.generate([PROMPT], GREEDY)
        assert computed.usage.cached_tokens == 0
    with engine(tiny_llama_dir, tmp_path) as second:
        [loaded] = second.generate([PROMPT], GREEDY)
        assert loaded.usage.cached_tokens == 96
        assert second.manager.statistics().loaded_tokens == 96
        assert loaded.token_ids == computed.token_ids
        assert_golden(reference.load(tiny_llama_dir), PROMPT["prompt_token_ids"], loaded.token_ids)
        [salted] = second.generate([{**PROMPT, "cache_salt": "other"}], GREEDY)
        assert salted.usage.cached_tokens == 0


def test_a_damaged_store_changes_no_answer(tiny_llama_dir: Path, tmp_path: Path) -> None:
    with engine(tiny_llama_dir, tmp_path) as first:
        [computed] = first.generate([PROMPT], GREEDY)
    files = sorted(tmp_path.rglob("*.kv"))
    assert len(files) == 7, "six full blocks of the prompt and one of the answer"
    for path in files:
        record = bytearray(path.read_bytes())
        record[-1] ^= 1
        path.write_bytes(record)
    with engine(tiny_llama_dir, tmp_path) as second:
        [again] = second.generate([PROMPT], GREEDY)
        assert again.usage.cached_tokens == 0
        assert again.token_ids == computed.token_ids


def test_beams_find_what_was_saved(tiny_llama_dir: Path, tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        with engine(tiny_llama_dir, tmp_path, beam_width=3) as llm:
            [completion] = llm.beam_search([PROMPT], 3, 20)
            found.append([sequence.token_ids for sequence in completion.sequences])
            loaded = llm.manager.statistics().loaded_tokens
    assert loaded == 96
    assert found[0] == found[1]


def test_a_namespace_names_all_that_gives_blocks_their_bytes() -> None:
    names = {
        block_namespace(layouts, fingerprint, precision)
        for layouts, fingerprint, precision in [
            ([LAYOUT], "a", "fp32"),
            ([LAYOUT], "b", "fp32"),
            ([LAYOUT], "a", "int8"),
            ([dataclasses.replace(LAYOUT, tokens_per_block=32)], "a", "fp32"),
            ([dataclasses.replace(LAYOUT, dtype=DType.BFLOAT16)], "a", "fp32"),
            ([LAYOUT, dataclasses.replace(LAYOUT, layers=(2,))], "a", "fp32"),
        ]
    }
    assert len(names) == 6
    assert all(len(name) == 32 and int(name, 16) >= 0 for name in names)


def test_what_cannot_be_opened_names_its_setting(tiny_llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match="known: directory") as caught:
        open_connector("nobody", "", [LAYOUT], "a", "fp32")
    assert caught.value.field == "kv_cache.connector"
    with pytest.raises(ConfigError) as caught:
        LLM(tiny_llama_dir, kv_connector="directory", kv_bytes=8 << 20, threads=1)
    assert caught.value.field == "kv_cache.connector_address"


@pytest.mark.parametrize("path", ["nowhere:build", "memory_connector:Nobody"])
def test_a_builder_that_is_not_there_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, path)
    with pytest.raises(ConfigError, match="cannot be imported") as caught:
        open_connector("theirs", "", [LAYOUT], "a", "fp32")
    assert caught.value.field == "kv_cache.connector"


def test_a_builder_must_build_a_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "builtins:repr")
    with pytest.raises(ConfigError, match="must build a KVConnector, not str"):
        open_connector("theirs", "", [LAYOUT], "a", "fp32")


def test_a_third_party_s_connector_gets_address_namespace_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "memory_connector:MemoryConnector")
    connector = open_connector("theirs", "tcp://store", [LAYOUT], "a", "fp32")
    assert isinstance(connector, MemoryConnector)
    assert connector.parts is not None
    assert connector.parts.address == "tcp://store"
    assert connector.parts.namespace == block_namespace([LAYOUT], "a", "fp32")
    assert connector.parts.block_nbytes == LAYOUT.slot_nbytes


def register(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    registry: Registry[str] = Registry("KV connector", "kv_cache.connector")
    registry.register("theirs", path)
    monkeypatch.setattr("kvferry.engine.connectors.default_connectors", lambda: registry)
