"""How much memory this process may fill with what it could compute again."""

from __future__ import annotations

import psutil

_processes = 1


def share_memory(processes: int) -> None:
    """Say that so many processes share the machine's memory."""
    global _processes
    _processes = processes


def memory_budget() -> int:
    """Bytes: a quarter of what is free now, divided by the processes that share it."""
    return int(psutil.virtual_memory().available // 4 // _processes)
