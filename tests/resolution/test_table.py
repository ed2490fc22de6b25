from pathlib import Path

import pytest

from kvferry.resolution import CARDS
from kvferry.resolution.table import (
    ARCHITECTURE_COLUMNS,
    BEGIN,
    END,
    architecture_rows,
    generated_part,
    main,
    transceiver_cells,
    with_generated_part,
)

PAGE = Path(__file__).parents[2] / "docs" / "resolution.md"


def test_the_manual_holds_the_registry_as_it_is() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_generated_part(page), "run: python -m kvferry.resolution.table docs/resolution.md"


def test_every_card_is_a_row() -> None:
    rows = architecture_rows()
    assert sorted(row.facts.architecture for row in rows) == CARDS.names()
    assert all(len(row.cells()) == len(ARCHITECTURE_COLUMNS) for row in rows)


def test_rows_say_what_the_cards_say() -> None:
    cells = {row.facts.architecture: row.cells() for row in architecture_rows()}
    assert cells["LlamaForCausalLM"] == ("LlamaForCausalLM", "PYTHON", "V2", "-", "validated", "on", "-", "yes")
    assert cells["MiniMaxM2ForCausalLM"][1:5] == ("-", "V2", "-", "unvalidated")
    assert cells["NemotronH_Nano_VL_V2"][5:7] == ("opt-in", "NemotronHForCausalLM")
    assert cells["Gemma4ForCausalLM"][3] == "V2 (by config)"


def test_transceivers() -> None:
    assert ("NIXL", "PYTHON", "V1, V2", "must be finite", "nixl_cu12", "yes") in transceiver_cells()
    assert [cells[0] for cells in transceiver_cells()].count("MPI") == 1


def test_only_what_lies_between_the_markers_is_made_anew() -> None:
    made = with_generated_part(f"before\n{BEGIN}\nstale\n{END}\nafter\n")
    assert made == f"before\n{generated_part()}\nafter\n"
    with pytest.raises(ValueError, match="no generated part"):
        with_generated_part("no markers")


def test_the_command_rewrites_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    assert main([str(page)]) == 0
    assert page.read_text() == generated_part() + "\n"
    said: list[str] = []
    assert main([], said.append) == 2
    assert said == ["usage: python -m kvferry.resolution.table PAGE\n"]
