"""A catalog of cards for every combination of preferences, and one call that resolves them."""

from collections.abc import Callable, Iterable
from itertools import product

import pytest

from kvferry.core import Resolution
from kvferry.resolution import Card, Catalog, ResolveRequest, resolve
from kvferry.resolution.architectures import make_registry

PREFERENCES = ("none", "PYTHON", "CPP")
MANAGERS = ("none", "V1", "V2")

Resolver = Callable[..., Resolution]


def _cards() -> Iterable[Card]:
    for runtime, manager, required in product(PREFERENCES, MANAGERS, (False, True)):
        yield Card(
            f"{runtime}-{manager}-{'requires' if required else 'free'}",
            prefers_runtime=runtime,
            prefers_manager=manager,
            requires_manager="V2" if required else "none",
        )


@pytest.fixture(scope="session")
def preference_catalog() -> Catalog:
    return Catalog(cards=make_registry(_cards()))


@pytest.fixture(scope="session")
def resolve_preferring(preference_catalog: Catalog) -> Resolver:
    """resolve(prefers_runtime, prefers_manager, required=False, **request fields)"""

    def resolve_with(
        prefers_runtime: str, prefers_manager: str, required: bool = False, **settings: object
    ) -> Resolution:
        name = f"{prefers_runtime}-{prefers_manager}-{'requires' if required else 'free'}"
        return resolve(ResolveRequest(name, **settings), preference_catalog)  # type: ignore[arg-type]

    return resolve_with
