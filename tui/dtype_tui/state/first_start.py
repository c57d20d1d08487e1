"""Whether somebody starts the program for the first time."""

from __future__ import annotations

from pathlib import Path


def state_folder() -> Path:
    """Where the program keeps what it should find again, for this user."""
    import platformdirs

    return platformdirs.user_state_path("dtype-tui")


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
