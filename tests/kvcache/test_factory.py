"""Choosing and refusing managers."""

from __future__ import annotations

import dataclasses

import pytest

from kvferry.core import ConfigError, GroupKind, KVLayout
from kvferry.kvcache import MANAGERS, create_manager

FULL = KVLayout(GroupKind.FULL, (0, 1), 2, 8)


def test_managers_say_who_they_are(version: str, core: str) -> None:
    manager = create_manager(version, [FULL], 1 << 20, core=core)
    assert (manager.version, manager.core) == (version, core)
    assert manager.pools[0].layout == FULL
    assert manager.counts().total == (1 << 20) // FULL.slot_nbytes


def test_the_cpp_core_is_the_default_where_there_is_one() -> None:
    assert {version: create_manager(version, [FULL], 1 << 20).core for version in MANAGERS} == {
        "V1": "python",
        "V2": "cpp",
    }


def test_an_unknown_core_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match="cpp, python") as caught:
        create_manager("V2", [FULL], 1 << 20, core="rust")
    assert caught.value.field == "kv_cache.core"


def test_an_unknown_version_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match="V1, V2") as caught:
        create_manager("V3", [FULL], 1 << 20)
    assert caught.value.field == "kv_cache.manager"


@pytest.mark.parametrize(
    ("layouts", "field", "message"),
    [
        ([], "model", "at least one layer group"),
        ([FULL, dataclasses.replace(FULL, layers=(1, 2))], "model", r"\[1\] stand in two"),
        (
            [FULL, dataclasses.replace(FULL, layers=(2,), tokens_per_block=32)],
            "kv_cache.tokens_per_block",
            r"\[16, 32\]",
        ),
        ([dataclasses.replace(FULL, kind=GroupKind.WINDOW)], "model", "window must be at least 1 token, got None"),
    ],
)
def test_layouts_that_cannot_be_held_are_refused(
    version: str, layouts: list[KVLayout], field: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        create_manager(version, layouts, 1 << 20)
    assert caught.value.field == field


def test_a_budget_too_small_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache\.bytes"):
        create_manager(version, [FULL], 100)
