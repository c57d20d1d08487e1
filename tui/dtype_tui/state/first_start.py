"""Detects that this user starts the program for the first time."""

from __future__ import annotations

from dtype_engine.core.user_folders import state_folder


def is_first_start() -> bool:
    """Return whether the state folder is missing or empty, and mark the folder, so that later calls return False. Also returns
    False if the folder can't be marked.
    """
    folder = state_folder()
    try:
        if folder.exists() and any(folder.iterdir()):
            return False
        note_start()
    except OSError:
        return False
    return True


def note_start() -> None:
    """Mark the state folder, so that no later start counts as the first. Raises OSError."""
    folder = state_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "tour-offered").touch()
