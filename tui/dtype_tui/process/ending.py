"""How the process ends."""

from __future__ import annotations

import os
import sys


def exit_at_once(status: str | int | None) -> None:
    """Exit without tearing the interpreter down, where torch was imported.

    Teardown aborts where a thread of torch's, or one that held tensors, is not quite gone, even where it has run its last line of
    Python. The terminal is restored and the session saved by now.

    `status` is what `sys.exit` was called with; a text is an error message, as there.
    """
    if "torch" not in sys.modules or isinstance(status, str):
        sys.exit(status)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status or 0)
