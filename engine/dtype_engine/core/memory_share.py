"""Limits the memory that this process uses for caches, whose contents can be computed again."""

from __future__ import annotations

import psutil

_processes = 1


def share_memory(processes: int) -> None:
    """Set how many processes share the machine's memory. `memory_budget` then gives this process an equal part of the memory for
    caches.
    """
    global _processes
    _processes = processes


def memory_budget() -> int:
    """Return the budget for caches in bytes: a quarter of the free memory, divided by the number of processes that share it."""
    return int(psutil.virtual_memory().available // 4 // _processes)
