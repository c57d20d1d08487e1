"""Where `dtype-tui` begins: nothing is imported before this, and no garbage collected until the first paint."""

from __future__ import annotations

import gc


def main() -> None:
    """The `dtype-tui` program."""
    # What the imports make is there to stay. Looking through it again and again takes a fifth of the way to the first paint.
    gc.disable()
    from .cli import main as go_on

    go_on()


def collect_again() -> None:
    """Collect garbage from now on, but never among what the start left: every pass over that would hold up a key."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
