"""Gives an attribute of another library another value for a while. Nothing else in the engine changes other libraries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def replaced(holder: object, name: str, value: object) -> Iterator[None]:
    """During the `with` block, give the attribute `name` of `holder`, a library's module or class, another value."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)
