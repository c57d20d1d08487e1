"""Writes the traceback of an unexpected error to a file, since such an error can't always be reproduced."""

from __future__ import annotations

import contextlib
import os
from datetime import UTC, datetime

from dtype_engine.core.text import printable
from dtype_engine.core.user_folders import state_folder


def recorded(error: BaseException) -> str:
    """Write an error's traceback to a new file, which only the user can read. Returns `, and so does FILE`, to be appended to a
    sentence about what shows where the error arose, or "" if the file can't be written.
    """
    import platform
    import traceback
    from importlib.metadata import version

    with contextlib.suppress(OSError, RuntimeError):
        now = datetime.now(UTC)
        folder = state_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"error-{now:%Y%m%d-%H%M%S-%f}-{os.getpid()}.log"
        of = f"dtype-tui {version('dtype-tui')}, Python {platform.python_version()}, {platform.platform()}"
        text = "".join(traceback.format_exception(error))
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(f"{of}, {now:%Y-%m-%d %H:%M:%S} UTC\n\n{text}")
        return f", and so does {printable(str(path), 500)}"
    return ""
