"""What one rank's bookkeeping did to its pages can be done to another's, and gives the same bytes and generations."""

from __future__ import annotations

import pytest
import torch

from kvferry.core import ConfigError, GroupKind, KVLayout
from kvferry.kvcache import PageChange, PageLog, create_manager, repeat_changes
from kvferry.kvcache.pool import Pages, build_pool

LAYOUT = KVLayout(GroupKind.FULL, layers=(0,), kv_heads=1, head_dim=2, tokens_per_block=4)


@pytest.mark.parametrize("version", ["V1", "V2"])
def test_a_second_rank_follows_the_first(version: str) -> None:
    log = PageLog()
    manager = create_manager(version, [LAYOUT], 16 * LAYOUT.slot_nbytes, page_log=log)
    other = build_pool(LAYOUT, 16, "cpu")
    pages = Pages([other], debug=False)
    [pool] = manager.pools
    tokens = list(range(14))
    cache = manager.open("", tokens, max_reuse=0)
    cache.reserve(14)
    for changed in (pool, other):  # what a forward pass would write, the same everywhere
        changed.view[list(cache.block_table(0))] = torch.arange(64.0).view(4, 1, 2, 1, 4, 2)
    cache.advance(14)
    cache.commit(tokens)
    cache.close()
    again = manager.open("", [*tokens[:10], 99, 98], max_reuse=11, min_partial=1)
    again.reserve(12)
    changes = log.drain()
    assert {change.change for change in changes} >= {PageChange.CLAIM}
    assert (PageChange.COPY in {change.change for change in changes}) == (again.reused == 10)
    assert again.reused == (10 if version == "V2" else 8)
    repeat_changes(changes, pages)
    assert log.drain() == []
    table = list(again.block_table(0))
    assert torch.equal(other.generations, pool.generations)
    assert torch.equal(other.view[table], pool.view[table])
    again.close()


def test_zeroing_is_repeated_too() -> None:
    log, pools = PageLog(), [build_pool(LAYOUT, 2, "cpu") for _ in range(2)]
    first, second = Pages([pools[0]], debug=False, log=log), Pages([pools[1]], debug=False)
    for pool in pools:
        pool.buffer.fill_(7)
    first.zero(0, 1)
    repeat_changes(log.drain(), second)
    assert pools[1].buffer.tolist() == pools[0].buffer.tolist()
    assert pools[1].view[1].abs().sum() == 0
    assert int(pools[1].buffer[0]) == 7


def test_several_ranks_have_no_tiers_below() -> None:
    with pytest.raises(ConfigError, match="no tiers below") as caught:
        create_manager("V2", [LAYOUT], 4096, host_bytes=4096, page_log=PageLog())
    assert caught.value.field == "kv_cache.host_bytes"
