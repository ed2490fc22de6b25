"""Small managers and one request's life in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvferry.core import GroupKind, KVLayout
from kvferry.kvcache import KVCache, KVCacheManager, create_manager

MakeManager = Callable[..., KVCacheManager]
Serve = Callable[..., KVCache]


@pytest.fixture(params=["V1", "V2"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_manager(version: str) -> MakeManager:
    """make_manager(blocks, window=None, tokens_per_block=4, **settings): a full group, and a window group if asked."""

    def make(
        blocks: int, *, window: int | None = None, tokens_per_block: int = 4, kind: str = version, debug: bool = False
    ) -> KVCacheManager:
        layouts = [KVLayout(GroupKind.FULL, (0, 1), 1, 2, tokens_per_block=tokens_per_block)]
        if window is not None:
            layouts.append(KVLayout(GroupKind.WINDOW, (2,), 1, 2, tokens_per_block=tokens_per_block, window=window))
        nbytes = blocks * sum(layout.slot_nbytes for layout in layouts)
        return create_manager(kind, layouts, nbytes, debug=debug)

    return make


@pytest.fixture
def serve() -> Serve:
    """serve(manager, tokens, scope="", reuse=None, priority=0): an open cache that holds and has committed `tokens`."""

    def run(
        manager: KVCacheManager, tokens: Sequence[int], scope: str = "", reuse: int | None = None, priority: int = 0
    ) -> KVCache:
        limit = len(tokens) - 1 if reuse is None else reuse
        cache = manager.open(scope, tokens, max_reuse=limit, priority=priority)
        try:
            cache.reserve(len(tokens))
        except Exception:
            cache.close()
            raise
        cache.advance(len(tokens))
        cache.commit(tokens)
        return cache

    return run
