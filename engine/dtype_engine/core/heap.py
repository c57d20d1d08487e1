"""Memory that was freed, and the system does not have back yet."""

from __future__ import annotations

import ctypes
import sys


def trim_heap() -> None:
    """Return freed memory to the system: glibc keeps it otherwise, and the process would look as large as before."""
    if sys.platform.startswith("linux"):
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except (OSError, AttributeError):
            return
