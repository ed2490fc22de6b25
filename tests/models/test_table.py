"""docs/models.md says what the cards, the implementations and the tests say."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import random_checkpoint
from families import DISAGGREGATED, FAMILIES, NEEDS_V2

from kvferry.core import DType
from kvferry.models import load_model, torch_operators
from kvferry.models.table import FAMILIES as TABLE
from kvferry.models.table import main, rows, unimplemented, with_generated_part
from kvferry.resolution import CARDS, find_card, read_config

LLAMA = "kvferry.models.llama:Llama"
"""Its other routes are those of the end-to-end tests with SmolLM2."""
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_generated_part(page), "run: python -m kvferry.models.table docs/models.md"


def test_every_architecture_is_either_in_the_table_or_named_below_it() -> None:
    named = [row[0] for row in rows()] + unimplemented()
    assert sorted(named) == sorted(f"`{name}`" for name in CARDS)


def test_the_table_has_no_family_that_no_card_names() -> None:
    assert set(TABLE) == {CARDS.get(name).implementation for name in CARDS} - {None}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_said_to_do_what_its_tests_do(name: str, tmp_path: Path) -> None:
    model_dir = random_checkpoint(FAMILIES[name](), tmp_path)
    card = find_card(read_config(model_dir))
    assert card.implementation is not None
    family = TABLE[card.implementation]
    model = load_model(model_dir, torch_operators())
    assert {layout.kind for layout in model.layouts(16, DType.FLOAT32)} <= set(family.groups)
    assert family.one_worker == (("V2",) if name in NEEDS_V2 else ("V1", "V2"))
    tried = {manager for manager, names in DISAGGREGATED.items() if name in names}
    assert tried <= set(family.apart)
    if card.implementation != LLAMA:
        assert tried == set(family.apart)


def test_a_page_without_markers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no generated part"):
        with_generated_part("# Models")
    said: list[str] = []
    assert main([], said.append) == 2
    assert "usage" in said[0]
