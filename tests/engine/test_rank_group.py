"""What the ranks of a worker say to each other, two of them on threads: whole, in any dtype, and never for ever."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvferry.engine.rank_group import RankGroup, RankLostError
from kvferry.models import Shard

CPU = torch.device("cpu")


def together(
    shards: list[Shard], folder: Path, act: Callable[[RankGroup, Shard], object], timeout_s: float = 20
) -> list:
    """What `act` returned on each rank."""

    def run(shard: Shard) -> object:
        return act(RankGroup(shard, folder, CPU, timeout_s), shard)

    with ThreadPoolExecutor(len(shards)) as threads:
        return list(threads.map(run, shards))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_arrive_in_the_dtype_they_are_computed_in(dtype: torch.dtype, tmp_path: Path) -> None:
    """Stages on GPUs compute in bfloat16, which no CPU worker does."""
    hidden = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)

    def act(group: RankGroup, shard: Shard) -> torch.Tensor:
        if shard.first_stage:
            group.send(hidden.t().contiguous().t(), 1)
            return hidden
        return group.receive(5, 7, 0, dtype)

    sent, received = together([Shard(0, 1, 0, 2), Shard(0, 1, 1, 2)], tmp_path, act)
    assert received.dtype is dtype
    assert torch.equal(sent, received)


def test_sums_and_rows_are_the_same_on_every_rank(tmp_path: Path) -> None:
    def act(group: RankGroup, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.full((3, 2 + shard.tp_rank), 1.0 + shard.tp_rank)
        return group.sum(torch.tensor([1.5, 10.0]) * (1 + shard.tp_rank)), group.side_by_side(own, [2, 3])

    for total, rows in together([Shard(0, 2), Shard(1, 2)], tmp_path, act):
        assert total.tolist() == [4.5, 30.0]
        assert rows.tolist() == [[1.0, 1.0, 2.0, 2.0, 2.0]] * 3


@pytest.mark.parametrize("length", [1, 1022, 1023, 1024, 5000])
def test_messages_of_any_length_are_heard(length: int, tmp_path: Path) -> None:
    words = array("q", range(-3, length - 3))

    def act(group: RankGroup, shard: Shard) -> list[int]:
        if shard.rank:
            return group.listen()
        group.announce(words)
        return list(words)

    said, heard = together([Shard(0, 2), Shard(1, 2)], tmp_path, act)
    assert said == heard


def test_a_rank_that_does_not_take_part_is_lost_in_bounded_time(tmp_path: Path) -> None:
    def act(group: RankGroup, shard: Shard) -> float:
        started = time.monotonic()
        if shard.tp_rank:
            with pytest.raises(RankLostError, match="a rank of this worker is gone"):
                group.sum(torch.ones(2))
        return time.monotonic() - started

    assert together([Shard(0, 2), Shard(1, 2)], tmp_path, act, timeout_s=2)[1] < 20
    alone = tmp_path / "alone"
    alone.mkdir()
    with pytest.raises(RankLostError, match="cannot meet"):
        RankGroup(Shard(0, 2), alone, CPU, 0.5)
