"""Where both programs keep what is the user's: one state folder and one configuration folder, as the system has them."""

from __future__ import annotations

from pathlib import Path

_PROGRAM = "dtype-tui"


def state_folder() -> Path:
    """What is found again at the next start: sessions, scans, running engines (`$XDG_STATE_HOME/dtype-tui`)."""
    import platformdirs  # most commands need neither folder

    return platformdirs.user_state_path(_PROGRAM)


def config_folder() -> Path:
    """What the user writes (`$XDG_CONFIG_HOME/dtype-tui`)."""
    import platformdirs

    return platformdirs.user_config_path(_PROGRAM, appauthor=False)
