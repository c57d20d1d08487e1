"""Callbacks that do nothing, as defaults: `help()` shows them by their names."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Fixed(Generic[T]):
    """A callback that takes anything and returns one value. `repr` gives its name, where that of a function is an address."""

    def __init__(self, name: str, value: T) -> None:
        self._name = name
        self._value = value

    def __call__(self, *_: object) -> T:
        return self._value

    def __repr__(self) -> str:
        return self._name


ignore = Fixed("ignore", None)
"""Progress that the caller does not follow."""
