"""A name -> thing table: duplicates raise, an unknown name lists the choices."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Generic, TypeVar

from kvferry.core.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """`kind` and `field` word the errors: Registry[Policy]("routing policy", "router.policy")."""

    def __init__(self, kind: str, field: str = "") -> None:
        self.kind = kind
        self.field = field
        self._entries: dict[str, T] = {}

    def register(self, name: str, entry: T) -> T:
        """Adds `entry` and returns it. Raises ConfigError when `name` is taken."""
        if name in self._entries:
            raise ConfigError(f"{self.kind} {name!r} is registered twice", field=self.field)
        self._entries[name] = entry
        return entry

    def get(self, name: str) -> T:
        """Raises ConfigError naming the choices (the nearest ones first) when `name` is unknown."""
        try:
            return self._entries[name]
        except KeyError:
            near = get_close_matches(name, self._entries, n=3)
            hint = f"did you mean {', '.join(near)}? " if near else ""
            choices = ", ".join(sorted(self._entries))
            raise ConfigError(f"unknown {self.kind} {name!r}: {hint}known: {choices}", field=self.field) from None

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
