"""The garbage collector, left off where it would find nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused(freeze: bool = False) -> Iterator[None]:
    """Leave the collector off while the block makes very many objects that live on: it would look through them again and again.

    freeze: what was made until the end of the block is never looked through, as it lives as long as the program. Only the first
    such block of a process freezes: what a process that opens many models makes later is not kept.
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
