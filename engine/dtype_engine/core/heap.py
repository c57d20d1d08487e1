"""Returns freed memory to the operating system."""

from __future__ import annotations

import psutil


def trim_heap() -> None:
    """Return freed memory to the system. glibc would otherwise keep up to 64 MiB for each thread, and the process would seem as
    large as before.
    """
    if hasattr(psutil, "heap_trim"):  # psutil lacks it on systems whose C library is musl
        psutil.heap_trim()
