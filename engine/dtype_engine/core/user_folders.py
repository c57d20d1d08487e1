"""The state folder and the configuration folder of the user, which both programs share, at the system's usual places."""

from __future__ import annotations

from pathlib import Path

_PROGRAM = "dtype-tui"


def state_folder() -> Path:
    """The folder for what a later start uses again: sessions, scans, running engines (`$XDG_STATE_HOME/dtype-tui`)."""
    import platformdirs  # imported here because most commands need neither folder

    return platformdirs.user_state_path(_PROGRAM)


def config_folder() -> Path:
    """The folder for configuration that the user writes (`$XDG_CONFIG_HOME/dtype-tui`)."""
    import platformdirs

    return platformdirs.user_config_path(_PROGRAM, appauthor=False)
