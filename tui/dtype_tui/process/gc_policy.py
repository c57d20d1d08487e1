"""When the garbage collector runs.

Garbage is not looked for while something is loaded: what the imports and the model make is there to stay, and every pass over
it would take a fifth of the way to the first paint, and later hold up a key for a quarter of a second.
"""

from __future__ import annotations

import gc


def pause_gc() -> None:
    """Look for no garbage until `resume_gc`: something is loaded now."""
    gc.disable()


def resume_gc() -> None:
    """Look for garbage from now on, but never among what is there already."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
