"""Things that are found by name, to which modules of the user's own may add: algorithms, interfaces, hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from realsys.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """``kind``: what one of them is called; ``plugins``: the field that names the modules which may add to them."""

    def __init__(self, kind: str, plugins: str) -> None:
        self.kind, self._plugins = kind, plugins
        self._items: dict[str, T] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._items)

    def add(self, name: str, item: T) -> None:
        """Raises ConfigError when the name is taken."""
        if name in self._items:
            raise ConfigError(
                self._plugins, name, f"this {self.kind} is registered already, by {_where(self.find(name))}"
            )
        self._items[name] = item

    def register(self, name: str) -> Callable[[T], T]:
        """The same as a decorator."""

        def register(item: T) -> T:
            self.add(name, item)
            return item

        return register

    def find(self, name: str, field: str = "") -> T:
        """Raises ConfigError with the known ones, for ``field`` of the configuration where it is one that names it."""
        if name not in self._items:
            raise ConfigError(field or self.kind, name, unknown(self.kind, self.names, self._plugins))
        return self._items[name]


def unknown(kind: str, known: list[str], plugins: str) -> str:
    """What is wrong with a name that nobody has registered."""
    return f"unknown {kind}; known: {', '.join(known)} (yours: name its module in {plugins})"


def _where(item: object) -> str:
    """Module of a function, or of an object's class."""
    return str(getattr(item, "__module__", type(item).__module__))
