"""What the app refuses in a read-only session. Viewers may look and cast there, but neither read nor write files."""

from __future__ import annotations

from dtype_tui.config.key_names import name_of

HIDDEN = frozenset({"leave-with", "suspend-process", "tour"})
"""The ids of key bindings that a read-only session neither runs nor shows. Suspending the app would give viewers a shell."""


def refuses(action: str) -> bool:
    """Return whether a read-only session refuses an action of a key or command, such as `leave_with`."""
    return name_of(action) in HIDDEN or action == "download_model"
