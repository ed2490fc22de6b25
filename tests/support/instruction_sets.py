"""Fixtures for tests of compiled kernels, for whoever imports them: every instruction set this CPU has, two threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvferry.engine.native import kernels


@pytest.fixture(autouse=True, scope="module", params=kernels.available())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    before = kernels.selected()
    assert kernels.use(request.param)
    yield
    kernels.use(before)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
