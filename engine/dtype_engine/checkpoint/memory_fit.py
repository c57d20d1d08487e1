"""Checks whether a checkpoint fits into this machine's memory, and how long it takes to read. Does not import torch."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.core.hints import hint
from dtype_engine.core.options import ModelOptions
from dtype_engine.core.system_memory import total_memory
from dtype_engine.core.units import human_bytes, time_left

_STEP, _MOST_TIMED, _TIMED_S = 1 << 20, 256 << 20, 0.3
"""How a disk's speed is measured: the bytes of each read, and the bytes or seconds after which the measurement ends."""


def why_no_pass(checkpoint: Checkpoint, options: ModelOptions) -> str | None:
    """Return why a checkpoint is not run with these options (the sentence of `shortfall`), or None if it is run."""
    if options.over_memory and not checkpoint.headers_alone:
        return None
    return shortfall(checkpoint, options.max_memory)


def shortfall(checkpoint: Checkpoint, limits: Mapping[str, int]) -> str | None:
    """Return a sentence that says why a checkpoint does not fit into memory and how long a pass from the disk would take, or None
    if it fits. Weights are mapped, so the limit is the total memory. limits: the maximum bytes to use of each device, such as
    "cpu".
    """
    if checkpoint.headers_alone:
        return f"no forward pass: {checkpoint.headers_alone}. {fit(checkpoint.stored_bytes)}"
    most = usable_memory(limits)
    if checkpoint.stored_bytes <= most:
        return None
    limited = "may use" if "cpu" in limits else "has"
    sentence = (
        f"no forward pass: the weights take {human_bytes(checkpoint.stored_bytes)} and this machine {limited} "
        f"{human_bytes(most)} of memory. Planning, patterns, weights and export work"
    )
    if not checkpoint.of_transformers or checkpoint.form == "pickle":
        return sentence  # only modules of transformers run block by block, and a pickle is read as a whole
    speed = disk_speed(max(checkpoint.files, key=lambda file: file.stat().st_size))
    if speed is None:
        return sentence
    seconds = time_left(checkpoint.stored_bytes / speed)
    return (
        f"{sentence}; {hint('over-memory')} runs it from the disk, which reads all weights once for the reference and once for "
        f"each recipe: at least {seconds} each at the {human_bytes(speed)}/s measured now; computing often takes longer"
    )


def disk_speed(file: Path) -> float | None:
    """Measure and return how many bytes per second are read from the middle of a file on its disk. None if it can't be measured."""
    if not hasattr(os, "posix_fadvise"):
        return None
    try:
        with open(file, "rb", buffering=0) as opened:
            start, done, buffer = os.fstat(opened.fileno()).st_size // 2, 0, bytearray(_STEP)
            os.posix_fadvise(opened.fileno(), start, _MOST_TIMED, os.POSIX_FADV_DONTNEED)
            opened.seek(start)
            began = time.perf_counter()
            while done < _MOST_TIMED and time.perf_counter() - began < _TIMED_S and (count := opened.readinto(buffer)):
                done += count
            return done / (time.perf_counter() - began) if done else None
    except OSError:
        return None


def usable_memory(limits: Mapping[str, int]) -> int:
    """Return the bytes of memory that models may use: the machine's memory or, if it is less, the limit for "cpu" in `limits`."""
    return min(total_memory(), limits.get("cpu", total_memory()))


def fit(nbytes: int) -> str:
    """Return a sentence that says whether weights of `nbytes` bytes fit into this machine's memory."""
    most = total_memory()
    verb = "fit into" if nbytes <= most else "do not fit into"
    return f"Weights of {human_bytes(nbytes)} {verb} this machine's {human_bytes(most)} of memory"
