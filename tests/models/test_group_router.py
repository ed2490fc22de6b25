"""Experts chosen among the best groups of them."""

from __future__ import annotations

import pytest
import torch

from kvferry.models.group_router import GroupRouter, RouterShape


def test_experts_outside_the_best_groups_are_never_chosen() -> None:
    """Expert 0 scores highest of all, but its group's second is poor; a group counts by its best two."""
    logits = torch.tensor([[9.0, -9.0, 1.0, 1.0, 0.5, 0.5]])
    router = GroupRouter(lambda x: logits, torch.zeros(6), RouterShape(6, 2, 3, 1, True, 2.0))
    routing = router(torch.zeros(1, 4))
    assert sorted(routing.experts[0].tolist()) == [2, 3]
    assert routing.shares[0].tolist() == pytest.approx([1.0, 1.0])


def test_the_correction_chooses_but_does_not_weigh() -> None:
    router = GroupRouter(
        lambda x: torch.zeros(1, 4), torch.tensor([0.0, 5.0, 0.0, 4.0]), RouterShape(4, 2, 1, 1, False, 1.0)
    )
    routing = router(torch.zeros(1, 4))
    assert sorted(routing.experts[0].tolist()) == [1, 3]
    assert routing.shares[0].tolist() == [0.5, 0.5]
