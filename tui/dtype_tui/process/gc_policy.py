"""When the garbage collector runs.

The cyclic collector is off during imports and model loading: what they allocate is long-lived, and a collection takes a fifth of
the time to the first paint, or stalls a key for 250 ms.
"""

from __future__ import annotations

import gc


def pause_gc() -> None:
    """Stop collecting until `resume_gc`."""
    gc.disable()


def resume_gc(late: bool = False) -> None:
    """Collect again, but never what is allocated by now. `late`: garbage has gathered meanwhile, and is collected first."""
    if not gc.isenabled():
        if late:
            gc.collect()
        gc.freeze()
        gc.enable()
