"""Measured memory, in bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """The memory of a model and of the process, in bytes; None for what is not known."""

    stored_bytes: int | None = None
    """The tensors in the checkpoint."""
    planned_bytes: int | None = None
    """The same tensors in the dtypes of the recipe."""
    resident_bytes: int | None = None
    """The tensors of the live module, non-persistent buffers included."""
    resident_by_device: tuple[tuple[str, int], ...] = ()
    rss_bytes: int | None = None
    """The resident set of the process."""
    anonymous_bytes: int | None = None
    """The part of it that no file backs."""
    mapped_bytes: int | None = None
    """The part of it that is mapped from the files of the checkpoint. The system can reclaim it."""
    peak_rss_bytes: int | None = None
    """The largest resident set since the last operation began."""
    device_allocated_bytes: int | None = None
    device_reserved_bytes: int | None = None
    device_peak_bytes: int | None = None
    kept_bytes: int | None = None
    """Outputs that are kept to make the next measurement faster. They are part of the memory of the process or the device."""
    kept_budget_bytes: int | None = None
    """The limit for `kept_bytes`."""
