"""Turns the garbage collector off while code creates many long-lived objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused(freeze: bool = False) -> Iterator[None]:
    """Turn the garbage collector off during the block. Use it for code that creates very many long-lived objects, which the
    collector would otherwise scan repeatedly without freeing any.

    freeze: exclude all objects that exist at the end of the block from later collections (`gc.freeze`), because they live as long
    as the program. In each process, only the first block with `freeze` does so, so that models opened later can be freed.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if freeze and not gc.get_freeze_count():
                gc.freeze()
            gc.enable()
