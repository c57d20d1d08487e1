"""Turns the garbage collector off while code creates many long-lived objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_frozen = False
"""Whether this process has called `gc.freeze`, which it does only once. `gc.get_freeze_count` would also tell, but it counts all
frozen objects, which takes 40 ms.
"""


@contextmanager
def gc_paused(freeze: bool = False) -> Iterator[None]:
    """A context manager that turns the garbage collector off. Use it for code that creates very many long-lived objects: the
    collector would scan them repeatedly without freeing any.

    freeze: also exclude all objects that exist at the end of the block from later collections (`gc.freeze`), because they live as
    long as the program. Only the first such block in a process does this, so that models opened later can be freed.
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
