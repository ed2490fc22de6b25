"""Copies on a thread of their own."""

from __future__ import annotations

import threading

import pytest
import torch

from kvferry.kvcache import BackgroundCopier, RowCopy


def rows(slots: int, start: int = 0) -> torch.Tensor:
    """uint8 [slots, 8]: each row holds its number."""
    return torch.arange(start, start + slots, dtype=torch.uint8).view(slots, 1).expand(slots, 8).clone()


def test_copies_are_made_in_order_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    copier = BackgroundCopier("cpu")
    first, second, third = rows(8), torch.zeros((8, 8), dtype=torch.uint8), torch.zeros((8, 8), dtype=torch.uint8)
    threads: list[str] = []
    copier._caller.submit(lambda: threads.append(threading.current_thread().name))
    # The second reads what the first has written; several stretches each.
    copier.submit([RowCopy(second, [4, 5, 0], first, [1, 2, 7])])
    done = copier.submit([RowCopy(third, [1, 2, 3], second, [0, 4, 5]), RowCopy(third, [7], first, [3])])
    done.result(10)
    assert second[:, 0].tolist() == [7, 0, 0, 0, 1, 2, 0, 0]
    assert third.tolist() == [[n] * 8 for n in (0, 7, 1, 2, 0, 0, 0, 3)]
    assert threads == ["kv-copier"]
    copier.close()


def test_a_copy_counts_its_bytes_and_can_be_made_in_place() -> None:
    source, target = rows(4), torch.zeros((4, 8), dtype=torch.uint8)
    copy = RowCopy(target, [0, 2], source, [3, 1])
    assert copy.nbytes == 16
    copy.make()
    assert target[:, 0].tolist() == [3, 0, 1, 0]


def test_what_a_copy_raises_is_told_to_who_waits_for_it() -> None:
    copier = BackgroundCopier("cpu")
    failed = copier.submit(
        [RowCopy(torch.zeros((1, 8), dtype=torch.uint8), [0], torch.zeros((1, 4), dtype=torch.uint8), [0])]
    )
    with pytest.raises(ValueError, match="broadcast"):
        failed.result(10)
    copier.submit([]).result(10)
    copier.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_s_rows_are_copied_behind_what_was_computed_before() -> None:
    copier = BackgroundCopier("cuda")
    pool = torch.zeros((64, 1 << 20), dtype=torch.uint8, device="cuda")
    below = torch.zeros((64, 1 << 20), dtype=torch.uint8, pin_memory=True)
    for slot in range(64):
        pool[slot] = slot
    copier.submit([RowCopy(below, list(range(64)), pool, list(range(64))[::-1])]).result(60)
    assert below.min(dim=1).values.tolist() == below.max(dim=1).values.tolist() == list(range(64))[::-1]
    pool.zero_()
    copier.submit([RowCopy(pool, list(range(64)), below, list(range(64)))]).result(60)
    assert pool.cpu().equal(below)
    copier.close()
