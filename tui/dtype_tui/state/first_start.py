"""Whether somebody starts the program for the first time."""

from __future__ import annotations

from dtype_engine.core.user_folders import state_folder


def is_first_start() -> bool:
    """True once: where nothing was kept yet, which is then noted. False where that can't be noted."""
    folder = state_folder()
    try:
        if folder.exists() and any(folder.iterdir()):
            return False
        note_start()
    except OSError:
        return False
    return True


def note_start() -> None:
    """From now on no start is the first. Raises OSError."""
    folder = state_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "tour-offered").touch()
