"""The folders for this program's state, configuration and cache, at the usual places of the operating system."""

from __future__ import annotations

import os
from pathlib import Path

_PROGRAM = "dtype-tui"
HEADERS = "headers"
"""The folder in the cache folder that holds the headers of models on a hub."""


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with a leading `~` or `~name` replaced by that user's home folder, or unchanged if there is no such user, as in
    a shell. (`Path.expanduser` raises RuntimeError then.)
    """
    try:
        return Path(os.path.expanduser(path))
    except ValueError:  # a null character or half of a surrogate pair, which no user's name has
        return Path(path)


def state_folder() -> Path:
    """Return the folder for data that a later start reuses: sessions, scans, statistics of roundings, running engines
    (`$XDG_STATE_HOME/dtype-tui`).
    """
    import platformdirs  # imported here because most commands need neither folder

    return platformdirs.user_state_path(_PROGRAM)


def config_folder() -> Path:
    """Return the folder for configuration files that the user writes (`$XDG_CONFIG_HOME/dtype-tui`)."""
    import platformdirs

    return platformdirs.user_config_path(_PROGRAM, appauthor=False)


def cache_folder() -> Path:
    """Return the folder for data that can be fetched again, such as headers from a hub (`$XDG_CACHE_HOME/dtype-tui`)."""
    import platformdirs

    return platformdirs.user_cache_path(_PROGRAM, appauthor=False)
