"""Returns freed memory to the operating system."""

from __future__ import annotations

import ctypes
import sys

import psutil

_MMAP_THRESHOLD, _LARGE = -3, 1 << 20
"""glibc's name for a parameter of `mallopt`, and its value: memory of at least a MiB is mapped by itself."""


def trim_heap() -> None:
    """Return freed memory to the system. glibc would otherwise keep it, and the process would seem as large as before."""
    if hasattr(psutil, "heap_trim"):  # psutil lacks it on systems whose C library is musl
        psutil.heap_trim()


def return_large_memory() -> None:
    """Return large memory to the system as soon as it is freed, from now on. glibc would otherwise keep up to 64 MiB for each
    thread.

    `mallopt` is called by ctypes because glibc reads the environment variables for this setting only when a process starts. For
    example, a scan with `--over-memory` of a Llama of 0.70 GiB took 927 MiB of anonymous memory at its peak with this setting,
    1,556 MiB without it, and 1,220 MiB without it but with `trim_heap` after each block. Its private address space (VmData) was
    1,207, 1,831 and 1,863 MiB, in the same order.
    """
    _call("mallopt", _MMAP_THRESHOLD, _LARGE)


def _call(function: str, *numbers: int) -> None:
    if sys.platform.startswith("linux"):
        try:
            getattr(ctypes.CDLL(None), function)(*numbers)
        except (OSError, AttributeError):
            return
