"""Whether a checkpoint has room in this machine's memory, found out before torch is imported."""

from __future__ import annotations

from pathlib import Path

import psutil

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.core.units import human_bytes


def shortfall(checkpoint: Checkpoint) -> str | None:
    """Why a checkpoint can't be loaded for want of memory, in a sentence; None when there is room.

    Weights are mapped from their files, so what counts is all the memory there is, not what is free now: with less, every
    pass would read the whole checkpoint from the disk again.
    """
    most = total_memory()
    if checkpoint.stored_bytes <= most:
        return None
    return (
        f"no forward pass: the weights take {human_bytes(checkpoint.stored_bytes)} and this machine has {human_bytes(most)} of "
        "memory. Planning, patterns, weights and export work; a machine or a limit with more memory would run it"
    )


def total_memory() -> int:
    """Bytes of memory this process may use: the machine's, or its control group's limit."""
    most = int(psutil.virtual_memory().total)
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            most = min(most, int(Path(limit).read_text()))
        except (OSError, ValueError):
            continue
    return most
