"""Default callbacks that do nothing. Each has a name that `help()` can show."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Fixed(Generic[T]):
    """A callback that accepts any arguments and always returns the same value.

    Its `repr` is its name, which `help()` shows for an argument's default. For a function, `help()` would show an address.
    """

    def __init__(self, name: str, value: T) -> None:
        self._name = name
        self._value = value

    def __call__(self, *_: object) -> T:
        return self._value

    def __repr__(self) -> str:
        return self._name


ignore = Fixed("ignore", None)
"""The default for progress callbacks."""
