"""Turns Python's cyclic garbage collector on again, which is off during imports and model loading, when long-lived objects are
allocated. It would take a fifth of the time to the first paint, or delay the response to a key by 250 ms.
"""

from __future__ import annotations

import gc


def resume_gc(late: bool = False) -> None:
    """Turn the garbage collector on again. It ignores all objects that exist now. late: first collect the accumulated garbage."""
    if not gc.isenabled():
        if late:
            gc.collect()
        gc.freeze()
        gc.enable()
