"""Turns the garbage collector off while code creates many long-lived objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_frozen = False
"""Whether a block has frozen its objects. `gc.get_freeze_count` would count them one by one, 40 ms each time."""


@contextmanager
def gc_paused(freeze: bool = False) -> Iterator[None]:
    """Turn the garbage collector off during the block. Use it for code that creates very many long-lived objects, which the
    collector would otherwise scan repeatedly without freeing any.

    freeze: exclude all objects that exist at the end of the block from later collections (`gc.freeze`), because they live as long
    as the program. In each process, only the first block with `freeze` does so, so that models opened later can be freed.
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
