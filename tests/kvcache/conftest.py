"""Small managers and one request's life in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings

from kvferry.core import GroupKind, KVLayout
from kvferry.kvcache import KVCache, KVCacheManager, create_manager

# Random histories per state machine; `make fuzz` selects the deeper profile.
DEEPER = "fuzz"
settings.register_profile(DEEPER)
SEQUENCES = 2_000
FEW = 100
TIMES_DEEPER = {SEQUENCES: 10, FEW: 20}

MakeManager = Callable[..., KVCacheManager]
Serve = Callable[..., KVCache]


@pytest.fixture(params=[("V1", "python"), ("V2", "cpp"), ("V2", "python")], ids=lambda pair: "-".join(pair))
def implementation(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Version and core of every manager there is."""
    pair: tuple[str, str] = request.param
    return pair


@pytest.fixture
def version(implementation: tuple[str, str]) -> str:
    return implementation[0]


@pytest.fixture
def core(implementation: tuple[str, str]) -> str:
    return implementation[1]


@pytest.fixture
def make_manager(version: str, core: str) -> MakeManager:
    """make_manager(blocks, window=None, tokens_per_block=4, **settings): a full group, and a window group if asked."""

    def make(
        blocks: int, *, window: int | None = None, tokens_per_block: int = 4, debug: bool = False, reuse: bool = True
    ) -> KVCacheManager:
        layouts = [KVLayout(GroupKind.FULL, (0, 1), 1, 2, tokens_per_block=tokens_per_block)]
        if window is not None:
            layouts.append(KVLayout(GroupKind.WINDOW, (2,), 1, 2, tokens_per_block=tokens_per_block, window=window))
        nbytes = blocks * sum(layout.slot_nbytes for layout in layouts)
        return create_manager(version, layouts, nbytes, prefix_reuse=reuse, debug=debug, core=core)

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


@pytest.fixture
def histories() -> settings:
    """How many random histories a state machine goes through, and how long they are."""
    return _histories(SEQUENCES)


@pytest.fixture
def few_histories() -> settings:
    """For machines that differ in one respect from one that goes through all of them."""
    return _histories(FEW)


def _fuzzing() -> bool:
    return settings.get_current_profile_name() == DEEPER


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The deeper profile takes as long as it takes."""
    if _fuzzing():
        for item in items:
            item.add_marker(pytest.mark.timeout(0), append=False)


def _histories(count: int) -> settings:
    return settings(
        max_examples=count * TIMES_DEEPER[count] if _fuzzing() else count,
        stateful_step_count=30,
        deadline=None,
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
