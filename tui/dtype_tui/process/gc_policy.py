"""When Python's cyclic garbage collector runs.

It is off during imports and model loading. The objects allocated then live long, and a collection takes a fifth of the time to the
first paint, or delays the response to a key by 250 ms.
"""

from __future__ import annotations

import gc


def pause_gc() -> None:
    """Turn the collector off until `resume_gc` is called."""
    gc.disable()


def resume_gc(late: bool = False) -> None:
    """Turn the collector on again, and exempt all objects allocated so far. late: collect first, since garbage has accumulated."""
    if not gc.isenabled():
        if late:
            gc.collect()
        gc.freeze()
        gc.enable()
