"""Ends the process without the interpreter's shutdown if torch was imported."""

from __future__ import annotations

import os
import sys


def exit_at_once(status: str | int | None) -> None:
    """End the process. If torch was imported, the interpreter's normal shutdown is skipped.

    The shutdown would abort the process if a thread that used torch is still ending. The terminal has been restored and the session
    saved before this is called.

    status: an exit status or an error message to print, as for `sys.exit`.
    """
    if "torch" not in sys.modules or isinstance(status, str):
        sys.exit(status)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status or 0)
