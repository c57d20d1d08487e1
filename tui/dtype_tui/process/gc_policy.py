"""Decides when Python's cyclic garbage collector runs.

The collector is off during imports and model loading, which allocate long-lived objects. A collection would otherwise take a fifth
of the time to the first paint, or delay the response to a key by 250 ms.
"""

from __future__ import annotations

import gc


def pause_gc() -> None:
    """Turn the collector off until `resume_gc` is called."""
    gc.disable()


def resume_gc(late: bool = False) -> None:
    """Turn the collector on again, and exempt all objects that exist now from collection. late: first collect the accumulated
    garbage.
    """
    if not gc.isenabled():
        if late:
            gc.collect()
        gc.freeze()
        gc.enable()
