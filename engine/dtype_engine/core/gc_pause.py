"""Turns the garbage collector off while code creates many long-lived objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_frozen = False
"""Whether `gc.freeze` was called. `gc.get_freeze_count` would tell, too, but takes 40 ms, because it counts all objects."""


@contextmanager
def gc_paused(freeze: bool = False) -> Iterator[None]:
    """A context manager that turns the garbage collector off for code that creates very many long-lived objects, since the
    collector would scan them repeatedly.

    freeze: also exclude all objects that then exist from later collections, because they live as long as the program. Only the
    first block with `freeze` in a process does this, so that models opened later can be freed.
    """
    global _frozen
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if freeze and not _frozen:
                gc.freeze()
                _frozen = True
            gc.enable()
