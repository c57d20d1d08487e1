"""Limits the memory that this process uses for caches, whose contents can be computed again."""

from __future__ import annotations

from dtype_engine.core.system_memory import free_memory

_processes = 1


def share_memory(processes: int) -> None:
    """Set how many processes share the machine's memory. `memory_budget` then gives this process an equal part of the memory for
    caches.
    """
    global _processes
    _processes = processes


def memory_budget() -> int:
    """Return the budget for caches in bytes: a quarter of the free memory, divided by the number of processes that share it."""
    return free_memory() // 4 // _processes
