"""Whether a checkpoint fits into the memory of this machine. The answer needs no torch."""

from __future__ import annotations

from pathlib import Path

import psutil

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.core.units import human_bytes


def shortfall(checkpoint: Checkpoint) -> str | None:
    """A sentence that says why a checkpoint does not fit into memory; None where it fits.

    Weights are mapped from their files, so the limit is the memory of the machine and not what is free now. With less memory than
    that, every pass would read the whole checkpoint from the disk again.
    """
    most = total_memory()
    if checkpoint.stored_bytes <= most:
        return None
    return (
        f"no forward pass: the weights take {human_bytes(checkpoint.stored_bytes)} and this machine has {human_bytes(most)} of "
        "memory. Planning, patterns, weights and export work; a machine or a limit with more memory would run it"
    )


def total_memory() -> int:
    """The bytes of memory that this process may use: all of the machine's, or the limit of its control group."""
    most = int(psutil.virtual_memory().total)
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            most = min(most, int(Path(limit).read_text()))
        except (OSError, ValueError):
            continue
    return most
