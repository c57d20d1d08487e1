"""Checks whether a checkpoint fits into this machine's memory. Does not import torch."""

from __future__ import annotations

from pathlib import Path

import psutil

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.core.units import human_bytes


def shortfall(checkpoint: Checkpoint) -> str | None:
    """Return a sentence that says why a checkpoint does not fit into memory, or None if it fits.

    Weights are mapped from their files, so the limit is the machine's total memory, not the free memory. If the checkpoint is
    larger than the total memory, every pass would read the whole checkpoint from disk again.
    """
    if checkpoint.headers_alone:
        return f"no forward pass: {checkpoint.headers_alone}. {fit(checkpoint.stored_bytes)}"
    most = total_memory()
    if checkpoint.stored_bytes <= most:
        return None
    return (
        f"no forward pass: the weights take {human_bytes(checkpoint.stored_bytes)} and this machine has {human_bytes(most)} of "
        "memory. Planning, patterns, weights and export work; a machine or a limit with more memory would run it"
    )


def fit(nbytes: int) -> str:
    """Return a sentence that says whether weights of `nbytes` bytes fit into this machine's memory."""
    most = total_memory()
    verb = "fit into" if nbytes <= most else "do not fit into"
    return f"Weights of {human_bytes(nbytes)} {verb} this machine's {human_bytes(most)} of memory"


def total_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's total memory, or its control group's limit."""
    most = int(psutil.virtual_memory().total)
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            most = min(most, int(Path(limit).read_text()))
        except (OSError, ValueError):
            continue
    return most
